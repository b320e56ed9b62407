"""Probes how a transformers model works by running it on a few tokens.

A config does not say how a model calls attention, what its head does to hidden states, or whether tokens interact
outside of attention. So two short sequences are run, each alone with transformers' own attention and both in one batch
with ours: the logits must agree.
"""

import copy
import inspect
import re
import traceback
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.models.transformers.attention import (
    NO_INTERFACE,
    PROBING,
    SERVING,
    AttentionHandler,
    AttentionSpec,
    Unsupported,
    read_attention_call,
    reference_attention,
    set_handler,
)

LENGTHS = (5, 6)
# What a probe of a few tokens may not reveal.
REFUSED = {
    "it has a recurrent state besides the KV cache": re.compile(
        "Mamba|SSM|DeltaNet|ShortConv|Rwkv|RecurrentBlock|LSTM|LinearAttention|LightningAttention"
    ),
    "it has sparse attention with selected keys": re.compile("Indexer|Compressor"),
}
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
MAX_ERROR = {torch.float32: 1e-3}  # of logits, relative
HALF_MAX_ERROR = 0.15  # rounding may route a token to another expert


@dataclass
class ProbeResult:
    """How the model computes, and its logits."""

    base: str  # name of the submodule that computes hidden states
    output: type  # of its return value
    calls: list[tuple[nn.Module, AttentionSpec]]  # attention calls in order
    first_position: int  # position id of a sequence's first token
    expected: torch.Tensor  # float32 logits of both sequences, by transformers alone
    dtype: torch.dtype  # of its weights


class Head(nn.Module):
    """Hidden states -> logits: the model's own forward without the base."""

    def __init__(self, model: nn.Module, probe: ProbeResult) -> None:
        super().__init__()
        self.given = _GivenHidden(probe.output)
        self.shell = _with_replaced(model, probe.base.split("."), self.given)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.given.hidden = hidden[None]
        try:
            return self.shell(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        finally:
            self.given.hidden = None


class _GivenHidden(nn.Module):
    """Stands in for the base: returns the hidden states set on it."""

    hidden: torch.Tensor | None = None

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden,) if self.output is tuple else self.output(last_hidden_state=self.hidden)


