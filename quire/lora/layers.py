"""Layers that add the terms of adapters: linears by a method around their own, experts by a hook."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from quire.kernels.activation import SILU, activate_mul
from quire.kernels.lora import MAX_PARTS, LowRank, RowTerms, add_low_rank, can_gate, gated_low_rank, row_words
from quire.kernels.rms_norm import RMSNormParams
from quire.kernels.skinny_table import MAX_FUSED_ROWS
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.fused_moe import FusedMoE
from quire.layers.load_slot import LoadSlot, ShardId
from quire.layers.packed_experts import PackedExperts
from quire.lora.factors import Factors
from quire.lora.state import LoRAState
from quire.quantization.base import GatedLinearMethod, LinearMethod, Partition, VocabMethod, keep
from quire.quantization.fused_linear import FusedLinearMixin


@runtime_checkable
class AdaptableLinear(Protocol):
    """A layer that multiplies every token of a step, once and in order, by its method: those of layers/linear.py."""

    in_features: int
    out_partition_sizes: list[int]
    method: LinearMethod

    def partitions(self) -> list[Partition]: ...


@dataclass(frozen=True)
class Target:
    """Where a linear layer of the checkpoint has its factors, and the part of them that this worker holds."""

    a: torch.Tensor  # [slots, max rank, in]
    b: torch.Tensor  # [slots, out, max rank]
    ranks: torch.Tensor  # [slots] int32, as LowRank has it
    partition: Partition

    def part_of(self, factors: Factors) -> Factors:
        """Of the whole layer's. The outputs' split leaves A whole; the inputs' leaves B whole, and the sum over workers
        is that of the terms."""
        (a, b), p = factors, self.partition
        if p.dim == 0:
            return a, b[p.start : p.start + self.b.shape[1]]
        return a[:, p.start : p.start + self.a.shape[2]], b


Targets = Iterator[tuple[ShardId, Target]]


def new_weights(
    state: LoRAState,
    num_inputs: int,
    sizes: Sequence[int],
    rank: int,
    dtype: torch.dtype,
    leading: tuple[int, ...] = (),
    fused: bool = False,
) -> LowRank:
    """Zeros of all slots, for a layer with outputs of these `sizes`. `fused`: the base's product may add terms of few
    rows."""
    if len(sizes) > MAX_PARTS:
        raise ValueError(f"a layer fused of {len(sizes)} takes no adapter; at most {MAX_PARTS} are allowed")
    shape = (*leading, state.max_loras)
    a = torch.zeros(*shape, len(sizes) * rank, num_inputs, dtype=dtype, device=state.device)
    if state.device.type == "cpu":
        b = torch.zeros(*shape, rank, sum(sizes), dtype=dtype).transpose(-1, -2)
    else:
        b = torch.zeros(*shape, sum(sizes), rank, dtype=dtype, device=state.device)
    ranks = torch.zeros(state.max_loras, dtype=torch.int32, device=state.device)
    ends = tuple(sum(sizes[: i + 1]) for i in range(len(sizes)))
    if not fused:
        return LowRank(a, b, ends, ranks)
    return LowRank(a, b, ends, ranks, *row_words(MAX_FUSED_ROWS, num_inputs, a.shape[1], sum(sizes), state.device))


def targets_of(w: LowRank, partitions: Sequence[Partition]) -> Targets:
    for i, p in enumerate(partitions):
        a, b = w.a[:, i * w.rank : (i + 1) * w.rank], w.b[:, p.offset : p.offset + p.size]
        yield p.shard, Target(a, b, w.ranks, p)


@dataclass(frozen=True)
class LoRALinearMethod(GatedLinearMethod):
    """A layer's own method and the terms, which are `layer.low_rank`. Workers each add theirs before outputs are
    summed over them."""

    base: LinearMethod
    state: LoRAState

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self.base.apply(layer, x, bias)
        if self.state.active:
            add_low_rank(out, x, self.state.slots, layer.low_rank, self.state.grouped)  # type: ignore[arg-type]
        return out

    def apply_gated(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        w, grouped = layer.low_rank, self.state.grouped
        assert isinstance(w, LowRank)
        if self.state.active and grouped is not None and activation == SILU and can_gate(x, w):
            return gated_low_rank(self.base.apply(layer, x, bias), x, w, grouped)
        return activate_mul(self.apply(layer, x, bias), activation)

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        if not self.state.active:
            return self.base.apply_fused(layer, x, bias, norm, residual, silu)
        assert isinstance(self.base, FusedLinearMixin)
        terms = RowTerms(self.state.slots, self.state.step, layer.low_rank)  # type: ignore[arg-type]
        return self.base.apply_fused(layer, x, bias, norm, residual, silu, terms)

    @property
    def fuses_terms(self) -> bool:
        """Whether `apply_fused` is for steps with adapters, too."""
        return isinstance(self.base, FusedLinearMixin)

    def can_fuse(self, layer: nn.Module) -> bool:
        return self.base.can_fuse(layer)

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.base.create_weights(layer, in_features, out_partition_sizes, dtype, device)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        return self.base.load_slots(layer, partitions)

    def process_after_loading(self, layer: nn.Module) -> None:
        self.base.process_after_loading(layer)


class LoRAHeadMethod(LoRALinearMethod):
    """Of rows that logits are computed of, not of all tokens."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self.base.apply(layer, x, bias)
        state = self.state
        if state.logit_slots is not None:
            add_low_rank(out, x, state.logit_slots, layer.low_rank, state.logits_grouped)  # type: ignore[arg-type]
        return out


