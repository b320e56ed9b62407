"""Our attention for transformers' models: the functions registered with its attention interface."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quire.attention.base import ForwardContext
from quire.layers.attention import Attention

SERVING, PROBING = "quire", "quire_probe"  # attn_implementation; only the second gets masks
HANDLER = "quire_handler"
NO_INTERFACE = "its attention does not go through transformers' attention interface"

KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}  # tensor arguments that are handled or ignored

# The window is found by evaluating the mask function at far positions.
FAR_POSITIONS = (1 << 24, (1 << 24) + 54_321)


class Unsupported(ValueError):
    """The model does something that our paged attention does not support."""


@dataclass(frozen=True)
class AttentionSpec:
    """Parameters of one attention call of the model."""

    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def head_size(self) -> int:
        return max(self.key_size, self.value_size)


class AttentionHandler(Protocol):
    """Handles an attention module's calls. Shapes are the interface's: [1, heads, N, D] -> [1, N, heads, D]."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor: ...


def register() -> None:
    """Register with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (SERVING, PROBING):
        AttentionInterface.register(name, _attend)
    # None is registered for SERVING, so that no mask is computed while serving.
    AttentionMaskInterface.register(PROBING, _probing_mask)


def set_handler(module: nn.Module, handler: AttentionHandler) -> None:
    object.__setattr__(module, HANDLER, handler)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    handler: AttentionHandler = getattr(module, HANDLER)
    return handler(module, query, key, value, attention_mask, scaling, options), None


class CurrentStep:
    """The forward context of the current step; not every model passes its keyword arguments on to attention."""

    ctx: ForwardContext | None = None


class PagedHandler:
    """Runs a module's calls with paged attention; one called several times per forward has a KV cache for each call."""

    def __init__(self, calls: list[tuple[AttentionSpec, Attention]], step: CurrentStep, dtype: torch.dtype) -> None:
        self.calls = calls
        self.step = step
        self.dtype = dtype
        self.next_call = 0

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Any,
        scaling: float | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        spec, layer = self.calls[self.next_call]
        self.next_call = (self.next_call + 1) % len(self.calls)
        # Some models rotate in float32; the KV cache has the model's dtype.
        q, k, v = (each[0].transpose(0, 1).to(self.dtype) for each in (query, key, value))
        if spec.key_size != spec.value_size:
            q, k, v = (F.pad(each, (0, spec.head_size - each.shape[-1])) for each in (q, k, v))
        assert self.step.ctx is not None
        out = layer.forward_heads(q, k, v, self.step.ctx).view(1, len(q), layer.num_heads, layer.head_size)
        return out[..., : spec.value_size].contiguous()


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, sequence: torch.Tensor
) -> torch.Tensor:
    """What paged attention computes, without a KV cache. sequence [N]: the sequence of each token, concatenated."""
    groups = spec.num_heads // spec.num_kv_heads
    keys, values = (each.float().repeat_interleave(groups, 1) for each in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    place = torch.arange(len(sequence), device=sequence.device)
    behind = place[:, None] - place
    seen = (behind >= 0) & (sequence[:, None] == sequence)
    if spec.window is not None:
        seen &= behind < spec.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).to(value.dtype).transpose(1, 2).contiguous()


def read_attention_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    options: dict[str, Any],
) -> AttentionSpec:
    """The parameters of a call under PROBING; Unsupported if paged attention cannot compute it."""
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise Unsupported("its attention gets keys of other tokens than its queries")
    if query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise Unsupported("its queries, keys and values do not have the same heads")
    if getattr(module, "is_cross_attention", False):
        raise Unsupported("it has cross attention")
    if isinstance(scaling, torch.Tensor):
        raise Unsupported("the scale of its attention is computed")
    unknown = [name for name, given in options.items() if isinstance(given, torch.Tensor) and name not in KNOWN_TENSORS]
    if unknown:
        raise Unsupported(f"its attention gets {', '.join(unknown)}, which paged attention does not support")
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_size=query.shape[-1],
        value_size=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_window(module, mask, options.get("sliding_window")),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )


def _window(module: nn.Module, mask: Any, passed: int | None) -> int | None:
    found = getattr(mask, "quire_window", ...)
    if isinstance(found, Unsupported):
        raise found
    if found is not ...:
        return found
    if mask is None and not getattr(module, "is_causal", True):
        raise Unsupported("its attention is not causal")
    if isinstance(mask, torch.Tensor):
        _check_causal(mask)
    return passed


def _check_causal(mask: torch.Tensor) -> None:
    """Check a mask that the model made or changed itself."""
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if not torch.equal(seen, torch.ones_like(seen).tril()):
        raise Unsupported("its attention has a mask of its own")
    if mask.dtype is not torch.bool and bool(mask[seen].any()):
        raise Unsupported("it adds a bias of its own to attention scores")


def _probing_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """An eager-attention mask with its window, or the reason why it has none, attached: not every mask is used."""
    from transformers.masking_utils import causal_mask_function, eager_mask

    mask = eager_mask(*args, **kwargs)
    found: int | Unsupported | None
    try:
        found = window_of(kwargs.get("mask_function", causal_mask_function))
    except Unsupported as error:
        found = error
    if mask is not None:
        mask.quire_window = found  # type: ignore[attr-defined]
    return mask


def window_of(mask_function: Callable[..., Any]) -> int | None:
    """The window of a mask function of (batch, head, query, key); None: full causal attention."""

    def sees(query: int, key: int) -> bool:
        numbers = (torch.tensor(n) for n in (0, 0, query, key))
        return bool(mask_function(*numbers))

    try:
        if sees(8, 9) or not sees(8, 8):
            raise Unsupported("its attention is not causal")
        windows = {_window_length(query, partial(sees, query)) for query in FAR_POSITIONS}
    except IndexError as error:  # a table with an entry per position
        raise Unsupported("its attention has a mask of its own") from error
    if len(windows) > 1:
        raise Unsupported("its attention is cut into chunks")
    return windows.pop()


def _window_length(query: int, sees: Callable[[int], bool]) -> int | None:
    """Number of keys from the first visible one to the query's own; None: all."""
    low, high = 0, query  # sees(high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(middle) else (middle + 1, high)
    return None if low == 0 else query - low + 1
