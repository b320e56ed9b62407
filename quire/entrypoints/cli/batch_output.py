"""The results of a batch: appended to a partial file as they finish; sorted by request, it gets its name at the end."""

import os
import shutil
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

PARTIAL = ".partial"
NOT_WRITTEN = 2**64 - 1


class BatchOutput:
    """Needs eight bytes of memory per request, however large the results."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path.resolve()
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{path} is not a regular file; give one that may be replaced (--output-file)")
        self.partial = self.path.with_name(self.path.name + PARTIAL)
        self.offsets = array("Q", [NOT_WRITTEN]) * count
        self.num_written = 0
        self._in_order = True
        self._file = self.partial.open("w+b")

    def write(self, index: int, result: dict[str, Any]) -> None:
        self._in_order = self._in_order and index == self.num_written
        self.offsets[index] = self._file.tell()
        self._file.write(msgspec.json.encode(result) + b"\n")
        self.num_written += 1

    def finish(self) -> None:
        if not self._in_order:
            self._sort()
        self._file.flush()
        os.fsync(self._file.fileno())
        if self.path.exists():
            # Into the file that is there: somebody may have it open, or have set its owner and permissions.
            with self.path.open("wb") as file:
                self._file.seek(0)
                shutil.copyfileobj(self._file, file)
            self._file.close()
            self.partial.unlink()
        else:
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
        """After a failure the partial file keeps the finished results; an empty one is removed."""
        if not self._file.closed:
            self._file.close()
            if self.num_written == 0:
                self.partial.unlink()
