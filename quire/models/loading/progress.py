"""How much of a checkpoint has been read, and how fast: a bar on a terminal, and a line in the log."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from quire.checkpoint.tensors import SizedTensor

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger("quire")

TOLD_FROM = 1e9  # bytes: what is read in a moment is not worth a line


class LoadProgress:
    """Of the bytes of some files. `show`: with a bar, if stderr is a terminal."""

    def __init__(self, files: Iterable[Path], show: bool) -> None:
        self.nbytes = sum(file.stat().st_size for file in files)
        self.show = show and sys.stderr.isatty()

    def __enter__(self) -> Self:
        self._bar = _make_bar(self.nbytes) if self.show else None
        self._start = time.perf_counter()
        return self

    def counted(self, tensors: Iterable[SizedTensor]) -> Iterator[SizedTensor]:
        """The tensors, each counted when the next one is asked for."""
        for tensor in tensors:
            yield tensor
            if self._bar is not None:
                self._bar.update(tensor.nbytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        if self._bar is not None:
            self._bar.update(0 if error else self.nbytes - self._bar.n)  # headers, and what lies between tensors
            self._bar.close()
        if error is None and self.nbytes >= TOLD_FROM:
            rate = self.nbytes / seconds / 1e9
            logger.info("weights: %.1f GB read in %.1f s (%.1f GB/s)", self.nbytes / 1e9, seconds, rate)


def _make_bar(nbytes: int) -> "tqdm[Any]":
    from tqdm import tqdm

    return tqdm(total=nbytes, desc="Loading weights", unit="B", unit_scale=True)
