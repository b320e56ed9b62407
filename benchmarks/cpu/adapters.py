"""Adapters on a CPU: python -m benchmarks.cpu.adapters [--traffic]

Without arguments: SmolLM2 in bf16 with four adapters of rank 8 on all linear layers against the same engine's requests
without one, taking turns. `--traffic`: 200 adapters and 16 slots, requests at random; each answer is compared with what
its adapter gave alone, and gaps between tokens of running requests are compared with those of the same traffic for
adapters that stay in their slots.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.adapter_files import make_adapter
from quire import LLM, SamplingParams
from quire.bench.machine import describe_machine
from quire.messages.sampling_params import RequestOutputKind

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
}


def pairs(folder: Path, rounds: int) -> dict[str, Any]:
    loras = [make_adapter(folder, number, SMOLLM2) for number in range(1, 5)]
    options = {"dtype": "bfloat16", "max_model_len": 1024, "enable_prefix_caching": False}
    with LLM(quantization="dequantized", enable_lora=True, max_loras=4, max_lora_rank=8, **options) as llm:

        def rate(requests: int, length: int, adapted: bool) -> float:
            prompts = [{"prompt_token_ids": [100 + i] * 32} for i in range(requests)]
            chosen = [loras[i % 4] if adapted else None for i in range(requests)]

            def seconds(count: int) -> float:
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                began = time.perf_counter()
                llm.generate(prompts, params, False, chosen)
                return time.perf_counter() - began

            return requests * (length - 1) / (seconds(length) - seconds(1))

        rate(4, 8, True)
        runs = []
        for number in range(rounds):
            run = {}
            for requests, length in ((1, 64), (64, 48)):
                order = (False, True) if number % 2 == 0 else (True, False)
                rates = {adapted: rate(requests, length, adapted) for adapted in order}
                run[f"decode of {requests}"] = [rates[False], rates[True]]
            print(json.dumps(run), flush=True)
            runs.append(run)
    ratios = {name: statistics.median(run[name][1] / run[name][0] for run in runs) for name in runs[0]}
    return {"runs": runs, "with adapters / without": ratios}


def traffic(folder: Path, seconds: float) -> dict[str, Any]:
    loras = [make_adapter(folder, number, SMOLLM2, alpha=256) for number in range(1, 201)]
    options = {"dtype": "float32", "quantization": "dequantized", "max_model_len": 256}
    sizes = {"max_loras": 16, "max_cpu_loras": 64, "max_lora_rank": 8}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(enable_lora=True, **sizes, **options) as llm:
        prompt = {"prompt_token_ids": list(range(100, 116))}
        expected = [llm.generate([prompt], params, False, lora)[0].outputs[0].token_ids for lora in loras]
        distinct = len({tuple(text) for text in expected})
        assert distinct > 190, f"only {distinct} of 200 texts differ: answers would say little"
        engine = llm.llm_engine
        found = {}
        for name, chosen in (("16 adapters", range(16)), ("200 adapters", range(200))):
            chance, wrong, count, gaps = random.Random(0), 0, 0, []
            asked: dict[str, int] = {}
            last: dict[str, float] = {}
            streamed = params.replace_unchecked(output_kind=RequestOutputKind.CUMULATIVE)
            ends = time.perf_counter() + seconds
            while asked or time.perf_counter() < ends:
                while len(asked) < 8 and time.perf_counter() < ends:
                    which, count = chance.choice(chosen), count + 1
                    asked[f"{name} {count}"] = which
                    engine.add_request(f"{name} {count}", prompt, streamed, lora_request=loras[which])
                for output in engine.step():
                    now = time.perf_counter()
                    if output.request_id in last:
                        gaps.append(now - last[output.request_id])
                    last[output.request_id] = now
                    if output.finished:
                        which = asked.pop(output.request_id)
                        wrong += output.outputs[0].token_ids != expected[which]
            gaps.sort()
            found[name] = {
                "requests": count,
                "wrong": wrong,
                "gap p50 / p99 / longest, ms": [
                    round(1000 * gaps[int(len(gaps) * part) - (part == 1)], 1) for part in (0.5, 0.99, 1)
                ],
                "evicted": engine.stats.adapters.num_evicted if engine.stats.adapters else 0,
            }
            print(json.dumps({name: found[name]}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traffic", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120.0, help="of each traffic")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        found = traffic(path, args.seconds) if args.traffic else pairs(path, args.rounds)
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": describe_machine(probe=False), **found}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
