"""Blocks of the running rows: appended as rows advance, registered when full, freed when out of the window."""

import numpy as np

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.core.running_set import RunningSet
from quire.messages.plan import BlockAppends


class RowBlocks:
    """Keeps by row what the KV-cache manager would have to look up request by request, so that a step in which no row
    crosses a block boundary is a few comparisons."""

    def __init__(self, kv: KVCacheManager, running: RunningSet) -> None:
        self._kv = kv
        self._running = running
        rows = running.num_rows
        self._capacity = np.zeros(rows, np.int64)  # tokens its blocks can hold
        self._num_registered = np.zeros(rows, np.int64)  # tokens in blocks that others can find
        self._window_start = np.zeros((len(kv.window_groups), rows), np.int64)  # first block held

    def add(self, request: Request) -> None:
        """The request has entered its row."""
        row = request.row
        self._capacity[row] = self._kv.capacity(request)
        self._num_registered[row] = 0
        self._window_start[:, row] = 0

    def extend(self, rows: np.ndarray, num_tokens: np.ndarray, appended: BlockAppends) -> np.ndarray:
        """Blocks for rows to hold `num_tokens` each. Places of rows that are still short, if it is not as simple as one
        block for each row that needs any."""
        missing = num_tokens - self._capacity[rows]
        short = np.flatnonzero(missing > 0)
        if len(short):
            rows = rows[short]
            added = self._kv.append_one_block(self._running.requests[rows].tolist(), int(missing.max()), appended)
            if added:
                self._capacity[rows] += added
                return short[:0]
        return short

    def extend_one(self, request: Request, num_tokens: int, appended: BlockAppends) -> bool:
        """Blocks for one request to hold `num_tokens`; False if they do not suffice."""
        if not self._kv.append_blocks(request, num_tokens, appended):
            return False
        self._capacity[request.row] = self._kv.capacity(request)
        return True

    def free_out_of_window(self) -> None:
        """Free blocks that no query from the confirmed position on can see."""
        run = self._running
        rows = run.order
        if not len(self._window_start) or not len(rows):
            return
        next_query = np.minimum(run.num_computed[rows], run.num_tokens[rows] - 1)
        start = self._kv.window_start(next_query)
        moved = (start > self._window_start[:, rows]).any(axis=0)
        self._window_start[:, rows] = start
        for i in np.flatnonzero(moved):
            self._kv.free_out_of_window(run.requests[rows[i]], int(next_query[i]))

    def register_full(self, rows: np.ndarray, num_computed: np.ndarray) -> None:
        """Blocks full of confirmed tokens whose KV is computed, or will be by plans made so far, can be found from now
        on."""
        run = self._running
        ready, done = np.minimum(num_computed, run.num_tokens[rows]), self._num_registered[rows]
        full = self._kv.newly_full(done, ready)
        if not len(full):
            return
        rows, ready, done = rows[full], ready[full], done[full]
        self._num_registered[rows] = ready
        for row, start, stop in zip(rows.tolist(), done.tolist(), ready.tolist(), strict=True):
            self._kv.register(run.requests[row], run.token_ids[row], start, stop)

    def register(self, request: Request, num_tokens: int, admitting: bool = False) -> None:
        """The request's full blocks among its first `num_tokens` can be found from now on. `admitting` as for
        KVCacheManager.register."""
        row = request.row
        registered = int(self._num_registered[row])
        self._kv.register(request, self._running.token_ids[row], registered, num_tokens, admitting)
        self._num_registered[row] = num_tokens
