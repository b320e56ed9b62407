"""Measures at start-up what steps cost with and without drafts, by running some over rows of nothing."""

import time
from collections.abc import Sequence

import numpy as np

from quire.messages.plan import BlockAppends, NewRow, SchedulerOutput
from quire.messages.sampling_params import SamplingParams
from quire.messages.speculation import DraftProfile
from quire.worker.model_runner import ModelRunner

ROWS = (1, 4, 16, 64, 256)
MAX_SECONDS = 0.4  # no further size is measured after that
SLOW = 0.01  # seconds of a step after which the host's part does not matter; shorter ones run in pairs
RUNS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def measure_step_costs(runner: ModelRunner, max_tokens: int, in_step: bool = False) -> DraftProfile:
    """`in_step`: other ranks take part in each step, so that all must run the same ones, however long they take."""
    proposer, most = runner.proposer, runner.num_drafts
    assert proposer is not None
    num_rows = len(runner.rows.num_tokens)
    sizes = [rows for rows in ROWS if rows <= num_rows and rows * (1 + most) <= max_tokens]
    # Three are needed: a token, another one, and the most of one row.
    cases = [(1, 0), (1, 1), *((rows, drafts) for rows in sizes for drafts in (0, most) if (rows, drafts) != (1, 0))]
    plain: dict[int, float] = {}
    drafted: dict[int, float] = {}
    held = range(max(sizes, default=1))
    groups = len(runner.block_sizes)
    _run(runner, _plan([], 0, new=[_new_row(row, groups) for row in held]))
    began = time.perf_counter()
    for i, (rows, drafts) in enumerate(cases):
        if i >= 3 and not in_step and time.perf_counter() - began > MAX_SECONDS:
            break
        seconds = _seconds(runner, rows, drafts, in_step)
        (drafted if drafts else plain)[rows * (1 + drafts)] = seconds
    _run(runner, _plan([], 0, finished=held))
    captured = runner.graphs.tokens_per_row if runner.graphs is not None else []
    return DraftProfile(
        finds=proposer.finds,
        rests=proposer.finds,
        sizes=tuple(count - 1 for count in captured if count > 1),
        plain=tuple(sorted(plain.items())),
        drafted=tuple(sorted(drafted.items())),
    )


def _seconds(runner: ModelRunner, num_rows: int, num_drafts: int, in_step: bool) -> float:
    """The least of several runs: the first may compile, record or allocate, and others may be disturbed."""
    plan = _plan(range(num_rows), num_drafts)
    began, best = time.perf_counter(), float("inf")
    for _ in range(RUNS):
        best = min(best, _timed(runner, plan, 1 if SLOW < best < float("inf") and not in_step else 2))
        if not in_step and time.perf_counter() - began > MAX_SECONDS / 4:
            break
    return best


def _timed(runner: ModelRunner, plan: SchedulerOutput, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        runner.execute_model(plan)
        pending = runner.sample_tokens()
    pending.result()
    return (time.perf_counter() - begin) / times


def _run(runner: ModelRunner, plan: SchedulerOutput) -> None:
    runner.execute_model(plan)
    runner.sample_tokens().result()


def _plan(
    rows: Sequence[int], num_drafts: int, new: Sequence[NewRow] = (), finished: Sequence[int] = ()
) -> SchedulerOutput:
    count = len(rows)
    return SchedulerOutput(
        step=0,
        rows=np.array(rows, np.int32),
        num_tokens=np.full(count, 1 + num_drafts, np.int32),
        finished_rows=list(finished),
        new_rows=list(new),
        appended=BlockAppends(),
        block_copies=[],
        common_prefix_blocks=(),
        num_drafts=np.full(count, num_drafts, np.int32),
    )


def _new_row(row: int, num_groups: int) -> NewRow:
    """It reads and writes the null block, and advances on the device by what it accepts."""
    return NewRow(
        row=row,
        request_id=f"step costs {row}",
        token_ids=np.zeros(2, np.int32),
        num_computed=1,
        block_ids=[[0]] * num_groups,
        params=GREEDY,
        seed=0,
        num_prompt_tokens=1,
        stop_ids=[],
        token_limit=2**31 - 1,
    )
