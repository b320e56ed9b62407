"""Drafts that are found in earlier text, on a CPU."""

import numpy as np
import torch

from quire.kernels.accept_drafts import DraftRows
from quire.kernels.native import native_function

MAX_TEXT_TOKENS = 1 << 21  # of 18 bytes: token, owner, the position before it in its chain, a quarter of a chain


def ngram_drafts(rows: torch.Tensor, state: DraftRows, shortest: int, longest: int, num_drafts: int) -> None:
    rows = rows.int()
    native_function("quire_ngram_drafts")(
        state.token_ids.data_ptr(), state.num_tokens.data_ptr(), state.num_computed.data_ptr(),
        state.token_limit.data_ptr(), state.num_found.data_ptr(), rows.data_ptr(),
        len(rows), state.token_ids.stride(0), shortest, longest, num_drafts,
    )  # fmt: skip


class SharedTexts:
    """Texts by name, of which the oldest make room for new ones: at most `max_texts`, and `max_tokens` in all."""

    def __init__(self, max_texts: int, max_tokens: int = MAX_TEXT_TOKENS) -> None:
        capacity = 16
        while capacity < max_tokens:
            capacity *= 2
        chains = max(1, capacity // 4)
        slots = min(max_texts, capacity)
        # As suffix.c has them, in the order of its struct.
        self._tokens, self._owner = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        self._before, self._newest = np.zeros(capacity, np.int64), np.zeros(chains, np.int64)
        self._texts = np.zeros((slots, 3), np.int64)
        parts = (self._tokens, self._owner, self._before, self._newest, self._texts)
        addresses = [part.ctypes.data for part in parts]
        self._header = np.array([*addresses, capacity, chains, slots, 0, 0, 0], np.int64)
        self.num_bytes = sum(part.nbytes for part in parts)
        self._numbers: dict[str, int] = {}  # in the order in which they were added

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def address(self) -> int:
        return int(self._header.ctypes.data)

    def add(self, name: str, token_ids: np.ndarray, salt: int) -> None:
        """A text that only rows of the same salt find. It takes the place of one of the same name."""
        self.remove(name)
        ids = np.ascontiguousarray(token_ids, np.int32)
        native_function("quire_texts_add")(self.address, ids.ctypes.data, len(ids), salt)
        first, following = self._header[-2:].tolist()
        self._numbers[name] = following - 1
        while self._numbers[oldest := next(iter(self._numbers))] < first:
            del self._numbers[oldest]

    def remove(self, name: str) -> None:
        number = self._numbers.pop(name, None)
        if number is not None:
            native_function("quire_texts_remove")(self.address, number)


def suffix_drafts(
    rows: torch.Tensor,  # [n] int32, -1 for padding
    state: DraftRows,
    texts: SharedTexts | None,
    salts: np.ndarray,  # [rows] int64
    num_drafts: int,
    depth: int,
    factor: float,
    least_probability: float,
) -> None:
    """Writes drafts behind the known tokens of each row, and their number to num_found: the most frequent continuation
    of its last tokens in its own text or in `texts`, up to `factor` drafts for each token of the match (`depth` at
    most), while they are all right with `least_probability` by how often they followed."""
    rows = rows.int()
    native_function("quire_suffix_drafts")(
        texts.address if texts is not None else None, state.token_ids.data_ptr(), state.num_tokens.data_ptr(),
        state.num_computed.data_ptr(), state.token_limit.data_ptr(), state.num_found.data_ptr(), salts.ctypes.data,
        rows.data_ptr(), len(rows), state.token_ids.stride(0), num_drafts, depth, factor, least_probability,
    )  # fmt: skip
