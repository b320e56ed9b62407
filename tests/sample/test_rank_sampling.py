"""The samplers of several ranks: one draws, and what the others append or return is the same."""

import numpy as np
import pytest
import torch

from quire.kernels.sample_tokens import Draw
from quire.layers.parallel import TensorParallel
from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.ranks import FollowingSampler, LeadingSampler, make_sampler
from quire.sample.sampler import Sampler
from quire.worker.rows import RowState
from tests.executor.threads import on_every_rank

CPU = torch.device("cpu")
VOCAB, ROWS = 50, 4
KNOWN = [3, 5, 4]  # tokens of rows
COMPUTED = [3, 4, 4]  # the second has more of its prompt to come


def new_state() -> RowState:
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
    return RowState(ROWS, 16, KVCacheConfig(8, (KVCacheGroup((0,), spec),)), CPU)


def new_rows() -> list[NewRow]:
    params = SamplingParams(temperature=0.9, max_tokens=8)
    return [
        NewRow(row, str(row), np.arange(known, dtype=np.int32), computed, [[1, 2]], params, row, known, [], 12)
        for row, (known, computed) in enumerate(zip(KNOWN, COMPUTED, strict=True))
    ]


def start(tp: TensorParallel) -> tuple[Sampler, RowState, torch.Tensor]:
    sampler, state = make_sampler(tp.group, ROWS, VOCAB, CPU, "raw_logprobs", ()), new_state()
    assert isinstance(sampler, FollowingSampler if tp.rank else LeadingSampler)
    state.add(new_rows())
    for new in new_rows():
        sampler.add_row(new)
    # What the others have for logits does not matter.
    logits = (
        torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 9
        if tp.rank == 0
        else torch.empty(ROWS, 2)
    )
    return sampler, state, logits


def test_fused_draws_are_appended_by_all() -> None:
    def step(tp: TensorParallel) -> tuple[torch.Tensor, ...]:
        sampler, state, logits = start(tp)
        rows = torch.tensor([0, 1, 2, -1], dtype=torch.int32)  # with padding
        out = torch.zeros(3, dtype=torch.int32)
        draw = sampler.choose_draw([0, 1, 2])
        assert draw is not None
        sampler.sample_fused(logits, rows, state, draw, out)
        return out, state.token_ids, state.num_tokens

    first, *others = on_every_rank(step, 3)
    assert first[2].tolist() == [4, 5, 5, 0] and first[1][0, 3] == first[0][0]
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("draw", [Draw.GREEDY, Draw.RANDOM])
def test_draws_at_several_positions_reach_all(draw: Draw) -> None:
    def step(tp: TensorParallel) -> torch.Tensor:
        sampler, _, logits = start(tp)
        sampler.choose_draw([0, 1, 2])
        return sampler.draw_fused(logits, torch.tensor([0, 0, 1, 2]), torch.tensor([3, 4, 5, 4]), draw)

    first, second = on_every_rank(step)
    assert first.dtype == second.dtype == torch.int64 and torch.equal(first, second)
