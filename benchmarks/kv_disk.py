"""What a disk tier of the KV cache gains after a restart: a long prompt computed, and found in the folder.

    python -m benchmarks.kv_disk [--rounds 3] [--tokens 4000] [--model MODEL] [--folder FOLDER] [--out FILE.json]

Each round starts three servers: one without a folder, one that fills it, and one that finds it filled. Each gets one
prompt that none had before it, after a short one that warms it up; the time is to the end of a one-token answer.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from quire.bench.machine import describe_machine
from quire.bench.serve_child import serving


def answer(url: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        usage = json.load(response)["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return time.perf_counter() - began, details.get("cached_tokens", 0)


def serve_once(options: dict[str, Any], prompt: list[int], draw: random.Random) -> dict[str, float]:
    with serving(options, ["--enable-prompt-tokens-details"]) as child:
        answer(child.url, [draw.randrange(10, 30000) for _ in range(40)])
        seconds, cached = answer(child.url, prompt)
    return {"seconds": seconds, "cached": cached, "start_up": child.start_up_seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--model")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; a folder inside is made and removed")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    common = {"max_model_len": given.tokens + 64, **({"model": given.model} if given.model else {})}
    results: dict[str, list[dict[str, float]]] = {"computed": [], "written": [], "restarted": []}
    for number in range(given.rounds):
        draw = random.Random(number)
        prompt = [draw.randrange(10, 30000) for _ in range(given.tokens)]
        folder = tempfile.mkdtemp(prefix="kv-", dir=given.folder)
        with_folder = common | {"kv_offloading_path": folder}
        try:
            for name, options in (("computed", common), ("written", with_folder), ("restarted", with_folder)):
                results[name].append(serve_once(options, prompt, draw))
                print(name, results[name][-1], flush=True)
        finally:
            shutil.rmtree(folder)
    medians = {name: statistics.median(one["seconds"] for one in found) for name, found in results.items()}
    print({**medians, "restarted / computed": medians["restarted"] / medians["computed"]})
    if given.out:
        record = {"machine": describe_machine(probe=False), "tokens": given.tokens, "results": results}
        given.out.write_text(json.dumps(record | {"median_seconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()
