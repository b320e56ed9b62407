"""Our attention in transformers' models: the functions that their attention interface calls."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quire.attention.base import ForwardContext
from quire.layers.attention import Attention

SERVING, PROBING = "quire", "quire_probe"  # names of attention implementations; only the second is given masks
HANDLER = "quire_handler"
NO_INTERFACE = "its attention does not go through transformers' attention interface"

KNOWN_TENSORS = {"s_aux", "position_ids", "cache_position"}  # that attention may be given beside its heads

# A window is found by asking the mask of a far position which keys it may see.
FAR_POSITIONS = (1 << 24, (1 << 24) + 54_321)


class Unsupported(ValueError):
    """The model does something that paged attention of ours does not."""


@dataclass(frozen=True)
class AttentionFacts:
    """What one attention call of the model asks for."""

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


class Handler(Protocol):
    """What an attention module's calls go to. Shapes are the interface's: [1, heads, N, D] -> [1, N, heads, D]."""

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
    """With transformers; as often as one likes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in (SERVING, PROBING):
        AttentionInterface.register(name, _attend)
    # There is none under the other name, so no mask is ever made while serving.
    AttentionMaskInterface.register(PROBING, _probed_mask)


def handle_calls(module: nn.Module, handler: Handler) -> None:
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
    handler: Handler = getattr(module, HANDLER)
    return handler(module, query, key, value, attention_mask, scaling, options), None


class CurrentStep:
    """The step that a model is computing. Kept with it, since not every model hands on what it is called with."""

    ctx: ForwardContext | None = None


class PagedHandler:
    """A module's calls to paged attention. A module that a model runs several times has a cache for each."""

    def __init__(self, calls: list[tuple[AttentionFacts, Attention]], step: CurrentStep, dtype: torch.dtype) -> None:
        self.calls = calls
        self.step = step
        self.dtype = dtype
        self.turn = 0

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
        facts, layer = self.calls[self.turn]
        self.turn = (self.turn + 1) % len(self.calls)
        # Rotated in float32 by some models; the cache is not.
        q, k, v = (each[0].transpose(0, 1).to(self.dtype) for each in (query, key, value))
        if facts.key_size != facts.value_size:
            q, k, v = (F.pad(each, (0, facts.head_size - each.shape[-1])) for each in (q, k, v))
        assert self.step.ctx is not None
        out = layer.forward_heads(q, k, v, self.step.ctx).view(1, len(q), layer.num_heads, layer.head_size)
        return out[..., : facts.value_size].contiguous()


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, facts: AttentionFacts, sequence: torch.Tensor
) -> torch.Tensor:
    """What paged attention computes, without a cache. sequence [N]: whose token it is; rows one after the other."""
    groups = facts.num_heads // facts.num_kv_heads
    keys, values = (each.float().repeat_interleave(groups, 1) for each in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * facts.scale
    if facts.softcap is not None:
        scores = facts.softcap * torch.tanh(scores / facts.softcap)
    place = torch.arange(len(sequence), device=sequence.device)
    behind = place[:, None] - place
    seen = (behind >= 0) & (sequence[:, None] == sequence)
    if facts.window is not None:
        seen &= behind < facts.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if facts.sinks is not None:
        sinks = facts.sinks.float().view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).to(value.dtype).transpose(1, 2).contiguous()


def facts_of(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    options: dict[str, Any],
) -> AttentionFacts:
    """Read off a call that PROBING made; Unsupported where paged attention cannot serve it."""
    if query.dim() != 4 or key.dim() != 4 or query.shape[0] != 1 or key.shape[2] != query.shape[2]:
        raise Unsupported("its attention is given keys of other tokens than those of its queries")
    if query.shape[-1] != key.shape[-1] or query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise Unsupported("its queries, keys and values do not have the same heads")
    if getattr(module, "is_cross_attention", False):
        raise Unsupported("it has cross attention")
    if isinstance(scaling, torch.Tensor):
        raise Unsupported("the scale of its attention is computed")
    unknown = [name for name, given in options.items() if isinstance(given, torch.Tensor) and name not in KNOWN_TENSORS]
    if unknown:
        raise Unsupported(f"its attention is given {', '.join(unknown)}, which paged attention does not know")
    return AttentionFacts(
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
    """Of a mask that the model made itself, or changed."""
    seen = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if not torch.equal(seen, torch.ones_like(seen).tril()):
        raise Unsupported("its attention has a mask of its own")
    if mask.dtype is not torch.bool and bool(mask[seen].any()):
        raise Unsupported("it adds a bias of its own to attention scores")


def _probed_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """A mask as eager attention has it, which remembers its window, or why it has none. Not every mask is used."""
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
    """The window of a mask given as function of (batch, head, query, key); None: all keys before the query."""

    def sees(query: int, key: int) -> bool:
        numbers = (torch.tensor(n) for n in (0, 0, query, key))
        return bool(mask_function(*numbers))

    try:
        if sees(8, 9) or not sees(8, 8):
            raise Unsupported("its attention is not causal")
        windows = {_reach(query, partial(sees, query)) for query in FAR_POSITIONS}
    except IndexError as error:  # it looks something up for each position
        raise Unsupported("its attention has a mask of its own") from error
    if len(windows) > 1:
        raise Unsupported("its attention is cut into chunks")
    return windows.pop()


def _reach(query: int, sees: Callable[[int], bool]) -> int | None:
    """Keys from the first that is seen to the query's own."""
    low, high = 0, query  # sees(high)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sees(middle) else (middle + 1, high)
    return None if low == 0 else query - low + 1
