"""The worker's persistent state: one row per running request, on the device. Plans bring only what changed."""

import torch

from quire.messages.kv_cache import KVCacheConfig
from quire.messages.plan import BlockAppends, NewRow


class RowState:
    def __init__(self, num_rows: int, max_model_len: int, config: KVCacheConfig, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.num_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.block_sizes = [group.spec.block_size for group in config.groups]
        self.block_tables = [
            torch.zeros(num_rows, -(-max_model_len // size), dtype=torch.int32, device=device)
            for size in self.block_sizes
        ]

    def add(self, new: NewRow) -> None:
        row, count = new.row, len(new.token_ids)
        self.token_ids[row, :count] = torch.from_numpy(new.token_ids)
        self.num_tokens[row] = count
        self.num_computed[row] = new.num_computed
        for table, ids in zip(self.block_tables, new.block_ids, strict=True):
            table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)

    def append_blocks(self, appended: BlockAppends) -> None:
        if not appended.rows:
            return
        device = self.num_tokens.device
        columns = torch.tensor([appended.rows, appended.groups, appended.positions, appended.block_ids], device=device)
        for group, table in enumerate(self.block_tables):
            rows, _, positions, ids = columns if len(self.block_tables) == 1 else columns[:, columns[1] == group]
            table[rows, positions] = ids.int()

    def advance(self, rows: torch.Tensor, num_new: torch.Tensor) -> None:
        self.num_computed[rows] += num_new

    def append_tokens(self, rows: torch.Tensor, token_ids: torch.Tensor, done: torch.Tensor) -> None:
        """Rows that are `done` with all they know get their sampled token; the others drop it."""
        known = self.num_tokens[rows]
        at = known.clamp(max=self.token_ids.shape[1] - 1)
        self.token_ids[rows, at] = torch.where(done, token_ids.int(), self.token_ids[rows, at])
        self.num_tokens[rows] = known + done
