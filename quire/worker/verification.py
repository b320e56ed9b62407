"""A step in which rows verify drafts: logits at several positions of a row, and how many tokens each accepts."""

from collections.abc import Callable

import numpy as np
import torch

from quire.kernels.accept_drafts import accept_drafts
from quire.kernels.dispatch import supports_triton
from quire.kernels.transfer import to_device
from quire.messages.plan import GrammarMask, ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import Logprobs
from quire.sample.processors import SampleBatch
from quire.sample.sampler import Sampler
from quire.spec_decode.proposer import DraftStep, Proposer
from quire.worker.rows import RowState, offsets_within
from quire.worker.transfer import Pending


def logit_positions(query_start: np.ndarray, num_drafts: np.ndarray | None) -> np.ndarray:
    """Which of a step's tokens get logits: each row's last, and with d drafts the d before it."""
    ends = query_start[1:] - 1
    if num_drafts is None:
        return ends
    counts = 1 + num_drafts
    return np.repeat(ends - num_drafts, counts) + offsets_within(counts)


def sample_and_verify(
    plan: SchedulerOutput,
    logits: torch.Tensor,  # [m or more, vocab]: at logit_positions(), then padding
    rows: torch.Tensor,  # [n]
    state: RowState,
    sampler: Sampler,
    grammar: GrammarMask | None,
    num_drafts: int,
    proposer: Proposer,
    after: DraftStep,
    complete: Callable[[ModelRunnerOutput], ModelRunnerOutput],
) -> Pending[ModelRunnerOutput]:
    """Draw a token at every position as if the drafts before it were right; rows keep those up to the first surprise,
    and get new drafts of up to `num_drafts` from the proposer. The host gets these too if it has to make masks for
    them, and their number if there may be fewer."""
    assert plan.num_drafts is not None
    counts = 1 + plan.num_drafts
    width = int(counts.max())
    place = np.repeat(np.arange(len(counts)), counts)
    offset = offsets_within(counts)
    first = np.concatenate(([0], np.cumsum(counts)))
    row_list = plan.rows[place].tolist()
    verifies = width > 1
    logits = logits[: len(place)]
    arrays = (first, plan.rows[place], offset, plan.num_drafts[place], place)
    first_, position_rows, offset_, drafts, place_ = to_device(logits.device, *arrays)
    position_rows = position_rows.long()
    known = state.num_tokens[position_rows]
    positions = known + offset_
    draw = sampler.choose_draw(row_list, grammar) if supports_triton(logits.device) else None
    drawn = None
    if proposer.sampled is not None and verifies:
        drawn = proposer.sampled.at(position_rows, offset_, drafts, state, sampler.parameters.device.greedy)
    places: list[int] = []
    found: tuple[torch.Tensor, ...] = ()
    batch = None
    if draw is not None:
        tokens = sampler.draw_fused(logits, position_rows, positions, draw, drawn)
    else:
        batch = SampleBatch(
            rows=position_rows,
            row_list=row_list,
            positions=positions,
            done=state.num_computed[position_rows] == known + drafts,
            token_ids=state.token_ids,
            num_ahead=offset_.long() if verifies else None,
            max_ahead=num_drafts,
            drafts=drawn,
        )
        sampled = sampler.sample(logits, batch, grammar)
        tokens, places, top = sampled.token_ids, sampled.places, sampled.logprobs
        found = (top.token_ids, top.logprobs, top.ranks) if top is not None else ()
    out = torch.empty(len(counts), width, dtype=torch.int32, device=logits.device)
    num_sampled = torch.empty(len(counts), dtype=torch.int32, device=logits.device)
    accept_drafts(tokens, first_, rows, state, out, num_sampled)
    after.num_sampled = num_sampled
    if batch is not None and verifies and sampler.follows_tokens:
        batch.done = offset_ < num_sampled[place_.long()]
        sampler.keep_accepted(tokens, batch)
    where = place[places] * width + offset[places]

    def make(ids: np.ndarray, num_sampled: np.ndarray, *found: np.ndarray) -> ModelRunnerOutput:
        return complete(ModelRunnerOutput(ids, num_sampled, Logprobs(where, *found) if found else None))

    constrained = sampler.constrains(plan.rows.tolist())
    if not (constrained or proposer.finds):
        pending = Pending(make, out, num_sampled, *found)
        proposer.propose_on_ranks(after)  # results do not wait for it
        return pending
    proposer.propose_on_ranks(after)
    drafts_found = [state.num_found[rows.long()]] if proposer.finds else []
    new_drafts = [drafts_of(rows, state, num_drafts)] if constrained else []

    def make_with_drafts(*arrays: np.ndarray) -> ModelRunnerOutput:
        rest = list(arrays)
        num_found = rest.pop(0) if drafts_found else None
        drafts = rest.pop(0) if new_drafts else None
        output = make(*rest)
        output.num_found, output.drafts = num_found, drafts
        return output

    return Pending(make_with_drafts, *drafts_found, *new_drafts, out, num_sampled, *found)


def drafts_of(rows: torch.Tensor, state: RowState, num_drafts: int) -> torch.Tensor:
    """[n, num_drafts] int32: what lies behind the known tokens of rows [n]."""
    rows = rows.long()
    at = state.num_tokens[rows].unsqueeze(1) + torch.arange(num_drafts, device=rows.device)
    return state.token_ids[rows.unsqueeze(1), at]
