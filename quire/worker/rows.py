"""The worker's persistent batch: one row per running request, on the device. Plans contain only changes."""

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.transfer import aligned, to_device
from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import BlockAppends, NewRow

MAX_ENTRIES = 2**31 - 1  # indices are int32
LONG_PROMPT = 1024  # tokens


def row_state_bytes(num_rows: int, max_model_len: int, block_sizes: list[int]) -> int:
    widths = [-(-max_model_len // size) for size in block_sizes]
    return num_rows * (4 * max_model_len + 4 * sum(widths) + 3 * 8)


def offsets_within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each of `counts`."""
    first = np.cumsum(counts) - counts
    return np.arange(int(counts.sum()), dtype=np.int32) - np.repeat(first, counts)


class RowState:
    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        config: KVCacheConfig,
        device: torch.device,
        num_drafts: int = 0,
        pages_per_block: Sequence[int] | None = None,
        clears_tables: bool = False,
    ) -> None:
        """`num_drafts`: the most that a row may hold behind its known tokens. `pages_per_block`: by group; tables are
        of the kernels' pages, by default one to a block. `clears_tables`: positions behind a row's blocks may be
        written, and must not find those of the request before."""
        max_model_len += num_drafts
        self._clears_tables = clears_tables
        self._pages = list(pages_per_block or [1] * len(config.groups))
        self._has_several_pages = any(count > 1 for count in self._pages)
        counted = list(zip(config.groups, self._pages, strict=True))
        widths = [-(-max_model_len // group.spec.block_size) * pages for group, pages in counted]
        if num_rows * max(max_model_len, sum(widths)) > MAX_ENTRIES:
            raise ValueError(
                f"max_num_seqs {num_rows} x max_model_len {max_model_len} is more than the {MAX_ENTRIES} tokens that "
                "can be indexed; lower one of them (--max-num-seqs, --max-model-len)"
            )
        self.device = device
        # One more where there are drafts: a head reads, at a position, the token after it.
        width = max_model_len + (num_drafts > 0)
        self.token_ids = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        # In one allocation, each at a multiple of 16 bytes: new rows are one write.
        self._counts = torch.zeros(3, aligned(num_rows, 8), dtype=torch.int64, device=device)
        self.num_tokens, self.num_computed, self.token_limit = self._counts[:, :num_rows]
        self.num_found = torch.zeros(num_rows, dtype=torch.int32, device=device)  # drafts, if not always all
        self.block_sizes = [group.spec.block_size // pages for group, pages in counted]
        # All tables in one allocation, so that the blocks of every group are appended by one write.
        self._all_tables = torch.zeros(num_rows * sum(widths), dtype=torch.int32, device=device)
        parts = self._all_tables.split([num_rows * width for width in widths])
        self.block_tables = [part.view(num_rows, width) for part, width in zip(parts, widths, strict=True)]
        self._widths = np.array(widths)
        self._bases = num_rows * (np.cumsum(widths) - widths)

    def add(self, new_rows: list[NewRow]) -> None:
        if not new_rows:
            return
        if self._clears_tables:
            (rows,) = to_device(self.device, [new.row for new in new_rows], dtype=np.int64)
            for table in self.block_tables:
                table.index_fill_(0, rows, 0)  # the null block
        if len(new_rows) == 1 or sum(len(new.token_ids) for new in new_rows) >= LONG_PROMPT * len(new_rows):
            self._add_each(new_rows)
        else:
            self._add_at_once(new_rows)

    def _add_each(self, new_rows: list[NewRow]) -> None:
        """A few copies for each row: one alone, or rows so long that places of their tokens would cost more."""
        parts: list[np.ndarray | Sequence[int]] = []
        for new in new_rows:
            parts += [(len(new.token_ids), new.num_computed, new.token_limit), new.token_ids]
            parts += map(self._page_ids, self._pages, new.block_ids)
        values = iter(to_device(self.device, *parts))
        for new in new_rows:
            self._counts[:, new.row] = next(values)
            for table in (self.token_ids, *self.block_tables):
                given = next(values)
                table[new.row, : len(given)] = given

    def _add_at_once(self, new_rows: list[NewRow]) -> None:
        """As many operations for any number of rows."""
        width = self.token_ids.shape[1]
        rows = [new.row for new in new_rows]
        counts = np.array([(len(new.token_ids), new.num_computed, new.token_limit) for new in new_rows])
        token_at = np.concatenate([np.arange(len(new.token_ids)) + new.row * width for new in new_rows])
        tokens = np.concatenate([new.token_ids for new in new_rows])
        none = np.empty(0, np.int64)
        entries = [(none, none)] + [
            (np.arange(len(ids)) + self._bases[group] + new.row * self._widths[group], ids)
            for new in new_rows
            for group, ids in enumerate(map(self._page_ids, self._pages, new.block_ids))
        ]
        block_at = np.concatenate([at for at, _ in entries])
        blocks = np.concatenate([np.asarray(ids, np.int64) for _, ids in entries])
        arrays = to_device(self.device, rows, counts, token_at, tokens, block_at, blocks, dtype=np.int64)
        rows_, counts_, token_at_, tokens_, block_at_, blocks_ = arrays
        self._counts.index_copy_(1, rows_, counts_.view(-1, 3).T)
        self.token_ids.view(-1).index_copy_(0, token_at_, tokens_.int())
        self._all_tables.index_copy_(0, block_at_, blocks_.int())

    @staticmethod
    def _page_ids(count: int, block_ids: list[int]) -> Sequence[int]:
        """The kernels' pages in blocks of `count` of them."""
        return block_ids if count == 1 else [block * count + i for block in block_ids for i in range(count)]

    def append_blocks(self, appended: BlockAppends) -> None:
        if not appended.rows:
            return
        groups = np.array(appended.groups)
        first = self._bases[groups] + np.array(appended.rows) * self._widths[groups]
        if self._has_several_pages:
            counts = np.array(self._pages)[groups]
            within = offsets_within(counts)
            at = np.repeat(first + np.array(appended.positions) * counts, counts) + within
            ids: np.ndarray | list[int] = np.repeat(np.array(appended.block_ids) * counts, counts) + within
        else:
            at, ids = first + np.array(appended.positions), appended.block_ids
        at_, blocks_ = to_device(self.device, at, ids, dtype=np.int64)
        self._all_tables.index_copy_(0, at_, blocks_.int())

    def append_tokens(self, rows: torch.Tensor, token_ids: torch.Tensor, done: torch.Tensor) -> None:
        """Append the sampled token to rows that are `done`: all their tokens are computed. Others discard it."""
        known = self.num_tokens[rows]
        at = known.clamp(max=self.token_ids.shape[1] - 1)
        self.token_ids[rows, at] = torch.where(done, token_ids.clamp(min=0).int(), self.token_ids[rows, at])
        self.num_tokens[rows] = known + done
