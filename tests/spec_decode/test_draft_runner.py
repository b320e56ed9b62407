"""Passes of a proposer's layers over rows whose lengths only the device knows."""

from types import SimpleNamespace

import pytest
import torch

from quire.attention.step_batch import StepBatch
from quire.messages.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from quire.messages.sampling_params import SamplingParams
from quire.spec_decode.draft_runner import DraftRunner
from quire.worker.rows import RowState
from tests.sample.rows import new_row

CPU = torch.device("cpu")
VOCAB = 50
DECODING, PROMPT = 2, 0  # rows


def make(token_shift: int) -> DraftRunner:
    """Row 2 has 7 tokens, the last of which was just drawn; row 0 is in the middle of a prompt of 9."""
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=1, dtype="float32")
    state = RowState(3, 12, KVCacheConfig(8, (KVCacheGroup((0,), spec),)), CPU, num_drafts=3)
    state.token_ids[:, :15] = torch.arange(15) + 15 * torch.arange(3).unsqueeze(1)
    state.num_tokens[:], state.num_computed[:] = torch.tensor([9, 0, 7]), torch.tensor([5, 0, 6])
    state.block_tables[0][DECODING, :2] = torch.tensor([3, 5])  # positions behind 7 have none
    return DraftRunner(state, SimpleNamespace(), last_position=8, token_shift=token_shift)


def logits(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


@pytest.mark.parametrize("token_shift", [0, 1])
@pytest.mark.parametrize("likeliest", [True, False])
def test_drafts_lie_behind_the_known_tokens(token_shift: int, likeliest: bool) -> None:
    runner = make(token_shift)
    before = runner.state.token_ids.clone()
    rows = torch.tensor([DECODING, PROMPT], dtype=torch.int32)
    runner.begin_rows(rows, torch.tensor([2, 4]))
    batch = StepBatch(rows, torch.tensor([0, 2, 6]), torch.tensor([0, 0, 1, 1, 1, 1]))
    inputs = runner.prepare(batch)
    # Up to the last token known, and the first that the step has left; shifted, each position has the token after it.
    assert inputs.input_ids.tolist() == [35, 36, 2, 3, 4, 5]
    first = [5, 6, 2, 3, 4, 5]
    assert inputs.positions.tolist() == [position - token_shift for position in first]
    for draft in (41, 42, 43):
        if likeliest:
            runner.append_likeliest(logits(draft, 44), rows)
        else:
            runner.append(torch.tensor([draft, 44]), rows)
        inputs = runner.prepare(StepBatch.of_equal(rows, 1))
    assert inputs.input_ids[0] == 43
    assert runner.state.token_ids[DECODING, 7:10].tolist() == [41, 42, 43]
    before[DECODING, 7:10] = runner.state.token_ids[DECODING, 7:10]
    assert torch.equal(runner.state.token_ids, before)  # a prompt is not written over
    assert runner.state.num_tokens.tolist() == [9, 0, 7] and runner.state.num_computed.tolist() == [5, 0, 6]


@pytest.mark.parametrize("likeliest", [True, False])
def test_padding_changes_nothing(likeliest: bool) -> None:
    """Row -1 is not the last one."""
    runner = make(0)
    rows = torch.tensor([DECODING, -1, -1], dtype=torch.int32)
    runner.begin(1)
    assert runner.prepare(StepBatch.of_equal(rows, 1)).seq_lens[0] == 7
    if likeliest:
        runner.append_likeliest(logits(41, 42, 43), rows)
    else:
        runner.append(torch.tensor([41, 42, 43]), rows)
    assert runner.state.token_ids[:, 7].tolist() == [7, 22, 41]


def test_drafts_of_another_vocabulary() -> None:
    """Those that no logits had, NO_TOKEN, are the first of it."""
    runner = make(1)
    rows = torch.tensor([-1, DECODING, PROMPT], dtype=torch.int32)
    to_target = torch.tensor([10, 20, 30])
    runner.begin()
    runner.num_computed.copy_(runner.state.num_computed)
    for draft, wanted in ((2, 30), (-1, 10)):
        runner.append(torch.tensor([1, draft, 1]), rows, to_target)
        runner.prepare(StepBatch.of_equal(rows[1:], 1))
        assert runner.state.token_ids[DECODING, int(runner.num_tokens[DECODING])] == wanted
    assert runner.num_tokens.tolist() == [8, -1, 8]


def test_what_lies_behind_a_rows_blocks_is_written_to_the_null_block() -> None:
    runner = make(0)
    rows = torch.tensor([DECODING], dtype=torch.int32)
    runner.begin(2)
    slots = []
    for _ in range(4):
        inputs = runner.prepare(StepBatch.of_equal(rows, 1))
        slots += inputs.slot_mapping[0].tolist()
    assert slots == [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 0]
    assert inputs.positions.tolist() == [8]
    for _ in range(4):
        inputs = runner.prepare(StepBatch.of_equal(rows, 1))
    assert inputs.positions.tolist() == [8]  # no model has embeddings for more


def test_a_new_request_does_not_find_the_blocks_of_the_one_before() -> None:
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=1, dtype="float32")
    state = RowState(2, 32, KVCacheConfig(8, (KVCacheGroup((0,), spec),)), CPU, clears_tables=True)
    state.block_tables[0][1] = 7
    new = new_row(1, SamplingParams())
    new.block_ids = [[3, 5]]
    state.add([new])
    assert state.block_tables[0].tolist() == [[0] * 8, [3, 5] + [0] * 6]
