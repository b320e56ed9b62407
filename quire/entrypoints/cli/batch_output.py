"""The results of a batch: written as they come, put in the order of the requests at the end, under their name only when
all are there."""

import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

PARTIAL = ".partial"
NOT_WRITTEN = 2**64 - 1


class BatchOutput:
    """Memory is eight bytes for each request, however large the answers are."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path.resolve()
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{path} is no plain file; give the name of one that may be replaced (--output-file)")
        self.partial = self.path.with_name(self.path.name + PARTIAL)
        self.offsets = array("Q", [NOT_WRITTEN]) * count
        self.num_written = 0
        self._in_order = True
        self._file = self.partial.open("w+b")

    def write(self, place: int, result: dict[str, Any]) -> None:
        self._in_order = self._in_order and place == self.num_written
        self.offsets[place] = self._file.tell()
        self._file.write(msgspec.json.encode(result) + b"\n")
        self.num_written += 1

    def finish(self) -> None:
        if not self._in_order:
            self._sort()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.partial, self.path)

    def _sort(self) -> None:
        unsorted, ordered = self.partial, self.partial.with_name(self.partial.name + ".ordered")
        with ordered.open("w+b") as file:
            try:
                for offset in self.offsets:
                    self._file.seek(offset)
                    file.write(self._file.readline())
            except BaseException:
                ordered.unlink()
                raise
        self._file.close()
        os.replace(ordered, unsorted)
        self._file = self.partial.open("r+b")

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What was answered before a failure stays in the partial file; an empty one helps nobody."""
        if not self._file.closed:
            self._file.close()
            if self.num_written == 0:
                self.partial.unlink()
