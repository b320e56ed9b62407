"""The running requests as arrays, one row each, so that a steady decode step is vector work."""

import bisect

import numpy as np

from quire.core.request import Request


class RunningSet:
    """Rows are the worker's rows. A row's generation changes whenever a request leaves it, so results that arrive late
    are distinguished from those of its next owner.

    `num_tokens` counts confirmed tokens, `num_pending` those being sampled in plans in flight; `num_computed` is
    optimistic: it counts what plans in flight will have computed. Plans may also verify drafts (`num_drafts_pending`):
    both counts are of what is certain, as if none were accepted, and results correct them.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, num_drafts: int = 0) -> None:
        rows = self.num_rows = max_num_seqs
        self.token_ids = np.zeros((rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(rows, np.int64)
        self.num_pending = np.zeros(rows, np.int64)
        self.num_computed = np.zeros(rows, np.int64)
        self.num_drafts_pending = np.zeros(rows, np.int64)  # in plans in flight
        self.num_frames = np.zeros(rows, np.int64)  # plans in flight
        self.num_prompt_tokens = np.zeros(rows, np.int64)
        self.token_limit = np.zeros(rows, np.int64)  # prompt + max_tokens, or max_model_len
        self.generation = np.zeros(rows, np.int64)
        self.index = np.zeros(rows, np.int64)  # the front end's number of the request
        self.constrained = np.zeros(rows, bool)  # by a grammar
        self.drafts = np.zeros((rows, num_drafts), np.int32)  # of constrained rows, behind their confirmed tokens
        self.num_cached = np.zeros(rows, np.int32)
        self.pools = np.zeros(rows, bool)
        self.num_pooling = 0
        self.awaits_first_token = np.zeros(rows, bool)
        self.num_awaiting_first_token = 0
        self.stop_ids = np.full((4, rows), -1, np.int32)  # a column per row: comparing goes along rows
        self.requests = np.empty(rows, object)
        self._free = list(range(rows - 1, -1, -1))
        self._sorted: list[tuple[tuple[int, int], int]] = []
        self._order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def order(self) -> np.ndarray:
        """Rows, the one to serve first in front."""
        if self._order is None:
            self._order = np.fromiter((row for _, row in self._sorted), np.int64, len(self._sorted))
        return self._order

    def last(self) -> Request:
        """The one to serve last: the first to be preempted."""
        request: Request = self.requests[self._sorted[-1][1]]
        return request

    def all(self) -> list[Request]:
        return [self.requests[row] for _, row in self._sorted]

    def add(self, request: Request, num_computed: int, token_limit: int) -> int:
        row = self._free.pop()
        request.row = row
        bisect.insort(self._sorted, (request.key, row))
        self._order = None
        count = len(request.token_ids)
        self.token_ids[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_pending[row] = self.num_frames[row] = self.num_drafts_pending[row] = 0
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = num_computed
        self.token_limit[row] = token_limit
        self.index[row] = request.core.index
        self.constrained[row] = request.core.sampling.structured_outputs is not None
        self.num_cached[row] = request.num_cached
        self._set_pools(row, request.core.pooling is not None)
        self._set_awaits_first_token(row, request.scheduled_at > 0)
        self.requests[row] = request
        self._set_stop_ids(row, request)
        return row

    def remove(self, request: Request) -> None:
        """The request leaves its row and keeps its confirmed tokens."""
        row = request.row
        request.num_computed = self.num_ready(row)
        request.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        del self._sorted[bisect.bisect_left(self._sorted, (request.key, row))]
        self._order = None
        self._set_pools(row, False)
        self._set_awaits_first_token(row, False)
        self.requests[row] = None
        self.generation[row] += 1
        self._free.append(row)
        request.row = -1

    def num_ready(self, row: int) -> int:
        """Confirmed tokens whose KV is computed, or will be by plans in flight."""
        return int(min(self.num_computed[row], self.num_tokens[row]))

    def num_known(self, rows: np.ndarray) -> np.ndarray:
        """Confirmed and pending tokens."""
        return self.num_tokens[rows] + self.num_pending[rows]

    def decodes(self, rows: np.ndarray) -> np.ndarray:
        """Which rows have only a generated token to compute."""
        known = self.num_known(rows)
        return (known - self.num_computed[rows] == 1) & (known > self.num_prompt_tokens[rows])

    def micro_batch(self, num_stages: int) -> np.ndarray:
        """Rows that can run while other stages have plans: none whose token is in flight, and of those that decode
        about as many as every other stage has."""
        rows = self.order[self.num_pending[self.order] == 0]
        decodes = self.decodes(rows)
        return rows[~decodes | (np.cumsum(decodes) <= -(-len(self) // num_stages))]

    def most_computed(self, rows: np.ndarray) -> np.ndarray:
        """If all drafts of plans in flight are accepted."""
        return self.num_computed[rows] + self.num_drafts_pending[rows]

    def advance(
        self, rows: np.ndarray, counts: np.ndarray, drafts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """A plan computes `counts` more tokens of the rows, the last `drafts` of them drafts. How many are certainly
        computed then, and which rows get a token."""
        if drafts is not None:
            self.num_drafts_pending[rows] += drafts
            counts = counts - drafts
        computed = self.num_computed[rows] + counts
        pending = self.num_pending[rows]
        samples = computed == self.num_tokens[rows] + pending
        self.num_computed[rows] = computed
        self.num_pending[rows] = pending + samples
        self.num_frames[rows] += 1
        return computed, samples

    def append(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Confirm a pending token of each row. The rows' lengths then."""
        last = self.num_tokens[rows]
        self.token_ids[rows, last] = tokens
        lengths = last + 1
        self.num_tokens[rows] = lengths
        self.num_pending[rows] -= 1
        return lengths

    def append_several(
        self, rows: np.ndarray, tokens: np.ndarray, offset: np.ndarray, counts: np.ndarray, drafts: np.ndarray
    ) -> None:
        """Confirm `counts` tokens of each row, one row after the other, of which `offset` is each token's number. The
        plan had `drafts` drafts and made one token certain."""
        first = self.num_tokens[rows]
        self.token_ids.reshape(-1)[np.repeat(rows * self.token_ids.shape[1] + first, counts) + offset] = tokens
        self.num_tokens[rows] = first + counts
        self.num_computed[rows] += counts - 1
        self.num_pending[rows] -= 1
        self.num_drafts_pending[rows] -= drafts

    def note_first_token(self, request: Request) -> None:
        request.scheduled_at = 0.0
        self._set_awaits_first_token(request.row, False)

    def _set_awaits_first_token(self, row: int, value: bool) -> None:
        self.num_awaiting_first_token += value - int(self.awaits_first_token[row])
        self.awaits_first_token[row] = value

    def _set_pools(self, row: int, value: bool) -> None:
        self.num_pooling += value - int(self.pools[row])
        self.pools[row] = value

    def _set_stop_ids(self, row: int, request: Request) -> None:
        ids = request.stop_ids
        have = len(self.stop_ids)
        if len(ids) > have:
            more = np.full((len(ids) - have, self.stop_ids.shape[1]), -1, np.int32)
            self.stop_ids = np.concatenate([self.stop_ids, more])
        self.stop_ids[:, row] = -1
        self.stop_ids[: len(ids), row] = ids