def _with_replaced(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """A shallow copy of the module in which only the submodule at `path` is replaced."""
    if not path:
        return replacement
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    child = module._modules[path[0]]
    assert child is not None
    shell._modules[path[0]] = _with_replaced(child, path[1:], replacement)
    return shell


def probe_model(model: Any, vocab_size: int) -> ProbeResult:
    """Unsupported, with the reason, if the model cannot run with paged attention."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise Unsupported("it is an encoder-decoder")
    names = {type(module).__name__ for module in model.modules()}
    for reason, pattern in REFUSED.items():
        found = sorted(name for name in names if pattern.search(name))
        if found:
            raise Unsupported(f"{reason} ({found[0]})")
    kinds = sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES)
    if kinds:
        raise Unsupported(f"it has layers of type {', '.join(kinds)}")
    try:
        return _probe_model(model, vocab_size)
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # A model called in an unforeseen way may raise anything.
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unsupported(f"a step of a few tokens fails in {where.name}(): {text}") from error


def _probe_model(model: Any, vocab_size: int) -> ProbeResult:
    sequences = probe_tokens(vocab_size, next(model.parameters()).device)
    with torch.inference_mode():
        expected = torch.cat([_logits(model, ids) for ids in sequences]) if _set_attention(model, "eager") else None
        if expected is None or not _set_attention(model, PROBING):
            raise Unsupported(NO_INTERFACE)
        base, output, calls = _observe(model, sequences[0])
        _set_attention(model, SERVING)
        probe = ProbeResult(base, output, calls, 0, expected, next(model.parameters()).dtype)
        for first in _candidate_first_positions(model):
            probe.first_position = first
            if _agrees(batched_logits(model, probe, sequences), probe):
                return probe
    if "position_ids" not in inspect.signature(model.get_submodule(base).forward).parameters:
        raise Unsupported("it does not accept position_ids, so several sequences cannot be batched in a step")
    raise Unsupported(
        "with two sequences in one step its logits differ from those of each alone: tokens interact outside of "
        "attention (in a state-space or convolution layer), or positions depend on other tokens"
    )


@torch.inference_mode()
def attention_calls(model: Any, vocab_size: int) -> list[tuple[nn.Module, AttentionSpec]]:
    """Those of a model that was probed, and of which this is a rank's part."""
    _set_attention(model, PROBING)
    try:
        return _observe(model, probe_tokens(vocab_size, next(model.parameters()).device)[0])[2]
    except (RuntimeError, ValueError, IndexError) as error:
        raise Unsupported(f"its code does not run with a part of its heads: {error}") from error
    finally:
        _set_attention(model, SERVING)


def probe_tokens(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    ids = (torch.arange(sum(LENGTHS)) * 7919 + 101) % max(vocab_size - 8, 1) + 3
    return list((ids % vocab_size).to(device).split(LENGTHS))


@torch.inference_mode()
def batched_logits(model: nn.Module, probe: ProbeResult, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Logits of both sequences batched as in a step, with reference attention."""
    numbers = torch.cat([torch.full_like(ids, i) for i, ids in enumerate(sequences)])
    positions = torch.cat([torch.arange(len(ids), device=ids.device) for ids in sequences])
    spec: dict[nn.Module, list[AttentionSpec]] = {}
    for module, each in probe.calls:
        spec.setdefault(module, []).append(each)
    turns = dict.fromkeys(spec, 0)

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any, options: Any) -> Any:
        turns[module] += 1
        return reference_attention(query, key, value, spec[module][(turns[module] - 1) % len(spec[module])], numbers)

    _set_handler_everywhere(model, attend)
    base = model.get_submodule(probe.base)
    hidden = hidden_states(base, torch.cat(sequences), positions + probe.first_position)
    return Head(model, probe)(hidden).float()


def hidden_states(
    base: nn.Module, input_ids: torch.Tensor | None, positions: torch.Tensor, embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] -> [N, hidden]: all tokens of a step form one sequence to the model; attention separates them."""
    tokens = {"input_ids": input_ids[None]} if input_ids is not None else {}
    if embeds is not None:
        tokens = {"inputs_embeds": embeds[None]}
    return base(**tokens, position_ids=positions[None], use_cache=False, return_dict=True)[0][0]


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The larger of both sequences' median errors: a single token may have been routed to another expert."""
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return max(float(part.median()) for part in errors.split(LENGTHS))


def tolerance(dtype: torch.dtype) -> float:
    return MAX_ERROR.get(dtype, HALF_MAX_ERROR)


def _agrees(logits: torch.Tensor, probe: ProbeResult) -> bool:
    if logits.shape != probe.expected.shape:
        raise Unsupported("its head computes other logits from hidden states than from tokens")
    return relative_error(logits, probe.expected) <= tolerance(probe.dtype)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False, return_dict=True).logits[0].float()


def _set_attention(model: Any, implementation: str) -> bool:
    model.set_attn_implementation(implementation)
    return model.config._attn_implementation == implementation


def _candidate_first_positions(model: Any) -> list[int]:
    """RoBERTa-like models start after the id of the padding token."""
    padding = getattr(model.config, "pad_token_id", None)
    return [0] if padding is None else [0, padding + 1]


def _observe(model: Any, ids: torch.Tensor) -> tuple[str, type, list[tuple[nn.Module, AttentionSpec]]]:
    """Run the model once and record which submodule computes hidden states, and its attention calls."""
    calls: list[tuple[nn.Module, AttentionSpec]] = []
    called: list[tuple[str, Any]] = []  # direct submodules that attended, with their outputs
    depth = [0]
    sequence = torch.zeros_like(ids)

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any, options: Any) -> Any:
        spec = read_attention_call(module, query, key, value, mask, scaling, options)
        calls.append((module, spec))
        return reference_attention(query, key, value, spec, sequence)

    def enter(module: nn.Module, args: Any) -> None:
        depth[0] += 1

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            depth[0] -= 1
            if depth[0] == 1 and calls and not called:
                called.append((name, output))

        return hook

    hooks = []
    for name, module in model.named_modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave(name))]
    try:
        _set_handler_everywhere(model, attend)
        _logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls or not called:
        raise Unsupported(NO_INTERFACE)
    name, output = called[0]
    return name, tuple if isinstance(output, tuple) else type(output), calls


def _set_handler_everywhere(model: nn.Module, handler: AttentionHandler) -> None:
    for module in model.modules():
        set_handler(module, handler)
