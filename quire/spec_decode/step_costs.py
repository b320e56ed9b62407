"""Measures at start-up what steps cost with and without drafts, by running some over rows of nothing."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.messages.plan import BlockAppends, NewRow, SchedulerOutput
from quire.messages.sampling_params import SamplingParams

Submit = Callable[[SchedulerOutput], Callable[[], object]]  # a step begins; calling the result waits for it
Costs = tuple[tuple[int, float], ...]

ROWS = (1, 4, 16, 64, 256)
MAX_SECONDS = 0.4  # no further run begins after that
SLOW = 0.01  # seconds of a step of which the host's part does not matter; shorter ones run in pairs
ROUNDS = 5
NEEDED = 3  # runs, however long they take: of a token, of two, and of the most of one row
GREEDY = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


def measure_step_costs(
    submit: Submit,
    num_rows: int,
    num_groups: int,
    num_drafts: int,
    max_tokens: int,
    fewest: int = 1,
    warm_up: bool = False,
    in_step: bool = False,
) -> tuple[Costs, Costs]:
    """(tokens, seconds) of steps in which no row has drafts, and in which all have `num_drafts`, by up to `num_rows`
    rows of a cache of `num_groups`; also of one row with `fewest`, the least that any is planned with. `warm_up`: first
    runs may compile. `in_step`: other ranks take part in each step, so that all must run the same ones, however long
    they take."""
    sizes = [rows for rows in ROWS if rows <= num_rows and rows * (1 + num_drafts) <= max_tokens] or [1]
    pairs = dict.fromkeys(((1, 0), (1, fewest), *((rows, drafts) for rows in sizes for drafts in (0, num_drafts))))
    plans = [_plan(range(rows), drafts) for rows, drafts in pairs]
    submit(_plan([], 0, new=[_new_row(row, num_groups) for row in range(sizes[-1])]))()
    for plan in plans if warm_up else ():
        submit(plan)()
    began, best = time.perf_counter(), [float("inf")] * len(plans)
    # In rounds, and the least of each: whatever disturbs a run disturbs those of other sizes too.
    for run, (i, plan) in enumerate(list(enumerate(plans)) * ROUNDS):
        if run >= NEEDED and not in_step and time.perf_counter() - began > MAX_SECONDS:
            break
        best[i] = min(best[i], _seconds(submit, plan, 1 if SLOW < best[i] < float("inf") and not in_step else 2))
    submit(_plan([], 0, finished=range(sizes[-1])))()
    plain: dict[int, float] = {}
    drafted: dict[int, float] = {}
    for plan, seconds in zip(plans, best, strict=True):
        if seconds < float("inf"):
            (drafted if plan.total_tokens > len(plan.rows) else plain)[plan.total_tokens] = seconds
    return tuple(sorted(plain.items())), tuple(sorted(drafted.items()))


def _seconds(submit: Submit, plan: SchedulerOutput, times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        wait = submit(plan)
    wait()
    return (time.perf_counter() - begin) / times


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
    """It reads and writes the null block, and advances on the device by a token or two."""
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
        token_limit=4,  # it stays within the shortest of rows
    )
