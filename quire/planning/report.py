"""A plan as text, and as JSON."""

from dataclasses import asdict
from typing import Any

from quire.planning.plan import Candidate, Plan

GIB = 2**30
MOST_OBSTACLES = 8


def as_json(plan: Plan) -> dict[str, Any]:
    chosen = plan.chosen
    return {
        "model": plan.name,
        "parameters": plan.shape.parameters,
        "active_parameters": plan.shape.active_parameters,
        "weights": asdict(plan.weights),
        "gpus": {"count": plan.machine.count, **asdict(plan.machine.gpu)},
        "limits": asdict(plan.limits),
        "load": asdict(plan.load),
        "tensor_parallel_sizes": list(plan.tensor_sizes),
        "not_tensor_parallel_sizes": {str(size): why for size, why in plan.obstacles.items()},
        "max_pipeline_parallel_size": plan.shape.num_layers,
        "layouts": [_layout(each) for each in plan.candidates],
        "fits": chosen is not None,
        "recommended": None
        if chosen is None
        else {**_layout(chosen), "copies": plan.copies, "max_model_len": plan.max_model_len, "command": plan.command},
        "would_fit": list(plan.would_fit),
    }


def _layout(candidate: Candidate) -> dict[str, Any]:
    found = asdict(candidate)
    layout, score = found.pop("layout"), found.pop("score")
    del score  # only orders candidates
    return {
        "tensor_parallel_size": layout["tensor"],
        "pipeline_parallel_size": layout["stages"],
        **found,
        "fits": candidate.memory.fits,
    }


def as_text(plan: Plan) -> str:
    shape, gpu = plan.shape, plan.machine.gpu
    active = "" if shape.experts is None else f", {_count(shape.active_parameters)} active per token"
    lines = [
        f"{plan.name}: {_count(shape.parameters)} parameters{active}; weights: {plan.weights.name}",
        f"{plan.machine.name}: {gpu.memory / GIB:.1f} GiB, {gpu.bandwidth / 1e12:.3g} TB/s, "
        f"{gpu.flops / 1e12:.4g} TFLOP/s each; {gpu.link.name}",
        "",
        f"tensor-parallel sizes: {', '.join(map(str, plan.tensor_sizes))}",
        *_obstacles(plan),
        f"pipeline-parallel sizes: 1 to {shape.num_layers}",
        "",
    ]
    lines += _table(plan)
    if plan.chosen is None:
        return "\n".join([*lines, "", *_missing(plan)])
    return "\n".join([*lines, "", *_memory(plan, plan.chosen), "", *_speeds(plan, plan.chosen), "", *_command(plan)])


def _obstacles(plan: Plan) -> list[str]:
    lines = [f"  not {size}: {why}" for size, why in plan.obstacles.items()]
    more = len(lines) - MOST_OBSTACLES
    return lines if more <= 0 else [*lines[:MOST_OBSTACLES], f"  nor {more} others (--json lists them)"]


def _table(plan: Plan) -> list[str]:
    heads = [
        "layout",
        "weights",
        "KV cache",
        "tokens",
        f"requests of {plan.limits.max_model_len}",
        "batch 1",
        "first token",
    ]
    rows = [heads]
    # Other numbers of stages leave GPUs idle; the JSON has them.
    shown = [each for each in plan.candidates if plan.machine.count % each.layout.stages == 0 or each is plan.chosen]
    for each in shown:
        memory, layout = each.memory, each.layout
        name = f"tp {layout.tensor}" + (f", pp {layout.stages}" if layout.stages > 1 else "")
        alone = next((speed.token_ms for speed in each.speeds if speed.batch == 1), None)
        rows.append(
            [
                name + (" *" if each is plan.chosen else ""),
                f"{memory.weights / GIB:.1f} GiB",
                f"{memory.kv_cache / GIB:.1f} GiB" if memory.kv_cache > 0 else "does not fit",
                f"{memory.capacity_tokens:,}" if memory.kv_cache > 0 else "",
                f"{memory.capacity_requests:.1f}" if memory.kv_cache > 0 else "",
                "" if alone is None else f"{alone:.2f} ms",
                f"{each.first_token_ms:.0f} ms" if each.held else "",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip() for row, cells in zip(rows, aligned, strict=True)]


def _memory(plan: Plan, chosen: Candidate) -> list[str]:
    memory = chosen.memory
    kinds = ", ".join(f"{size:,} ({kind})" for kind, size in memory.bytes_per_token.items())
    return [
        f"memory of a rank: {memory.usable / GIB:.1f} GiB usable = weights {memory.weights / GIB:.1f} + activations, "
        f"sampling and graphs {memory.activations / GIB:.1f} + context {memory.context / GIB:.1f} + KV cache "
        f"{memory.kv_cache / GIB:.1f}",
        f"KV cache: {kinds} bytes per token and rank; {memory.capacity_tokens:,} tokens, "
        f"{memory.capacity_requests:.1f} requests of {plan.limits.max_model_len} tokens",
    ]


def _speeds(plan: Plan, chosen: Candidate) -> list[str]:
    load = plan.load
    lines = [
        f"one copy, prompts of {load.prompt_len} and outputs of {load.output_len} tokens: first token after "
        f"{chosen.first_token_ms:.1f} ms, {chosen.prompt_tokens_per_s:,.0f} prompt tokens per second",
        f"{'batch':>7}  {'ms per token':>12}  {'decode tok/s':>12}  {'with prompts':>12}",
    ]
    for speed in chosen.speeds:
        if speed.token_ms is None:
            lines.append(f"{speed.batch:>7}  the KV cache holds {chosen.held} such requests")
        else:
            cells = (f"{speed.token_ms:.2f}", f"{speed.decode_tokens_per_s:,.0f}", f"{speed.serving_tokens_per_s:,.0f}")
            lines.append(f"{speed.batch:>7}  " + "  ".join(f"{cell:>12}" for cell in cells))
    return lines


def _command(plan: Plan) -> list[str]:
    assert plan.chosen is not None
    ranks, lines = plan.chosen.layout.ranks, [f"recommended: {plan.command}"]
    if plan.copies > 1:
        each = "each GPU" if ranks == 1 else f"every {ranks} GPUs"
        lines.append(f"{plan.copies} copies, one server on {each}")
    if plan.max_model_len < plan.limits.max_model_len:
        lines.append(f"(the KV cache is too small for a request of {plan.limits.max_model_len} tokens)")
    return lines


def _missing(plan: Plan) -> list[str]:
    lines = [f"{plan.name} does not fit {plan.machine.name} with requests of {plan.limits.max_model_len} tokens"]
    if plan.would_fit:
        lines += ["what would:", *(f"  {each}" for each in plan.would_fit)]
    return lines


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
