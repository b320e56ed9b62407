"""A worked example of a kind of cache: the state of a gated recurrence, h = gate * h + input. One file, with a
registration for the core and one for the worker."""

from dataclasses import dataclass

import torch

from quire.attention.base import CacheBackend, StepInputs
from quire.attention.selector import register_backend
from quire.core.kv_groups import StateGroup, register_group
from quire.layers.cache_layer import CacheLayer
from quire.messages.kv_cache import PagePart, StateSpec

CHECKPOINT_EVERY = 32


@dataclass(frozen=True)
class RecurrentSpec(StateSpec):
    """A state of one vector."""


register_group(RecurrentSpec, StateGroup)


@dataclass
class ScanMetadata:
    step: StepInputs
    block_table: torch.Tensor
    block_size: int


class ScanTorchBackend(CacheBackend):
    """The cache is [pages, width]: page i of a row holds the state after the last computed token of its block i."""

    name = "scan-torch"
    kinds = (RecurrentSpec,)

    def build(self, step, block_table, block_size):
        return ScanMetadata(step, block_table, block_size)

    def scan(self, gate, new, cache, metadata):
        """[N, width] each -> states [N, width]."""
        out = torch.zeros_like(new)
        step, size = metadata.step, metadata.block_size
        starts = step.query_start.tolist()
        before = []
        for i, (row, length) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            first = length - (starts[i + 1] - starts[i])
            # All states are read before any is written, as by a kernel whose rows run side by side.
            before.append(cache[metadata.block_table[row, (first - 1) // size]].clone() if first > 0 else None)
        for i, (row, length) in enumerate(zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)):
            begin, end = starts[i], starts[i + 1]
            if row < 0 or begin == end:
                continue
            states = scan(gate[begin:end], new[begin:end], before[i])
            out[begin:end] = states
            first = length - (end - begin)
            for block in range(first // size, (length - 1) // size + 1):
                last = min((block + 1) * size, length) - 1
                cache[metadata.block_table[row, block]] = states[last - first].to(cache.dtype)
        return out


register_backend(ScanTorchBackend)


def scan(gate, new, state=None):
    state = torch.zeros_like(new[0]) if state is None else state.to(new.dtype)
    states = []
    for g, x in zip(gate, new, strict=True):
        state = g * state + x
        states.append(state)
    return torch.stack(states)


class StateLayer(CacheLayer):
    def kv_cache_spec(self, block_size, dtype):
        return RecurrentSpec(CHECKPOINT_EVERY, (PagePart((self.shape.head_size,), "float32"),))

    def forward(self, gate, new, ctx):
        (cache,) = self.views
        return self.backend.scan(gate, new, cache, ctx.metadata[self.group])


class DenseScan(torch.nn.Module):
    """The reference, for one sequence without a cache."""

    def __init__(self, layer):
        super().__init__()

    def forward(self, gate, new, ctx):
        return scan(gate, new)
