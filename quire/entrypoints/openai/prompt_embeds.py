"""Prompts of /v1/completions that are embeddings: tensors as torch.save writes them, in base64.

They are read without torch, which a server's process does not load, and without its unpickler, which builds more than
tensors: a pickle of some bytes may fill the memory.
"""

import io
import pickle
import zipfile
from base64 import b64decode
from collections.abc import Callable
from pickletools import genops
from typing import Any, NamedTuple

import numpy as np

from quire.engine.input_processor import ParsedPrompt
from quire.features.inputs import PLACEHOLDER, read_embeds
from quire.messages.features import EMBEDS, Feature

MAX_PICKLE = 1 << 12  # bytes; a tensor has some 200
BFLOAT16 = np.dtype(np.uint16)  # its bits
STORAGES = {
    "Float": np.dtype(np.float32),
    "Double": np.dtype(np.float64),
    "Half": np.dtype(np.float16),
    "BFloat16": BFLOAT16,
}


class Tensor(NamedTuple):  # a tuple: a pickle cannot change it
    values: np.ndarray


def read_prompt_embeds(encoded: str) -> ParsedPrompt:
    embeds = read_embeds(_values(encoded))
    return ParsedPrompt(None, [PLACEHOLDER] * len(embeds), features=[Feature(EMBEDS, 0, len(embeds), embeds)])


def _values(encoded: str) -> np.ndarray:
    try:
        sent = b64decode(encoded, validate=True)
        with zipfile.ZipFile(io.BytesIO(sent)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > len(sent):
                raise ValueError("it is compressed")
            found = _Reader(archive).load()
    except Exception as error:  # whatever a pickle can raise
        raise ValueError(
            "prompt_embeds is not a dense tensor of float32, float64, float16 or bfloat16 as torch.save writes it, in "
            f"base64: {error}"
        ) from None
    if not isinstance(found, Tensor):
        raise ValueError("prompt_embeds must hold one tensor of floating-point numbers")
    return found.values


class _Reader(pickle.Unpickler):
    """Calls nothing but what is in CALLS."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        code = archive.read(pickled)
        if len(code) > MAX_PICKLE or any(
            op.name.endswith("PUT") and (at or 0) > MAX_PICKLE for op, at, _ in genops(code)
        ):
            raise ValueError("it holds more than a tensor")  # the number of a PUT is that of places to allocate
        super().__init__(io.BytesIO(code))
        self.archive, self.folder = archive, pickled.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name.removesuffix("Storage") in STORAGES:
            return STORAGES[name.removesuffix("Storage")]
        if (module, name) not in CALLS:
            raise ValueError(f"it holds {module}.{name}")
        return CALLS[module, name]

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        return np.frombuffer(self.archive.read(f"{self.folder}data/{key}"), dtype)


def _rebuild(storage: np.ndarray, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    count, last = 1, offset
    for n, step in zip(size, stride, strict=True):
        count, last = count * n, last + (n - 1) * step
    if min((offset, *size, *stride)) < 0 or count > len(storage) or (count and last >= len(storage)):
        raise ValueError("its numbers are not all there")
    strides = tuple(step * storage.itemsize for step in stride)
    values = np.lib.stride_tricks.as_strided(storage[offset:], size, strides)
    if storage.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return Tensor(np.ascontiguousarray(values))


CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("collections", "OrderedDict"): lambda: None,
}
