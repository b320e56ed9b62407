"""Tensors of safetensors files, memory-mapped.

The header is parsed here (eight bytes of length, then JSON): counting and checking tensors needs no torch, and errors
name the damaged file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoint.json_file import parse_object
from quire.config.shown import shown
from quire.config.values import whole_number

if TYPE_CHECKING:
    import torch

    from quire.checkpoint.upload import Upload

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
MAX_TENSORS = 1_000_000  # of a file
MAX_DIMS = 8
MAX_ELEMENTS = 2**48

# Format dtype -> (torch dtype, bytes per element).
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}


@dataclass(frozen=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the start of the file
    stop: int


class SafetensorsTensor:
    """One tensor; `tensor()` is the memory-mapped data itself, for code that needs the stored type."""

    def __init__(self, entry: TensorEntry, data: "torch.Tensor", upload: "Upload | None" = None):
        self.name = entry.name
        self.shape = entry.shape
        self.dtype = entry.dtype
        self.nbytes = entry.stop - entry.start
        self._bytes = data[entry.start : entry.stop]
        self._upload = upload

    def tensor(self) -> "torch.Tensor":
        """The stored values, read-only, in the stored type."""
        import torch

        dtype, itemsize = DTYPES[self.dtype]
        aligned = self._bytes.storage_offset() % itemsize == 0
        stored = self._bytes if aligned else self._bytes.clone()
        return stored.view(getattr(torch, dtype)).view(self.shape)

    def read_into(self, out: "torch.Tensor") -> None:
        """Copy into `out`, a view of this tensor's shape in any type on any device."""
        self._copy(self.tensor(), out)

    def read_part(self, out: "torch.Tensor", dim: int, start: int) -> None:
        """Copy what begins at `start` along `dim` into `out`: other pages of the file are not touched."""
        self._copy(self.tensor().narrow(dim, start, out.shape[dim]), out)

    def _copy(self, stored: "torch.Tensor", out: "torch.Tensor") -> None:
        from quire.checkpoint.mapped import copy_into

        copy = copy_into if self._upload is None else self._upload.copy
        copy(self.name, stored, out)


def open_safetensors(files: tuple[Path, ...], upload: "Upload | None" = None) -> Iterator[SafetensorsTensor]:
    """All tensors, shard by shard. Every header is checked before the first tensor is yielded. `upload`: what takes
    them to a device."""
    from quire.checkpoint.mapped import map_bytes

    shards = [(file, read_entries(file)) for file in files]
    homes: dict[str, Path] = {}
    for file, entries in shards:
        for entry in entries:
            if entry.name in homes:
                raise ValueError(
                    f"Tensor {entry.name} is in both {homes[entry.name]} and {file}; "
                    "remove the file that does not belong to the model"
                )
            homes[entry.name] = file
    for file, entries in shards:
        data = map_bytes(file)
        for entry in entries:
            yield SafetensorsTensor(entry, data, upload)


def read_entries(file: Path) -> list[TensorEntry]:
    """The tensors of one file in the order of their bytes."""
    return read_file_header(file)[0]


def read_file_header(file: Path) -> tuple[list[TensorEntry], dict[str, Any]]:
    """The tensors of one file in the order of their bytes, and what its writer noted about them."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _corrupt(file, "its header is longer than the file")
        header = stream.read(length)
    # Before parsing: each bracket becomes a Python object of fifty times its bytes.
    if max(header.count(b"{"), header.count(b"[") // 2) > MAX_TENSORS + 2:
        raise _corrupt(file, f"it lists more than {MAX_TENSORS} tensors")
    try:
        listed = parse_object(header, "its header", _without_duplicates)
        notes = listed.pop("__metadata__", None)
        entries = [_entry(name, fields, 8 + length) for name, fields in listed.items()]
    except ValueError as error:
        raise _corrupt(file, f"its header is malformed: {error}") from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    end = 8 + length
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise ValueError(f"{file}: tensor {entry.name} has type {entry.dtype}; supported: {', '.join(DTYPES)}")
        if entry.stop > size:
            raise _corrupt(file, f"tensor {entry.name} ends at byte {entry.stop}, the file at {size}")
        if entry.start < end:
            raise _corrupt(file, f"tensor {entry.name} begins at byte {entry.start}, within another")
        if entry.stop - entry.start != prod(entry.shape) * DTYPES[entry.dtype][1]:
            raise _corrupt(file, f"tensor {entry.name} has the wrong number of bytes for its shape")
        end = entry.stop
    return entries, notes if isinstance(notes, dict) else {}


def _entry(name: str, fields: Any, data_start: int) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError(f"tensor {shown(name)} is {shown(fields)}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"tensor {shown(name)} has the shape {shown(shape)}; it must be a list of at most {MAX_DIMS}")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"tensor {shown(name)} has the offsets {shown(offsets)}; they must be two")
    sizes = tuple(whole_number(f"a size of tensor {shown(name)}", size, 0, MAX_ELEMENTS) for size in shape)
    start, stop = (whole_number(f"an offset of tensor {shown(name)}", at, 0, 2**63) for at in offsets)
    if stop < start:
        raise ValueError(f"tensor {shown(name)} ends before it begins")
    return TensorEntry(name, str(fields["dtype"]), sizes, data_start + start, data_start + stop)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name occurs twice")
    return made


def _corrupt(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is corrupt or truncated ({what}); download it again")
