"""Two ranks of one thread each against one process of two threads, on a CPU: python -m benchmarks.tensor_parallel

Qwen3-0.6B's shape with random weights. The engines take turns, each started anew, so that either has all cores.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.bench.machine import describe_machine
from quire.bench.workloads import MODEL_SHAPES

SIDES: dict[str, dict[str, Any]] = {"one process": {}, "two ranks": {"tensor_parallel_size": 2}}


def measure(folder: str, dtype: str, **options: Any) -> dict[str, float]:
    """Tokens per second: of decoding alone and 16 at once, and of prompts."""
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype, cpu_threads=2, max_model_len=1024,
        kv_cache_memory_bytes=1 << 30, use_tqdm_on_load=False, enable_prefix_caching=False, **options,
    )  # fmt: skip
    found = {}
    with llm:

        def seconds(requests: int, prompt: int, length: int) -> float:
            prompts = [{"prompt_token_ids": [7 + i] * prompt} for i in range(requests)]
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - began

        seconds(2, 16, 8)
        for requests, length in ((1, 48), (16, 24)):
            rest = seconds(requests, 16, length) - seconds(requests, 16, 1)
            found[f"decode, {requests}"] = requests * (length - 1) / rest
        found["prompt of 512"] = 512 / seconds(1, 512, 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_SHAPES["qwen3-0.6b"]), "utf-8")
        for _ in range(args.rounds):
            runs.append({side: measure(folder, args.dtype, **options) for side, options in SIDES.items()})
            print(json.dumps(runs[-1]), flush=True)
    one, two = SIDES
    ratios = {name: statistics.median(run[two][name] / run[one][name] for run in runs) for name in runs[0][one]}
    for name, ratio in ratios.items():
        print(f"{name:16} {ratio:.2f} x")
    if args.out is not None:
        facts = {"machine": describe_machine(probe=False), "runs": runs, "ratios": ratios}
        args.out.write_text(json.dumps(facts, indent=1), "utf-8")


if __name__ == "__main__":
    main()
