"""Reads a file into memory and hashes it on the way, piece by piece, so that several threads can."""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

PIECE_BYTES = 2 << 20  # fixed: hashes do not depend on the number of threads


def read_hashed(file: Path, pool: Executor, memory: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[bytes]]:
    """Its bytes, in `memory` of their number, and SHA-256 of each piece.

    Not mapped into memory: if the file is cut short meanwhile, as by a trainer that saves anew, the process ends.
    """
    data = memory(file.stat().st_size)
    with file.open("rb") as stream:

        def read(start: int) -> bytes:
            piece = data[start : start + PIECE_BYTES].data
            if os.preadv(stream.fileno(), [piece], start) < len(piece):
                raise ValueError(f"{file} is cut short: it was written while it was read; load it again")
            return hashlib.sha256(piece).digest()

        return data, list(pool.map(read, range(0, len(data), PIECE_BYTES)))
