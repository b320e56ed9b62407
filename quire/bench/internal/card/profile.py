"""Profiles a decode step: time on the engine's thread, on the worker's, and on the device by kernel.

A steady batch decodes; some steps are timed by wrapping the calls between the engine's parts, then some more run under
torch's profiler.
"""

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from quire.bench.workloads import FIRST_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    from quire import LLM
    from quire.messages.lora import LoRARequest

BATCHES = [1, 64, 256]
PROMPT_LEN = 512
TIMED_STEPS = 50
PROFILED_STEPS = 20
TOP = 25
NAME_WIDTH = 84
ENGINE_CALLS = ("schedule", "execute call", "sample call", "wait", "update", "front end")
WORKER_CALLS = ("execute", "sample")


def profile_decode(
    llm: "LLM", vocab_size: int, batch: int, *, tiny: bool = False, adapters: Sequence["LoRARequest"] = ()
) -> dict[str, Any]:
    """Times in microseconds per step. Requests take turns with the adapters."""
    prompt_len, timed, profiled = (16, 6, 4) if tiny else (PROMPT_LEN, TIMED_STEPS, PROFILED_STEPS)
    engine = llm.llm_engine
    core = _core_of(llm)
    settle = 8 + 2 * prompt_len * batch // (engine.config.scheduler.max_num_batched_tokens or 1)
    llm.reset_prefix_cache()
    ids = _add_requests(llm, vocab_size, batch, prompt_len, settle + timed + profiled + 32, adapters)
    try:
        for _ in range(settle):
            engine.step()
        host = _host_times(llm, timed)
        try:
            device = _device_times(llm, profiled)
        except RuntimeError as error:  # without profiling support, only the host's times are reported
            device = {"error": str(error)}
    finally:
        engine.abort_request(ids)
        while core.has_unfinished():
            engine.step()
    if host["rows"] != batch or host["tokens"] != batch:
        raise ValueError(f"not a steady batch of {batch}: {host['rows']:g} rows, {host['tokens']:g} tokens per step")
    return {"batch": batch, "prompt_len": prompt_len, **host, "device": device}


def profile_prompts(
    llm: "LLM", vocab_size: int, batch: int, length: int, adapters: Sequence["LoRARequest"] = ()
) -> dict[str, Any]:
    """Of one step with these prompts, which must fit it."""
    llm.reset_prefix_cache()
    _add_requests(llm, vocab_size, batch, length, 1, adapters)
    device = _device_times(llm, 1)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    return {"batch": batch, "prompt_len": length, "device": device}


def _core_of(llm: "LLM") -> Any:
    core = getattr(llm.llm_engine.client, "core", None)
    if core is None:
        raise ValueError("a profile needs the engine in this process; its calls cannot be timed in another")
    return core