@dataclass(frozen=True)
class LoRAEmbeddingMethod(LoRALinearMethod):
    """A is looked up as the embedding is. What is left is a product by B: the kernel gets a unit matrix for A."""

    base: VocabMethod

    def lookup(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        found = self.base.lookup(layer, ids)
        by_id, w = layer.low_rank_rows, layer.low_rank  # [slots, ids, rank]
        assert isinstance(by_id, torch.Tensor) and isinstance(w, LowRank)
        if not self.state.active or (w.ranks.is_cpu and not w.ranks.any()):  # on a GPU the host cannot know
            return found
        slots = self.state.slots[: len(ids)]
        inner = by_id.flatten(0, 1)[slots.clamp(min=0).long() * by_id.shape[1] + ids]
        found = found.contiguous()
        add_low_rank(found, inner, slots, w, self.state.grouped)
        return found

    def share_weights(self, layer: nn.Module, owner: nn.Module) -> None:
        self.base.share_weights(layer, owner)


def adapt_linear(
    layer: AdaptableLinear, state: LoRAState, rank: int, dtype: torch.dtype, head: bool = False
) -> Targets:
    """`head`: its rows are those of logits."""
    assert isinstance(layer, nn.Module)
    w = new_weights(state, layer.in_features, layer.out_partition_sizes, rank, dtype, fused=not head)
    keep(layer, "low_rank", w)
    layer.method = (LoRAHeadMethod if head else LoRALinearMethod)(layer.method, state)
    state.head_takes_adapters |= head
    return targets_of(w, layer.partitions())


def adapt_head(head: LMHead, state: LoRAState, rank: int, dtype: torch.dtype) -> Targets:
    w = new_weights(state, head.rows.full_shape[1], [head.rows.size], rank, dtype)
    keep(head, "low_rank", w)
    head.method = LoRAHeadMethod(head.method, state)
    state.head_takes_adapters = True
    return targets_of(w, [head.rows])


def adapt_embedding(embedding: VocabEmbedding, state: LoRAState, rank: int, dtype: torch.dtype) -> Targets:
    """Its factors are those of a linear layer whose inputs are the tokens, one of them 1."""
    rows, device = embedding.rows, state.device
    vocab_size, hidden = rows.full_shape
    by_id = torch.zeros(state.max_loras, rows.size, rank, dtype=dtype, device=device)
    w = new_weights(state, rank, [hidden], rank, dtype)
    w.a.copy_(torch.eye(rank, dtype=dtype, device=device))
    keep(embedding, "low_rank", w)
    keep(embedding, "low_rank_rows", by_id)
    embedding.method = LoRAEmbeddingMethod(embedding.method, state)
    partition = Partition(None, 0, hidden, (hidden, vocab_size), 1, rows.start)
    yield None, Target(by_id.transpose(1, 2), w.b, w.ranks, partition)


class ExpertTerms:
    """Of all experts of a layer; see layers/expert_terms.py."""

    def __init__(self, experts: FusedMoE | PackedExperts, state: LoRAState, rank: int, dtype: torch.dtype) -> None:
        self.state = state
        hidden, width, count = experts.hidden_size, experts.width, (experts.num_experts,)
        self.gate_up = new_weights(state, hidden, [width, width], rank, dtype, count)
        self.down = new_weights(state, width, [hidden], rank, dtype, count)

    @property
    def active(self) -> bool:
        return self.state.active

    def add_gate_up(self, out: torch.Tensor, x: torch.Tensor, expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        return self._add(self.gate_up, out, x, expert, rows)

    def add_down(self, out: torch.Tensor, x: torch.Tensor, expert: int, rows: torch.Tensor | None) -> torch.Tensor:
        return self._add(self.down, out, x, expert, rows)

    def _add(
        self, w: LowRank, out: torch.Tensor, x: torch.Tensor, expert: int, rows: torch.Tensor | None
    ) -> torch.Tensor:
        slots = self.state.slots if rows is None else self.state.slots[rows]
        add_low_rank(out, x, slots, expert_of(w, expert), self.state.grouped if rows is None else None)
        return out


def expert_of(w: LowRank, expert: int) -> LowRank:
    return LowRank(w.a[expert], w.b[expert], w.ends, w.ranks)


def adapt_experts(
    experts: FusedMoE | PackedExperts, state: LoRAState, rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, ShardId, Target]]:
    """Targets are named as the parameters of single experts are; shared ones, the last, take no adapter."""
    terms = experts.terms = ExpertTerms(experts, state, rank, dtype)
    hidden, full, width = experts.hidden_size, experts.intermediate_size, experts.width
    start = width * experts.tp.rank
    halves = [Partition(i, i * width, width, (full, hidden), 0, start) for i in range(2)]
    whole = [Partition(None, 0, hidden, (hidden, full), 1, start)]
    for name, w, partitions in (("gate_up", terms.gate_up, halves), ("down", terms.down, whole)):
        for e in range(experts.num_experts - experts.routing.shared):
            for shard, target in targets_of(expert_of(w, e), partitions):
                yield f"{name}.{e}", shard, target
