"""Shares a transformers model among ranks, by the plan that transformers has for it: its linears by their outputs or
inputs. Embeddings and norms are whole on every rank."""

import re
from typing import Any

import torch
from torch import nn

from quire.layers.parallel import TensorParallel
from quire.models.transformers.attention import Unsupported
from quire.models.transformers.replace_modules import GatedMLP, Linear
from quire.quantization.base import Partition

WHOLE = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"}
BY_OUTPUTS = {"colwise", "colwise_rep", "colwise_gather_output"}  # the last two are one: outputs are gathered
BY_INPUTS = {"rowwise", "rowwise_split_input"}
# Of experts in tensors [experts, out, in]: gate and up in one, by their outputs; the module, whose outputs are summed.
EXPERTS = {"packed_colwise", "moe_tp_experts"}
ALLOWED = WHOLE | BY_OUTPUTS | BY_INPUTS | EXPERTS


class Link:
    """Ranks exchange nothing while one of them probes shapes."""

    def __init__(self, tp: TensorParallel) -> None:
        self.tp, self.connected = tp, False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(x) if self.connected else x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_gather(x) if self.connected else torch.cat([x] * self.tp.size, dim=-1)


class SharedLinear(Linear):
    """A rank's part of a linear of `style`."""

    def __init__(self, whole: Linear, style: str, link: Link) -> None:
        tp, weight, bias = link.tp, whole.holder.weight.data, None if whole.bias is None else whole.bias.data
        dim = 1 if style in BY_INPUTS else 0
        size = tp.share(weight.shape[dim], "output features" if dim == 0 else "input features")
        start = size * tp.rank
        if bias is not None:
            # One rank adds it to a sum.
            bias = bias.narrow(0, start, size).clone() if dim == 0 else bias if tp.rank == 0 else None
        outputs, inputs = weight.shape
        part = Partition(None, 0, size if dim == 0 else outputs, (outputs, inputs), dim, start)
        super().__init__(weight.narrow(dim, start, size).clone(), bias, [part])
        self.start, self.style, self.link = start, style, link
        self.weight_is_read = whole.weight_is_read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "rowwise_split_input":
            x = x.narrow(-1, self.start, self.in_features)
        out = super().forward(x)
        if self.style in BY_INPUTS:
            return self.link.all_reduce(out)
        return out if self.style == "colwise" else self.link.all_gather(out)


def check_plan(model: Any, tp: TensorParallel) -> dict[str, str]:
    """Style by pattern of names; Unsupported if there is none or it has what is not served."""
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        raise Unsupported(f"transformers has no plan to share it among {tp.size} workers; use one")
    others = sorted(set(plan.values()) - ALLOWED)
    if others:
        raise Unsupported(
            f"transformers' plan to share it among {tp.size} workers needs {', '.join(others)}; allowed are "
            f"{', '.join(sorted(ALLOWED))}; use one worker"
        )
    return plan


def share_modules(model: Any, plan: dict[str, str], tp: TensorParallel, tied: bool) -> Link:
    """In place, after our linears have replaced the model's. The caller connects the link."""
    link, patterns = Link(tp), {re.compile(re.escape(name).replace(r"\*", r"\d+")): plan[name] for name in plan}

    def style_of(path: str) -> str:
        return next((style for pattern, style in patterns.items() if pattern.fullmatch(path)), "replicate")

    head = model.get_output_embeddings()
    for parent_path, parent in list(model.named_modules()):
        if style_of(parent_path) == "moe_tp_experts":
            _share_experts(
                parent, {name: style_of(f"{parent_path}.{name}") for name, _ in parent.named_parameters()}, link
            )
            continue
        for name, child in list(parent.named_children()):
            path = f"{parent_path}.{name}" if parent_path else name
            if isinstance(child, GatedMLP):
                _share_gated(
                    child, [style_of(f"{path}.{part}") for part in ("gate_proj", "up_proj", "down_proj")], link
                )
            elif isinstance(child, Linear) and not isinstance(parent, GatedMLP):
                style = style_of(path)
                # A head that is tied, or whose tokens do not divide, is whole.
                whole = child is head and (tied or child.out_features % tp.size > 0)
                if style not in WHOLE and not whole:
                    setattr(parent, name, SharedLinear(child, style, link))
    return link


def _share_gated(mlp: GatedMLP, styles: list[str], link: Link) -> None:
    if all(style in WHOLE for style in styles):
        return
    if styles != ["colwise", "colwise", "rowwise"]:
        raise Unsupported(f"transformers' plan for its MLP is {', '.join(styles)}; allowed: colwise, colwise, rowwise")
    tp, both = link.tp, mlp.gate_up_proj
    width = tp.share(both.out_features // 2, "intermediate size")

    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([half.narrow(0, width * tp.rank, width) for half in x.chunk(2)])

    full = (both.out_features // 2, both.in_features)
    parts = [Partition(i, i * width, width, full, 0, width * tp.rank) for i in range(2)]
    bias = None if both.bias is None else halves(both.bias.data)
    mlp.gate_up_proj = Linear(halves(both.holder.weight.data), bias, parts)
    mlp.down_proj = SharedLinear(mlp.down_proj, "rowwise", link)


def _share_experts(experts: nn.Module, styles: dict[str, str], link: Link) -> None:
    tp = link.tp
    for name, style in styles.items():
        parameter = experts.get_parameter(name)
        if "." in name or parameter.dim() != 3 or style not in ("packed_colwise", "rowwise"):
            raise Unsupported(
                f"its experts have {name} of {parameter.dim()} dimensions, planned as {style}; allowed: tensors of all "
                "experts, packed_colwise or rowwise"
            )
        full = parameter.data
        if style == "rowwise":
            width = tp.share(full.shape[2], "the experts' intermediate size")
            part = full.narrow(2, width * tp.rank, width)
        else:
            width = tp.share(full.shape[1] // 2, "the experts' intermediate size")
            part = full.unflatten(1, (2, -1)).narrow(2, width * tp.rank, width).flatten(1, 2)
        setattr(experts, name, nn.Parameter(part.contiguous(), requires_grad=False))
    experts.register_forward_hook(lambda module, args, output: link.all_reduce(output))


def check_heads(calls: list[tuple[nn.Module, Any]], tp: TensorParallel) -> None:
    """Before modules are shared: heads are whole on a rank."""
    for _, spec in calls:
        tp.share(spec.num_heads, "attention heads")
        tp.share(spec.num_kv_heads, "KV heads")
        if spec.sinks is not None:
            raise Unsupported(f"its attention has sinks, which cannot be shared among {tp.size} workers; use one")
