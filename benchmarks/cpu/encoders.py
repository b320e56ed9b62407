"""Vectors of texts on a CPU: Quire beside transformers and vLLM-CPU, in alternating runs of one process each.

    python -m benchmarks.cpu.encoders --model FOLDER [--vllm PYTHON] [--rounds 5] [--output FILE.json]

FOLDER is a checkpoint of an encoder that is pooled by the mean, such as all-MiniLM-L6-v2; PYTHON that of an environment
with vLLM, which needs nothing of Quire's. Texts are random token ids, all of one length, as many at once as a row says.
Every engine stays loaded, and only one works at a time. A figure is the median of the rounds; ratios are of medians.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTHS, COUNTS, DTYPES = (16, 128, 256), (1, 512), ("float32", "bfloat16")
BATCH = 64  # of transformers, which pads nothing here
ONES = 20  # calls with one text that make a figure

Texts = list[list[int]]
Encode = Callable[[Texts], Any]


def quire(model: str, dtype: str) -> Encode:
    from quire import LLM

    llm = LLM(model, dtype=dtype, skip_tokenizer_init=True)
    return lambda texts: llm.embed([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)


def vllm(model: str, dtype: str) -> Encode:
    from vllm import LLM

    llm = LLM(model, dtype=dtype, runner="pooling", gpu_memory_utilization=0.3)
    return lambda texts: llm.embed([{"prompt_token_ids": ids} for ids in texts], use_tqdm=False)


def transformers(model: str, dtype: str) -> Encode:
    import torch
    from transformers import AutoModel

    network = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def encode(texts: Texts) -> Any:
        found = []
        with torch.inference_mode():
            for start in range(0, len(texts), BATCH):
                hidden = network(torch.tensor(texts[start : start + BATCH])).last_hidden_state
                found.append(torch.nn.functional.normalize(hidden.float().mean(1), dim=1))
        return found

    return encode


ENGINES = {"quire": quire, "transformers": transformers, "vllm": vllm}


def serve(engine: str, model: str, dtype: str) -> None:
    """In a process of its own: answers (length, count, seed) with seconds for all those texts."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer
    encode = ENGINES[engine](model, dtype)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        length, count, seed = json.loads(line)
        chance = random.Random(seed)
        calls = [
            [[chance.randrange(1000, 20000) for _ in range(length)] for _ in range(count)]
            for _ in range(ONES if count == 1 else 1)
        ]
        seconds = []
        for texts in calls:
            began = time.perf_counter()
            encode(texts)
            seconds.append(time.perf_counter() - began)
        print(json.dumps(statistics.median(seconds)), file=answers, flush=True)


def vllm_environment(python: str) -> dict[str, str]:
    """All cores, which it does not use by itself, and the libraries that its documentation asks for."""
    libraries = Path(python).parent.parent / "lib"
    allocators = [*libraries.glob("libtcmalloc_minimal.so.4"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    wanted = [*libraries.glob("libiomp5.so"), *allocators[:1]]
    return {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "LD_PRELOAD": ":".join(map(str, wanted))}


class Engine:
    def __init__(self, python: str, name: str, model: str, dtype: str) -> None:
        command = [python, "-m", "benchmarks.cpu.encoders", "--serve", name, "--model", model, "--dtypes", dtype]
        self.name = name
        environment = os.environ | (vllm_environment(python) if name == "vllm" else {})
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def seconds(self, length: int, count: int, seed: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps((length, count, seed)), file=self.process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def measure(engines: list[Engine], dtype: str, lengths: list[int], count: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        for number in sorted({1, count}):
            taken: dict[str, list[float]] = {engine.name: [] for engine in engines}
            for engine in engines:
                engine.seconds(length, number, 0)
            for seed in range(1, rounds + 1):
                for engine in engines:
                    taken[engine.name].append(engine.seconds(length, number, seed))
            medians = {name: statistics.median(values) for name, values in taken.items()}
            rows.append({"dtype": dtype, "tokens": length, "texts": number, "seconds": medians, "all": taken})
            show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    ours, one = row["seconds"]["quire"], row["texts"] == 1
    figures = ", ".join(
        f"{name} {seconds * 1e3:.2f} ms" if one else f"{name} {row['texts'] / seconds:.0f}/s"
        for name, seconds in row["seconds"].items()
    )
    ratios = ", ".join(f"{s / ours:.2f} x {name}" for name, s in row["seconds"].items() if name != "quire")
    print(f"{row['dtype']} {row['tokens']} tokens x {row['texts']}: {figures}; {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--count", type=int, default=COUNTS[-1], help="texts at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.dtypes[0])
        return
    pythons = {"quire": sys.executable, "transformers": sys.executable} | ({"vllm": args.vllm} if args.vllm else {})
    rows = []
    for dtype in args.dtypes:
        engines = [Engine(python, name, args.model, dtype) for name, python in pythons.items()]
        try:
            rows += measure(engines, dtype, args.lengths, args.count, args.rounds)
        finally:
            for engine in engines:
                engine.close()
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
