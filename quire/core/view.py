"""What the engine is doing right now, for those who watch: lengths, numbers and counts, never a text."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from quire.core.block_pool import KVCacheBlock
from quire.core.scheduler import Scheduler
from quire.messages.plan import SchedulerOutput

MAX_STEPS = 256  # kept for the next sample
MAX_ROWS = 512  # of each list of requests
MAX_BLOCKS = 4096  # whose state a sample has: a large cache is shown over several samples
WATCH_SECONDS = 5.0  # without a sample, after which steps are not noted any more


class EngineView:
    """Exists while somebody watches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps: deque[tuple[int, float, float, int, int, int, int]] = deque(maxlen=MAX_STEPS)
        self._sampled_at = time.monotonic()

    def after_step(self, plan: SchedulerOutput, seconds: float) -> "EngineView | None":
        """Before the step's results are applied; None if nobody watches any more."""
        now = time.monotonic()
        run, total = self._scheduler.running, plan.total_tokens
        drafts = 0 if plan.num_drafts is None else int(plan.num_drafts.sum())
        certain = plan.num_tokens if plan.num_drafts is None else plan.num_tokens - plan.num_drafts
        # A row with one token to compute is past its prompt, or at the prompt's last token.
        decodes = int(((certain == 1) & (run.num_tokens[plan.rows] > run.num_prompt_tokens[plan.rows])).sum())
        self._steps.append((plan.step, now, seconds, total - decodes - drafts, decodes, drafts, len(plan.rows)))
        return self if now - self._sampled_at < WATCH_SECONDS else None

    def sample(self, since: int, cursor: Sequence[int]) -> dict[str, Any]:
        """The requests, the steps after step `since`, and the blocks from `cursor` on: of the watcher's last sample, or
        empty. Each API process has its own, so that each sees everything."""
        scheduler, run = self._scheduler, self._scheduler.running
        self._sampled_at = time.monotonic()
        rows = run.order[:MAX_ROWS]
        columns = (run.num_prompt_tokens, run.num_computed, run.num_tokens, run.token_limit, run.num_cached)
        ids = [request.key[1] for request in run.requests[rows]]
        waiting = sorted((r for r in scheduler.requests.values() if r.row < 0), key=lambda r: r.key)[:MAX_ROWS]
        return {
            "running": list(zip(ids, *(column[rows].tolist() for column in columns), strict=True)),
            "waiting": [(r.key[1], r.num_prompt_tokens, len(r.token_ids), int(r.state)) for r in waiting],
            "steps": [step for step in self._steps if step[0] > since],
            "blocks": self._sample_blocks(cursor),
            "groups": [(type(group).__name__, group.block_size, group.window) for group in scheduler.kv.groups],
            "prompt_tokens": scheduler.results.num_prompt_tokens,
            "generated_tokens": scheduler.results.num_generated_tokens,
            "stats": scheduler.stats(),
        }

    def _sample_blocks(self, cursor: Sequence[int]) -> dict[str, Any]:
        """A byte for each block of the next slice: 0, 1 or 2 (more) owners; 4: its content can be found; from bit 3
        on 1 + its group, where that is known."""
        pool, kv, run = self._scheduler.kv.pool, self._scheduler.kv, self._scheduler.running
        # The cursor: the next block, the last (those behind it are as they were), the last used of this round.
        first, last, used = cursor or (1, len(pool.blocks) - 1, 0)
        if first > last:
            first, last, used = 1, max(used, 1), 0
        tails = [block.id for request in run.all() for blocks in request.blocks for block in blocks[-1:]]
        last = max(last, *tails, 1)
        part = pool.blocks[first : min(first + MAX_BLOCKS, last + 1)]
        # A block that is not full yet has no key: it is one of its owner's last.
        group_of: dict[KVCacheBlock, int] = {}
        if len(kv.groups) > 1:
            tables = [enumerate(request.blocks) for request in run.all()]
            group_of = {block: g for table in tables for g, blocks in table for block in blocks[-2:]}
        only = 0 if len(kv.groups) == 1 else -1
        states = [
            (b.ref if b.ref < 2 else 2) + (12 + 8 * (b.key[1] % 30) if b.key else 8 + 8 * group_of.get(b, only))
            for b in part
        ]
        used = max([used, *(b.id for b in part if b.ref or b.key)])
        return {
            "total": pool.num_blocks,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "first": first - 1,
            "states": bytes(states),
            "cursor": (first + len(part), last, used),
        }
