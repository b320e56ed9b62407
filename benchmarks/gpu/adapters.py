"""What adapters cost on a GPU: python -m benchmarks.gpu.adapters [--model llama3-8b] [--rank 16] [--out FILE.json]

The card's `b1`, `nano` (greedy) and `prefill`, by an engine without adapters and by one with `--enable-lora`, there for
requests without an adapter, with one, and with eight taking turns. Also the first use of an adapter that is in the
page cache, beyond what the same request takes later, and both engines' start-up. Weights and adapters are random.
`--profile`: kernels of decode steps of one and 256 requests, and of 8 prompts of 2,048, with adapters.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.adapter_files import make_adapter
from quire.bench.internal.card.models import TINY, engine_options, shape_of
from quire.bench.internal.card.workloads import BEST_OF, Caller, cut, decode_seconds
from quire.bench.machine import describe_machine
from quire.bench.workloads import Workload
from quire.messages.lora import LoRARequest

ADAPTERS = 8
TOP = 14


def run(
    model: str, rank: int, enabled: bool, rounds: int, profiled: bool, tier_gib: float | None, folder: str
) -> dict[str, Any]:
    """In a process of its own: one engine."""
    import torch

    from quire import LLM, SamplingParams

    began = time.perf_counter()
    options = engine_options(model, Path(folder), cpu=not torch.cuda.is_available())
    lora: dict[str, Any] = {"enable_lora": True, "max_loras": ADAPTERS, "max_lora_rank": rank} if enabled else {}
    tier = {} if tier_gib is None else {"kv_offloading_size": tier_gib}
    with LLM(**options, **lora, **tier) as llm:
        found: dict[str, Any] = {"start, s": time.perf_counter() - began}
        caller = Caller(llm, shape_of(model)["vocab_size"], tiny=model == TINY)

        def seconds(workload: Workload, adapters: list[LoRARequest]) -> float:
            llm.reset_prefix_cache()
            chosen = [adapters[i % len(adapters)] if adapters else None for i in range(len(workload.prompts))]
            params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in workload.output_lens]
            started = time.perf_counter()
            llm.generate(workload.prompts, params, use_tqdm=False, lora_request=chosen if enabled else None)
            return time.perf_counter() - started

        caller.warm_up(long=True)
        found["without"] = [rows(caller, lambda workload: seconds(workload, [])) for _ in range(rounds)]
        if enabled:
            config = shape_of(model)
            adapters = [
                make_adapter(Path(folder), n, config, rank, dtype=torch.bfloat16) for n in range(1, ADAPTERS + 1)
            ]
            short = cut(caller.gpu_workload("b1"), 1)
            seconds(short, adapters[:1])
            first = [seconds(short, [adapter]) - seconds(short, [adapter]) for adapter in adapters[1:]]
            found["first use, s"] = sorted(first)
            seconds(caller.gpu_workload("prefill"), adapters)
            found["one adapter"] = [
                one_request(caller, lambda workload: seconds(workload, adapters[:1])) for _ in range(rounds)
            ]
            found["eight adapters"] = [
                many(caller, lambda workload: seconds(workload, adapters)) for _ in range(rounds)
            ]
            if profiled:
                found["profile"] = profile(llm, config["vocab_size"], adapters, tiny=model == TINY)
    return found


def profile(llm: Any, vocab_size: int, adapters: list[LoRARequest], tiny: bool) -> list[dict[str, Any]]:
    from quire.bench.internal.card.profile import profile_decode, profile_prompts, profile_text

    found = [profile_decode(llm, vocab_size, n, tiny=tiny, adapters=adapters[:n]) for n in (1, 16 if tiny else 256)]
    print("\n".join(profile_text("adapters", one) for one in found), flush=True)
    found.append(profile_prompts(llm, vocab_size, 8, 16 if tiny else 2048, adapters))
    for kernel in found[-1]["device"]["kernels"][:TOP]:
        print(f"{kernel['step']:9.0f} us {kernel['per_step']:6.0f} x {kernel['name'][:90]}", flush=True)
    return found


def rows(caller: Caller, seconds: Callable[[Workload], float]) -> dict[str, float]:
    return one_request(caller, seconds) | many(caller, seconds)


def one_request(caller: Caller, seconds: Callable[[Workload], float]) -> dict[str, float]:
    one = caller.gpu_workload("b1")
    first = min(seconds(cut(one, 1)) for _ in range(BEST_OF))
    last = min(seconds(one) for _ in range(BEST_OF))
    return {"b1, ms a token": 1e3 * decode_seconds(first, last) / (one.output_lens[0] - 1)}


def many(caller: Caller, seconds: Callable[[Workload], float]) -> dict[str, float]:
    nano, prefill = caller.gpu_workload("nano"), caller.gpu_workload("prefill")
    return {
        "nano greedy, tok/s": nano.num_output_tokens / seconds(nano),
        "prefill, tok/s": prefill.num_prompt_tokens / seconds(prefill),
    }


def child(pipe: Any, *given: Any) -> None:
    pipe.send(run(*given))


def in_process(*given: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(far, *given))
    process.start()
    far.close()
    found: dict[str, Any] = near.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="a dense shape of the card (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--tier-gib", type=float, help="--kv-offloading-size (default: an engine's)")
    parser.add_argument("--only", choices=("base", "enable_lora"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    for name, enabled in (("base", False), ("enable_lora", True)):
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = in_process(args.model, args.rank, enabled, args.rounds, args.profile, args.tier_gib, folder)
            shown = {key: value for key, value in found[name].items() if key != "profile"}
            print(name, json.dumps(shown), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": describe_machine(probe=False), **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
