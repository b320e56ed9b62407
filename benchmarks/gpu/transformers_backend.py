"""Our own model and transformers' code for the same shape, side by side: python benchmarks/gpu/transformers_backend.py

Random weights; 256 requests of 256 prompt and 256 output tokens, the best of three runs each.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from quire import LLM, SamplingParams
from quire.bench.workloads import MODEL_SHAPES


def tokens_per_second(folder: str, implementation: str, requests: int, length: int) -> float:
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    best = 0.0
    with LLM(
        folder,
        model_impl=implementation,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4 * length,
        max_num_seqs=requests,
        enable_prefix_caching=False,
    ) as llm:
        for _ in range(3):
            prompts = [
                {"prompt_token_ids": [rng.randrange(100, 30_000) for _ in range(length)]} for _ in range(requests)
            ]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best = max(best, requests * length / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(MODEL_SHAPES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=256, help="tokens of prompt and of output")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_SHAPES[args.model]), "utf-8")
        found = {
            name: tokens_per_second(folder, name, args.requests, args.length) for name in ("quire", "transformers")
        }
    for name, rate in found.items():
        print(f"{name:>12}: {rate:10,.0f} output tokens/s")
    print(f"transformers' code reaches {found['transformers'] / found['quire']:.0%}")


if __name__ == "__main__":
    main()
