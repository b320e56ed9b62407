"""Finding out what a transformers model does, by running it on a few tokens.

A config does not say how a model calls attention, what its head does to hidden states, or whether tokens meet outside
of attention. Two short sequences do: their logits must be the same one by one with transformers' own attention, and
both in one step with ours.
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
    AttentionFacts,
    Handler,
    Unsupported,
    facts_of,
    handle_calls,
    plain_attention,
)

LENGTHS = (5, 6)
# What a few tokens would not always show.
REFUSED = {
    "it keeps a state that is no KV cache": re.compile(
        "Mamba|SSM|DeltaNet|ShortConv|Rwkv|RecurrentBlock|LSTM|LinearAttention|LightningAttention"
    ),
    "it attends to few keys that it chooses": re.compile("Indexer|Compressor"),
}
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
MAX_ERROR = {torch.float32: 1e-3}  # of logits, relative
MAX_ERROR_OF_HALF = 0.15  # rounding may send a token to another expert


@dataclass
class Anatomy:
    """What the probe found."""

    base: str  # the submodule that makes hidden states of ids
    output: type  # what it returns
    calls: list[tuple[nn.Module, AttentionFacts]]  # of attention, in order
    first_position: int  # what the model calls a sequence's first position
    expected: torch.Tensor  # float32 logits of both sequences, as transformers computes them
    dtype: torch.dtype  # of its weights


class Head(nn.Module):
    """Hidden states -> logits, as the model's own forward makes them: all of it but the base."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        super().__init__()
        self.given = _Given(anatomy.output)
        self.shell = _with_replaced(model, anatomy.base.split("."), self.given)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.given.hidden = hidden[None]
        try:
            return self.shell(inputs_embeds=hidden[None], use_cache=False, return_dict=True).logits[0]
        finally:
            self.given.hidden = None


class _Given(nn.Module):
    """In the place of the base: returns what it was given."""

    hidden: torch.Tensor | None = None

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self.hidden,) if self.output is tuple else self.output(last_hidden_state=self.hidden)


def _with_replaced(module: nn.Module, path: list[str], replacement: nn.Module) -> nn.Module:
    """A copy that shares everything with the module but what lies at the path."""
    if not path:
        return replacement
    shell = copy.copy(module)
    shell._modules = dict(module._modules)
    child = module._modules[path[0]]
    assert child is not None
    shell._modules[path[0]] = _with_replaced(child, path[1:], replacement)
    return shell


def examine(model: Any, vocab_size: int) -> Anatomy:
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
        raise Unsupported(f"it has layers of kind {', '.join(kinds)}")
    try:
        return _examine(model, vocab_size)
    except (Unsupported, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # Whatever a model does when it is called in a way that its author did not think of.
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unsupported(f"a step of a few tokens fails in {where.name}(): {text}") from error


def _examine(model: Any, vocab_size: int) -> Anatomy:
    sequences = probe_tokens(vocab_size, next(model.parameters()).device)
    with torch.inference_mode():
        expected = torch.cat([_logits(model, ids) for ids in sequences]) if _set(model, "eager") else None
        if expected is None or not _set(model, PROBING):
            raise Unsupported(NO_INTERFACE)
        base, output, calls = _observe(model, sequences[0])
        _set(model, SERVING)
        anatomy = Anatomy(base, output, calls, 0, expected, next(model.parameters()).dtype)
        for first in _first_positions(model):
            anatomy.first_position = first
            if _agrees(packed_logits(model, anatomy, sequences), anatomy):
                return anatomy
    if "position_ids" not in inspect.signature(model.get_submodule(base).forward).parameters:
        raise Unsupported("it takes no positions from its caller, and so cannot have several sequences in a step")
    raise Unsupported(
        "on two sequences in one step its logits are not those of each alone: tokens meet outside of attention "
        "(in a state-space or convolution layer), or its positions depend on other tokens"
    )


def probe_tokens(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    ids = (torch.arange(sum(LENGTHS)) * 7919 + 101) % max(vocab_size - 8, 1) + 3
    return list((ids % vocab_size).to(device).split(LENGTHS))


@torch.inference_mode()
def packed_logits(model: nn.Module, anatomy: Anatomy, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Both sequences as one step, by the way that steps take, with plain attention."""
    numbers = torch.cat([torch.full_like(ids, i) for i, ids in enumerate(sequences)])
    positions = torch.cat([torch.arange(len(ids), device=ids.device) for ids in sequences])
    facts: dict[nn.Module, list[AttentionFacts]] = {}
    for module, each in anatomy.calls:
        facts.setdefault(module, []).append(each)
    turns = dict.fromkeys(facts, 0)

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any, options: Any) -> Any:
        turns[module] += 1
        return plain_attention(query, key, value, facts[module][(turns[module] - 1) % len(facts[module])], numbers)

    _handle_all(model, attend)
    base = model.get_submodule(anatomy.base)
    hidden = hidden_states(base, torch.cat(sequences), positions + anatomy.first_position)
    return Head(model, anatomy)(hidden).float()


def hidden_states(
    base: nn.Module, input_ids: torch.Tensor | None, positions: torch.Tensor, embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """[N] -> [N, hidden]: all tokens of a step are one sequence to the model; only attention knows better."""
    tokens = {"input_ids": input_ids[None]} if input_ids is not None else {}
    if embeds is not None:
        tokens = {"inputs_embeds": embeds[None]}
    return base(**tokens, position_ids=positions[None], use_cache=False, return_dict=True)[0][0]


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the token in the middle, since a single one may have gone to another expert; the worse sequence's."""
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    return max(float(part.median()) for part in errors.split(LENGTHS))


def tolerance(dtype: torch.dtype) -> float:
    return MAX_ERROR.get(dtype, MAX_ERROR_OF_HALF)


def _agrees(logits: torch.Tensor, anatomy: Anatomy) -> bool:
    if logits.shape != anatomy.expected.shape:
        raise Unsupported("its head gives other logits for hidden states than for tokens")
    return relative_error(logits, anatomy.expected) <= tolerance(anatomy.dtype)


def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids[None], use_cache=False, return_dict=True).logits[0].float()


def _set(model: Any, implementation: str) -> bool:
    model.set_attn_implementation(implementation)
    return model.config._attn_implementation == implementation


def _first_positions(model: Any) -> list[int]:
    """RoBERTa's kind begins behind the padding token's id."""
    padding = getattr(model.config, "pad_token_id", None)
    return [0] if padding is None else [0, padding + 1]


def _observe(model: Any, ids: torch.Tensor) -> tuple[str, type, list[tuple[nn.Module, AttentionFacts]]]:
    """Run it once, and see which submodule makes the hidden states and what it asks of attention."""
    calls: list[tuple[nn.Module, AttentionFacts]] = []
    called: list[tuple[str, Any]] = []  # submodules that the model calls itself
    depth = [0]
    sequence = torch.zeros_like(ids)

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, scaling: Any, options: Any) -> Any:
        facts = facts_of(module, query, key, value, mask, scaling, options)
        calls.append((module, facts))
        return plain_attention(query, key, value, facts, sequence)

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
        _handle_all(model, attend)
        _logits(model, ids)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls or not called:
        raise Unsupported(NO_INTERFACE)
    name, output = called[0]
    return name, tuple if isinstance(output, tuple) else type(output), calls


def _handle_all(model: nn.Module, handler: Handler) -> None:
    for module in model.modules():
        handle_calls(module, handler)
