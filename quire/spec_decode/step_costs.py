"""Measures at start-up what steps cost with and without drafts, by running some over rows of nothing."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.messages.plan import BlockAppends, NewRow, SchedulerOutput
from quire.messages.sampling_params import SamplingParams

Submit = Callable[[SchedulerOutput], Callable[[], object]]  # a step begins; calling the result waits for it
Costs = tuple[tuple[int, float], ...]

ROWS = (1, 4, 16, 64, 256)
MAX_SECONDS = 0.4  # no further size is measured after that
SLOW = 0.01  # seconds of a step after which the host's part does not matter; shorter ones run in pairs
RUNS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def measure_step_costs(
    submit: Submit, num_rows: int, num_groups: int, num_drafts: int, max_tokens: int, in_step: bool
) -> tuple[Costs, Costs]:
    """(tokens, seconds) of steps in which no row has drafts, and in which all have `num_drafts`, by up to `num_rows`
    rows of a cache of `num_groups`. `in_step`: other ranks take part in each step, so that all must run the same ones,
    however long they take."""
    sizes = [rows for rows in ROWS if rows <= num_rows and rows * (1 + num_drafts) <= max_tokens] or [1]
    # Three are needed: a token, another one, and the most of one row.
    further = ((rows, drafts) for rows in sizes for drafts in (0, num_drafts) if (rows, drafts) != (1, 0))
    plain: dict[int, float] = {}
    drafted: dict[int, float] = {}
    submit(_plan([], 0, new=[_new_row(row, num_groups) for row in range(sizes[-1])]))()
    began = time.perf_counter()
    for i, (rows, drafts) in enumerate([(1, 0), (1, 1), *further]):
        if i >= 3 and not in_step and time.perf_counter() - began > MAX_SECONDS:
            break
        (drafted if drafts else plain)[rows * (1 + drafts)] = _seconds(submit, _plan(range(rows), drafts), in_step)
    submit(_plan([], 0, finished=range(sizes[-1])))()
    return tuple(sorted(plain.items())), tuple(sorted(drafted.items()))


def _seconds(submit: Submit, plan: SchedulerOutput, in_step: bool) -> float:
    """The least of several runs: the first may compile, record or allocate, and others may be disturbed."""
    began, best = time.perf_counter(), float("inf")
    for _ in range(RUNS):
        times = 1 if SLOW < best < float("inf") and not in_step else 2
        begin = time.perf_counter()
        for _ in range(times):
            wait = submit(plan)
        wait()
        best = min(best, (time.perf_counter() - begin) / times)
        if not in_step and time.perf_counter() - began > MAX_SECONDS / 4:
            break
    return best


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
        num_prompt_tokens=2**30,  # nothing counts as output that a proposer would remember
        stop_ids=[],
        token_limit=2**31 - 1,
    )
