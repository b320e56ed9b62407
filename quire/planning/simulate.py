"""The steps of a whole workload, as the scheduler would make them: for checking predictions against measurements."""

from collections import deque
from collections.abc import Iterable, Sequence

from quire.planning.roofline import Step


def workload_steps(
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    windows: Iterable[int | None],
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> list[Step]:
    """All requests are there at the start: running ones advance, then others are admitted within the token budget."""
    waiting = deque(zip(prompt_lens, output_lens, strict=True))
    running: list[list[int]] = []  # prompt tokens, output tokens, computed tokens
    kinds, steps = list(windows), []
    while waiting or running:
        step, budget = Step(), max_num_batched_tokens
        for row in running:
            new = min(max(1, row[0] - row[2]), budget)
            if new:
                step.add(kinds, new, row[2])
                row[2] += new
                budget -= new
        while waiting and budget and len(running) < max_num_seqs:
            prompt, output = waiting.popleft()
            new = min(prompt, budget)
            step.add(kinds, new, 0)
            running.append([prompt, output, new])
            budget -= new
        running = [row for row in running if row[2] < row[0] + row[1] - 1]
        steps.append(step)
    return steps
