"""How many experts a step touches: with random weights that use few, a benchmark would read less than a model does."""

from typing import TYPE_CHECKING, Any

from quire.bench.workloads import Shape, random_workload

if TYPE_CHECKING:
    import torch

    from quire import LLM

BATCH = 256  # as many requests as the workload `nano` has
PROMPT_LEN = 32


def experts_touched(llm: "LLM", vocab_size: int) -> dict[str, Any] | None:
    """Means over layers, at batch 1 and at BATCH, of a step that is not timed; None for a model without experts.

    Requests of different prompts are at the end of these, in one step: it is launched kernel by kernel, so that the
    routers' logits can be seen, and computes all of every prompt, because there are hooks in its last layer.
    """
    from quire import SamplingParams
    from quire.models.moe import SparseMLP

    core = getattr(llm.llm_engine.client, "core", None)
    model = getattr(getattr(getattr(core, "executor", None), "worker", None), "runner", None)
    layers = [m for m in model.model.modules() if isinstance(m, SparseMLP)] if model is not None else []
    if not layers:
        return None
    logits: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(layers))}

    def note(layer: int) -> Any:
        return lambda module, given, made: logits[layer].append(made.detach().float().cpu())

    hooks = [layer.router.register_forward_hook(note(i)) for i, layer in enumerate(layers)]
    drawn = random_workload("experts", 0, Shape(requests=BATCH, own=PROMPT_LEN, output=1), vocab_size)
    try:
        llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        llm.generate(drawn.prompts, sampling, use_tqdm=False)
    finally:
        for hook in hooks:
            hook.remove()
    return _counted(layers, logits)


def _counted(layers: list[Any], logits: "dict[int, list[torch.Tensor]]") -> dict[str, Any] | None:
    import torch

    from quire.kernels.moe_routing import route_torch

    counts, expected = [], []
    for i, layer in enumerate(layers):
        if not logits[i]:
            return None  # other kernels, which no hook sees
        seen = torch.cat(logits[i])
        assert len(seen) == BATCH * PROMPT_LEN, f"a router saw {len(seen)} tokens, not {BATCH} prompts of {PROMPT_LEN}"
        rows = seen[PROMPT_LEN - 1 :: PROMPT_LEN]
        routing, bias = layer.experts.routing.with_shared(0), layer.correction_bias
        chosen = route_torch(rows, routing, None if bias is None else bias.detach().cpu())[1]
        counts.append(len(chosen.unique()))
        total = rows.shape[1]
        expected.append(total * (1 - (1 - routing.top_k / total) ** len(rows)))
    top_k = layers[0].experts.routing.top_k
    mean, uniform = (sum(values) / len(values) for values in (counts, expected))
    return {"batch 1": float(top_k), f"batch {BATCH}": round(mean, 1), "uniform": round(uniform, 1), "layers": counts}
