"""What options add to a start: processes with and without them in turns, from the start to the first token.

    python -m benchmarks.gpu.starts [--pairs 3] [--json FILE] [--tiny]

One start of each is not counted: it compiles kernels. With --cold one more is, with an empty cache.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from quire.bench.internal.card.models import TINY, engine_options
from quire.bench.machine import describe_machine
from quire.bench.startup import start_cold, start_once

PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
# By name: the model, what both have, and what one of them has more.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cpu tier": ("qwen3-0.6b", {"kv_offloading_size": 0}, {"kv_offloading_size": None}),
    "adapters": ("llama3-8b", {}, {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help="names, with commas between")
    parser.add_argument("--cold", action="store_true", help="also one start of each with an empty cache")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to try this program")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": describe_machine(probe=False)}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.cases.split(","):
            model, both, more = CASES[name]
            options = engine_options(TINY if args.tiny else model, Path(folder), cpu=args.tiny) | both
            found[name] = compare(options, options | more, args.pairs, args.cold)
            print(name, json.dumps(found[name]["total, s"]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n")


def compare(without: dict[str, Any], having: dict[str, Any], pairs: int, cold: bool) -> dict[str, Any]:
    arms = {"without": without, "with": having}
    runs: dict[str, Any] = {name: [] for name in arms}
    found: dict[str, Any] = {"options": arms}
    if cold:
        found["cold"] = {name: start_cold(options, PROMPT) for name, options in arms.items()}
    for options in arms.values():
        start_once(options, prompt=PROMPT)
    for pair in range(pairs):
        for name in list(arms) if pair % 2 == 0 else reversed(arms):
            runs[name].append(start_once(arms[name], prompt=PROMPT))
    totals = {name: [sum(phases.values()) for phases in each] for name, each in runs.items()}
    medians = {name: statistics.median(each) for name, each in totals.items()}
    return found | {"runs": runs, "total, s": totals | {"median added": medians["with"] - medians["without"]}}


if __name__ == "__main__":
    main()
