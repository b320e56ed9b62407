"""How long an engine takes to fall asleep and to wake: python -m benchmarks.sleep [--model llama3-8b] [--out FILE.json]

A shape of the card with random weights at level 1, where weights go to host memory, some times in a row. After waking a
request must have the text of before.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import torch

from quire import LLM, SamplingParams
from quire.bench.internal.card.models import engine_options
from quire.bench.machine import describe_machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a shape of the card (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(args.model, Path(folder), cpu=not torch.cuda.is_available())
        with LLM(**options, enable_sleep_mode=True) as llm:

            def text() -> list[int]:
                return list(llm.generate([[100, 200, 300]], params, use_tqdm=False)[0].outputs[0].token_ids)

            before = text()
            for _ in range(args.rounds):
                times = [time.perf_counter()]
                llm.sleep(level=1)
                times.append(time.perf_counter())
                llm.wake_up()
                times.append(time.perf_counter())
                after = text()
                times.append(time.perf_counter())
                assert after == before, "another text after sleeping"
                names = ("sleep, s", "wake, s", "16 tokens after, s")
                rounds.append({name: b - a for name, (a, b) in zip(names, itertools.pairwise(times), strict=True)})
    print(json.dumps(rounds, indent=1))
    if args.out is not None:
        record = {"machine": describe_machine(probe=False), "model": args.model, "rounds": rounds}
        args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
