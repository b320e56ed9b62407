"""The header of a GGUF file: metadata and the list of tensors.

Parsed here for fast start-up: gguf.GGUFReader takes seconds for a vocabulary, this takes milliseconds.
Every count and length is checked against the end of the file: a malformed file is a ValueError, never a huge read.
"""

import mmap
import struct
from array import array
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from quire.checkpoint.gguf_types import BlockType, block_type
from quire.config.shown import shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
# Python objects need many times a file's bytes: limits far above any vocabulary.
MAX_ITEMS = 2**25  # of all arrays together
MAX_TEXT_BYTES = 2**24
MAX_TENSORS = 2**20
MAX_VALUES = 2**16

BOOL, STRING, ARRAY = 7, 8, 9
# Value type id -> struct code of the little-endian number.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file; `shape` has rows first (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    type_id: int
    offset: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    values: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    def of_model(self, key: str) -> Any:
        """Metadata under the architecture's prefix; None if missing."""
        return self.values.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GGUFHeader:
    """Parse the header; cached for the last files, since config, tokenizer and weights all need it."""
    stat = path.stat()
    return _read_header(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=2)
def _read_header(path: Path, size: int, mtime_ns: int) -> GGUFHeader:
    if size < 24:
        raise ValueError(f"{path} is not a GGUF file: it has only {size} bytes; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Parser(path, data).parse()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.pos = 0
        self.end = len(data)
        self.items = 0

    def parse(self) -> GGUFHeader:
        if self.read(4) != MAGIC:
            raise ValueError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        version = self.uint32()
        if version not in VERSIONS:
            hint = "it is big-endian or damaged" if version & 0xFFFF == 0 else "convert it with a newer llama.cpp"
            raise ValueError(f"{self.path} has GGUF version {version}; supported: 2 and 3 ({hint})")
        tensor_count = self.count(minimum_bytes=24, maximum=MAX_TENSORS)
        value_count = self.count(minimum_bytes=13, maximum=MAX_VALUES)
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.string()
            if key in values:
                raise self.corrupt(f"the metadata {shown(key)} is there twice")
            values[key] = self.value(self.uint32(), depth=0)
        entries = [self.tensor_entry() for _ in range(tensor_count)]

        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self.corrupt(f"general.alignment is {shown(alignment)}")
        data_start = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self.corrupt(f"tensor {name} is listed twice")
            if offset % alignment:
                raise self.corrupt(f"tensor {name} begins at {offset}, which is no multiple of {alignment}")
            tensors[name] = self.tensor_info(name, shape, type_id, data_start + offset)
        end = 0
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise self.corrupt(f"tensor {info.name} begins at byte {info.offset}, within another")
            end = info.offset + info.nbytes
        return GGUFHeader(self.path, values, tensors)

    def corrupt(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is corrupt or truncated ({what}); download it again")

    def read(self, size: int) -> bytes:
        stop = self.pos + size
        if stop > self.end:
            raise self.corrupt(f"{size} bytes expected at {self.pos}, the file ends at {self.end}")
        read = self.data[self.pos : stop]
        self.pos = stop
        return read

    def uint32(self) -> int:
        return int(_UINT32.unpack(self.read(4))[0])

    def uint64(self) -> int:
        return int(_UINT64.unpack(self.read(8))[0])

    def count(self, minimum_bytes: int, maximum: int) -> int:
        """A number of items, each of at least `minimum_bytes` of the rest of the file."""
        number = self.uint64()
        if number * minimum_bytes > self.end - self.pos:
            raise self.corrupt(f"a count of {number} at {self.pos - 8} is more than the file can hold")
        if number > maximum:
            raise self.corrupt(f"a count of {number} at {self.pos - 8} is more than {maximum}")
        return number

    def item_count(self, minimum_bytes: int) -> int:
        number = self.count(minimum_bytes, MAX_ITEMS - self.items)
        self.items += number
        return number

    def string(self) -> str:
        return self.read(self.count(minimum_bytes=1, maximum=MAX_TEXT_BYTES)).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int) -> Any:
        if kind in NUMBERS:
            code = NUMBERS[kind]
            return struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))[0]
        if kind == STRING:
            return self.string()
        if kind == ARRAY and depth < MAX_ARRAY_DEPTH:
            return self.array(depth)
        raise self.corrupt(f"a value has the unknown type {kind}")

    def array(self, depth: int) -> list[Any]:
        kind = self.uint32()
        if kind == STRING:
            return self.string_array(self.item_count(minimum_bytes=8))
        if kind in NUMBERS:
            code = NUMBERS[kind]
            size = struct.calcsize("<" + code)
            numbers = array("B" if kind == BOOL else code)
            numbers.frombytes(self.read(self.item_count(minimum_bytes=size) * size))
            return [bool(n) for n in numbers] if kind == BOOL else numbers.tolist()
        return [self.value(kind, depth + 1) for _ in range(self.item_count(minimum_bytes=12))]

    def string_array(self, count: int) -> list[str]:
        # The hot loop of header parsing (vocabulary and merges): local names, as few calls as possible.
        data, stop, end = self.data, self.pos, self.end
        length_at = _UINT64.unpack_from
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = stop + 8
            if start > end:
                raise self.corrupt("an array of strings runs past the end of the file")
            stop = start + length_at(data, start - 8)[0]
            if stop > end or stop - start > MAX_TEXT_BYTES:
                raise self.corrupt(f"a string runs past the end of the file, or has more than {MAX_TEXT_BYTES} bytes")
            append(data[start:stop].decode("utf-8", "replace"))
        self.pos = stop
        return strings

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = self.uint32()
        if dims > MAX_DIMS:
            raise self.corrupt(f"tensor {name} has {dims} dimensions")
        shape = tuple(self.uint64() for _ in range(dims))[::-1]
        return name, shape, self.uint32(), self.uint64()

    def tensor_info(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        kind = block_type(type_id)
        if kind is None:
            raise ValueError(f"{self.path}: tensor {name} has the unknown GGUF type {type_id}, which is not supported")
        if not shape or not all(shape) or shape[-1] % kind.elements:
            raise self.corrupt(f"tensor {name} of type {kind.name} has the shape {list(shape)}")
        nbytes = prod(shape) // kind.elements * kind.nbytes
        if offset + nbytes > self.end:
            raise self.corrupt(f"tensor {name} ends at byte {offset + nbytes}, the file at {self.end}")
        return TensorInfo(name, shape, kind, type_id, offset, nbytes)