def _add_requests(
    llm: "LLM", vocab_size: int, batch: int, prompt_len: int, output: int, adapters: Sequence["LoRARequest"] = ()
) -> list[str]:
    from quire import SamplingParams
    from quire.messages.sampling_params import RequestOutputKind

    rng = random.Random(batch)
    params = SamplingParams(
        temperature=0.0,
        max_tokens=output,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [f"profile-{batch}-{i}" for i in range(batch)]
    for i, request_id in enumerate(ids):
        prompt = [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(prompt_len)]
        lora = adapters[i % len(adapters)] if adapters else None
        llm.llm_engine.add_request(request_id, prompt, params, lora_request=lora)
    return ids


# The host


def _host_times(llm: "LLM", steps: int) -> dict[str, Any]:
    engine = llm.llm_engine
    spent: dict[str, float] = defaultdict(float)
    rows: list[tuple[int, int]] = []
    with _timed_calls(llm, spent, rows):
        for _ in range(engine.config.scheduler.depth + 1):
            engine.step()  # results already in flight are not wrapped
        spent.clear()
        rows.clear()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        wall = time.perf_counter() - began
    micros = {name: 1e6 * seconds / steps for name, seconds in spent.items()}
    step = 1e6 * wall / steps
    on_engine = {name: micros.get(name, 0.0) for name in ENGINE_CALLS}
    on_worker = {name: micros.get(f"worker {name}", 0.0) for name in WORKER_CALLS}
    threaded = engine.config.scheduler.depth > 0  # else the worker's calls are within the engine's
    return {
        "step": step,
        "steps": steps,
        "rows": sum(count for count, _ in rows) / max(1, len(rows)),
        "tokens": sum(tokens for _, tokens in rows) / max(1, len(rows)),
        "engine_thread": on_engine | {"other": step - sum(on_engine.values())},
        "worker_thread": on_worker | ({"idle": step - sum(on_worker.values())} if threaded else {}),
    }


@contextmanager
def _timed_calls(llm: "LLM", spent: dict[str, float], rows: list[tuple[int, int]]) -> "Iterator[None]":
    """Add up seconds per call, and record each plan's size, by wrapping the objects' methods for a while."""
    core = _core_of(llm)
    worker = core.executor.worker

    def timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - began

        return wrapped

    def schedule(call: Callable[..., Any]) -> Callable[..., Any]:
        inner = timed(call, "schedule")

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            plan = inner(*args, **kwargs)
            if plan is not None:
                rows.append((len(plan.rows), plan.total_tokens))
            return plan

        return wrapped

    def sample(call: Callable[..., Any]) -> Callable[..., Any]:
        inner = timed(call, "sample call")

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            future = inner(*args, **kwargs)
            future.result = timed(future.result, "wait")
            return future

        return wrapped

    wrappers: list[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = [
        (core.scheduler, "schedule", schedule),
        (core.executor, "execute_model", lambda call: timed(call, "execute call")),
        (core.executor, "sample_tokens", sample),
        (core.scheduler, "update_from_output", lambda call: timed(call, "update")),
        (llm.llm_engine.output_processor, "process", lambda call: timed(call, "front end")),
        (worker, "execute_model", lambda call: timed(call, "worker execute")),
        (worker, "sample_tokens", lambda call: timed(call, "worker sample")),
    ]
    with ExitStack() as restore:
        for owner, method, wrap in wrappers:
            own = vars(owner).get(method)  # usually the class's method, which reappears when ours is deleted
            restore.callback(delattr, owner, method) if own is None else restore.callback(setattr, owner, method, own)
            setattr(owner, method, wrap(getattr(owner, method)))
        yield


# The device


def _device_times(llm: "LLM", steps: int) -> dict[str, Any]:
    """Kernels on CUDA, operators on a CPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = llm.llm_engine.config.device.device == "cuda"
    synchronize: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    # Operators run on the worker's thread, which is not the one that starts the profiler. Kernels are seen anyway.
    threads = None if cuda else torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    synchronize()
    with profile(activities=[activity], experimental_config=threads) as profiler:
        began = time.perf_counter()
        for _ in range(steps):
            llm.llm_engine.step()
        synchronize()
        wall = time.perf_counter() - began
    events = list(_device_events(profiler.events() or (), cuda))
    kernels = _by_name(((name, end - start) for name, start, end in events), steps)
    busy = _covered((start, end) for _, start, end in events) if cuda else sum(end - start for _, start, end in events)
    return {
        "step": 1e6 * wall / steps,
        "busy": busy / steps,
        "launches": len(events) / steps,
        "what": "kernels" if cuda else "operators",
        "kernels": kernels,
    }


def _device_events(events: Iterable[Any], cuda: bool) -> "Iterator[tuple[str, float, float]]":
    """(name, start, end) in microseconds. A CPU operator counts with its self time."""
    for event in events:
        on_cuda = str(event.device_type).endswith("CUDA")
        if on_cuda and cuda and not event.is_user_annotation:
            yield event.name, event.time_range.start, event.time_range.end
        elif not on_cuda and not cuda and event.self_cpu_time_total > 0:
            yield event.name, event.time_range.start, event.time_range.start + event.self_cpu_time_total


def _by_name(events: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """The most expensive first."""
    times: dict[str, list[float]] = defaultdict(list)
    for name, micros in events:
        times[name].append(micros)
    total = sum(map(sum, times.values())) or 1.0
    ordered = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "name": name,
            "per_step": len(found) / steps,
            "mean": sum(found) / len(found),
            "step": sum(found) / steps,
            "share": sum(found) / total,
        }
        for name, found in ordered[:TOP]
    ]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union: kernels of two streams can overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


# Text


def profile_text(model: str, profile: dict[str, Any]) -> str:
    device = profile["device"]
    lines = [
        f"profile of {model}, batch {profile['batch']} after {profile['prompt_len']} tokens: "
        f"{profile['step'] / 1e3:.3f} ms per step over {profile['steps']} steps",
        f"  engine thread, us: {_micros(profile['engine_thread'])}",
        f"  worker thread, us: {_micros(profile['worker_thread'])}",
    ]
    if "error" in device:
        return "\n".join([*lines, f"  device: not profiled: {device['error']}"])
    lines += [
        f"  device: busy {device['busy'] / 1e3:.3f} ms of a step ({device['busy'] / profile['step']:.0%}), "
        f"{device['launches']:.0f} {device['what']}; a step took {device['step'] / 1e3:.3f} ms while profiled",
        f"  {'us/step':>10}{'share':>7}{'per step':>10}{'mean us':>10}  {device['what'][:-1]}",
    ]
    lines += [
        f"  {one['step']:>10.1f}{one['share']:>7.1%}{one['per_step']:>10.1f}{one['mean']:>10.2f}  {short(one['name'])}"
        for one in device["kernels"]
    ]
    return "\n".join(lines)


def _micros(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {micros:.0f}" for name, micros in times.items())


def short(name: str) -> str:
    """A C++ kernel's name without common namespaces."""
    name = re.sub(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|cutlass::|c10::", "", name)
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."
