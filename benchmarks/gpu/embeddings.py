"""Vectors of texts on a GPU: python -m benchmarks.gpu.embeddings [--model qwen3-0.6b] [--out FILE.json]

A decoder's shape with random weights, pooled at the last token as Qwen3-Embedding is: 2,048 texts of 512 token ids at
once, one text of 32, and the same prompts generating one token each, which is the rate to compare with.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quire import LLM, SamplingParams
from quire.bench.internal.card.models import TINY, engine_options, shape_of
from quire.bench.machine import describe_machine

ONES = 50


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of the card (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw, vocabulary = random.Random(0), shape_of(args.model)["vocab_size"]

    def texts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": [draw.randrange(100, vocabulary) for _ in range(length)]} for _ in range(count)]

    found: dict[str, Any] = {"512 tokens, tok/s": [], "32 tokens, ms": []}
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args.model, Path(folder), cpu=not torch.cuda.is_available())
        if args.model != TINY:
            options["max_model_len"] = 1024
        with LLM(**options, runner="pooling", convert="embed") as llm:
            llm.embed(texts(64, 512), use_tqdm=False)
            llm.embed(texts(1, 32), use_tqdm=False)
            for _ in range(args.rounds):
                given = texts(args.texts, 512)
                found["512 tokens, tok/s"].append(args.texts * 512 / timed(lambda: llm.embed(given, use_tqdm=False)))  # noqa: B023
                ones = [texts(1, 32) for _ in range(ONES)]
                each = [1e3 * timed(lambda: llm.embed(one, use_tqdm=False)) for one in ones]  # noqa: B023
                found["32 tokens, ms"].append(statistics.median(each))
        with LLM(**options) as llm:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            llm.generate(texts(64, 512), params, use_tqdm=False)
            given = texts(args.texts, 512)
            seconds = timed(lambda: llm.generate(given, params, use_tqdm=False))
            found["the same texts as prompts, tok/s"] = args.texts * 512 / seconds
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": describe_machine(probe=False), **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
