"""Vectors of texts on a GPU: python -m benchmarks.gpu.embeddings [--model qwen3-0.6b] [--out FILE.json]

A decoder's shape with random weights, pooled at the last token as Qwen3-Embedding is: 2,048 texts of 512 token ids at
once, one text of 32, and such prompts generating one token each, which is the rate to compare with. Medians of rounds.
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
    parser.add_argument("--rounds", type=int, default=3, help="measured ones, after a warm-up (default: %(default)s)")
    parser.add_argument("--no-generate", dest="generate", action="store_false", help="leave the comparison out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw, vocabulary = random.Random(0), shape_of(args.model)["vocab_size"]

    def texts(count: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": [draw.randrange(100, vocabulary) for _ in range(length)]} for _ in range(count)]

    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    # Every round has texts of its own, so that none is found in the cache. The first is the warm-up.
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args.model, Path(folder), cpu=not torch.cuda.is_available())
        if args.model != TINY:
            options["max_model_len"] = 1024
        began = time.perf_counter()
        with LLM(**options, runner="pooling", convert="embed") as llm:
            note("start, s", time.perf_counter() - began)
            for measured in [False] + [True] * args.rounds:
                given, ones = texts(args.texts, 512), [texts(1, 32) for _ in range(ONES)]
                seconds = timed(lambda: llm.embed(given, use_tqdm=False))  # noqa: B023
                each = [timed(lambda: llm.embed(one, use_tqdm=False)) for one in ones]  # noqa: B023
                if measured:
                    note("512 tokens, tok/s", args.texts * 512 / seconds)
                    note("32 tokens, ms", 1e3 * statistics.median(each))
        if args.generate:
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            with LLM(**options) as llm:
                for measured in [False] + [True] * args.rounds:
                    given = texts(args.texts, 512)
                    seconds = timed(lambda: llm.generate(given, params, use_tqdm=False))  # noqa: B023
                    if measured:
                        note("the same texts as prompts, tok/s", args.texts * 512 / seconds)
    report = {name: {"median": statistics.median(values), "rounds": values} for name, values in found.items()}
    print(json.dumps(report, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": describe_machine(probe=False), **report}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
