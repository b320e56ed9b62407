"""Weights in files of one rank each: what its layers load, sliced and joined already (`load_format="sharded_state"`).

They are as the layers take them, before these pack them for a device. A file is safetensors; its header says which
rank of which layout it belongs to.
"""

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.safetensors_file import DTYPES, SafetensorsTensor, open_safetensors, read_file_header
from quire.checkpoint.tensors import CheckpointTensor, open_tensors
from quire.checkpoint.upload import Upload
from quire.config.load import SHARDED_STATE_PATTERN, check_state_pattern
from quire.layers.load_slot import LoadSlot, ShardId, Slots, all_load_slots
from quire.models.decoder import DecoderModel
from quire.models.loading.kv_scales import KVScaleLoader, is_kv_scale
from quire.models.loading.progress import LoadProgress
from quire.models.loading.weight_loader import abbreviated, load_weights, read_all
from quire.quantization.base import RegroupsTensors

MAX_FILE_BYTES = 5 << 30
NOTES = "quire"  # the layout's key in a file's header
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack", ".onnx")
STORED_NAMES = {getattr(torch, name): stored for stored, (name, _) in DTYPES.items()}


@dataclass(frozen=True)
class StateLayout:
    """What decides which numbers a rank's layers take."""

    model: str
    dtype: str
    quantization: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int
    layers: str  # first and last of the stage

    @classmethod
    def of(cls, model: DecoderModel) -> "StateLayout":
        options, numbers = model.options, model.layer_numbers
        return cls(
            type(model).__name__,
            str(options.dtype).removeprefix("torch."),
            options.quantization.describe(),
            options.tp.size,
            options.stage.count,
            options.stage.index * options.tp.size + options.tp.rank,
            f"{numbers.start} to {numbers.stop - 1}",
        )

    def check(self, file: Path, notes: dict[str, Any]) -> None:
        """ValueError that says what differs, if a file belongs to another layout."""
        try:
            found = json.loads(notes[NOTES])
            differing = [f for f in fields(self) if found[f.name] != getattr(self, f.name)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} does not say which rank's weights it has: it was not written by save_sharded_state; load the "
                "original checkpoint and save it from there"
            ) from error
        if differing:
            listed = "; ".join(f"{f.name} {found[f.name]!r}, here {getattr(self, f.name)!r}" for f in differing)
            raise ValueError(f"{file} was saved for another layout ({listed}); start with that, or save it again")


@dataclass(frozen=True)
class _Place:
    """Of a tensor among the files."""

    part: int
    start: int  # behind the header
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize


class _StateWriter:
    """The files of one rank, whose tensors are written in any order, each where the header says."""

    def __init__(self, folder: Path, pattern: str, layout: StateLayout, max_size: int) -> None:
        self.folder, self.pattern, self.layout, self.max_size = folder, pattern, layout, max_size
        self.places: dict[str, _Place] = {}
        self.late: dict[str, torch.Tensor] = {}  # that a checkpoint may have: the last file's
        self._sizes: list[int] = []
        self._files: list[tuple[int, int, Path]] = []  # descriptor, bytes of the header, name until it is finished
        self._lock = threading.Lock()

    def add(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], new_part: bool = False) -> None:
        """In the order of the calls, a new file where one would become larger than allowed."""
        nbytes = prod(shape) * dtype.itemsize
        if new_part or not self._sizes or self._sizes[-1] + nbytes > self.max_size > 0 < self._sizes[-1]:
            self._sizes.append(0)
        self.places[name] = _Place(len(self._sizes) - 1, self._sizes[-1], dtype, shape)
        self._sizes[-1] += nbytes

    def write(self, name: str, value: torch.Tensor) -> None:
        place = self.places.get(name)
        if place is None:
            with self._lock:
                self.late[name] = value
            return
        with self._lock:
            while len(self._files) <= place.part:
                self._files.append(self._open(len(self._files)))
        file, header, _ = self._files[place.part]
        left, at = value.contiguous().flatten().view(torch.uint8).numpy().data, header + place.start
        while left:
            count = os.pwrite(file, left, at)
            left, at = left[count:], at + count

    def _open(self, part: int) -> tuple[int, int, Path]:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", NOTES: json.dumps(vars(self.layout))}}
        for name, place in self.places.items():
            if place.part == part:
                kind, offsets = STORED_NAMES[place.dtype], [place.start, place.stop]
                header[name] = {"dtype": kind, "shape": list(place.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 64)  # so that tensors are aligned
        path = self.folder / f".{self._name(part)}.unfinished"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, len(text).to_bytes(8, "little") + text)
        return file, 8 + len(text), path

    def _name(self, part: int) -> str:
        return self.pattern.format(rank=self.layout.rank, part=part)

    def finish(self) -> None:
        """Give the files their names, once all are complete."""
        for i, (name, value) in enumerate(sorted(self.late.items())):
            self.add(name, value.dtype, tuple(value.shape), new_part=i == 0)
            self.write(name, value)
        for file, _, _ in self._files:
            os.fsync(file)
        for part, (_, _, path) in enumerate(self._files):
            os.replace(path, self.folder / self._name(part))

    def close(self) -> None:
        for file, _, path in self._files:
            os.close(file)
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _RecordedSlot(LoadSlot):
    """Takes what the slot of a layer would, and writes it to a file."""

    slot: LoadSlot = field(default_factory=lambda: LoadSlot(torch.empty(0), (0,)))
    name: str = ""
    writer: _StateWriter | None = None

    @classmethod
    def of(cls, slot: LoadSlot, name: str, writer: _StateWriter) -> "_RecordedSlot":
        same = {f.name: getattr(slot, f.name) for f in fields(LoadSlot)}
        return cls(**same, slot=slot, name=name, writer=writer)

    @property
    def part_shape(self) -> tuple[int, ...]:
        return self.slot.part_shape

    @contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        value = torch.empty(self.part_shape, dtype=self.view.dtype)
        yield value
        assert self.writer is not None
        self.writer.write(self.name, value)

    def pieces(self, view: torch.Tensor) -> list[tuple[torch.Tensor, int, int]]:
        return self.slot.pieces(view)

    def part_of(self, full: torch.Tensor) -> torch.Tensor:
        return self.slot.part_of(full)


class _WithoutMemory(TorchFunctionMode):
    """Parameters of a model that is built inside have a shape alone."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def save_sharded_state(
    model: object, checkpoint: Checkpoint, path: str, pattern: str | None = None, max_size: int | None = None
) -> None:
    """Write what this rank reads of the checkpoint to `path`, in files of at most `max_size` bytes. The first rank
    copies config and tokenizer there."""
    pattern = SHARDED_STATE_PATTERN if pattern is None else check_state_pattern(pattern)
    if max_size is None:
        max_size = MAX_FILE_BYTES
    elif isinstance(max_size, bool) or not isinstance(max_size, int) or max_size < 1:
        raise ValueError(f"max_size is {max_size!r}; it must be a number of bytes")
    if not isinstance(model, DecoderModel):
        raise ValueError(f"{type(model).__name__} cannot be saved as sharded state; only built-in families can")
    if checkpoint.format not in ("safetensors", "pt"):
        raise ValueError(
            f"sharded state is made of safetensors or .bin files, not of {checkpoint.format!r} ({checkpoint.name})"
        )
    if not path:
        raise ValueError(f"the path for sharded state is {path!r}; it must be a folder")
    folder, layout = Path(path).expanduser(), StateLayout.of(model)
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() == checkpoint.path.resolve():
        raise ValueError(f"{path} is the folder of the checkpoint itself; give another")
    taken = folder / pattern.format(rank=layout.rank, part=0)
    if taken.exists():
        raise ValueError(f"{taken} is there already; give an empty folder")
    with _WithoutMemory():
        outline = type(model)(model.hf, model.options)
    writer = _StateWriter(folder, pattern, layout, max_size)
    slots: Slots = {}
    for key, slot in all_load_slots(outline).items():
        slots[key] = recorded = _RecordedSlot.of(slot, _state_name(*key), writer)
        if not slot.optional:
            writer.add(recorded.name, slot.view.dtype, slot.part_shape)
    quantized = model.options.quantization
    tensors: Iterable[CheckpointTensor] = open_tensors(checkpoint)
    if isinstance(quantized, RegroupsTensors):
        tensors = quantized.regroup(tensors)
    try:
        load_weights(outline, _noting_scales(tensors, writer), quantized.ignored, slots=slots)
        writer.finish()
    finally:
        writer.close()
    if layout.rank == 0:
        for file in checkpoint.path.iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_FILES) and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def load_sharded_state(
    model: DecoderModel,
    folder: Path,
    pattern: str | None,
    upload: Upload | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> None:
    """Fill a model just built. All is checked before anything is read."""
    layout, pattern = StateLayout.of(model), pattern or SHARDED_STATE_PATTERN
    files: list[Path] = []
    while (file := folder / pattern.format(rank=layout.rank, part=len(files))).is_file():
        layout.check(file, read_file_header(file)[1])
        files.append(file)
    if not files:
        raise ValueError(
            f"{folder} has no {file.name}, the weights of rank {layout.rank}; use as many ranks as it was saved for, "
            """or name files otherwise (--model-loader-extra-config '{"pattern": "..."}')"""
        )
    read_ahead(files)
    slots = {_state_name(*key): slot for key, slot in all_load_slots(model).items()}
    kv_scales = KVScaleLoader(model.cache_layers())
    found: list[tuple[SafetensorsTensor, LoadSlot]] = []
    unknown: list[str] = []
    for tensor in open_safetensors(tuple(files), upload):
        slot = slots.pop(tensor.name, None)
        if slot is not None:
            _check_tensor(tensor, slot)
            found.append((tensor, slot))
        elif not kv_scales.takes(tensor):
            unknown.append(tensor.name)
    missing = [name for name, slot in slots.items() if not slot.optional]
    if missing or unknown:
        lists = (("lack", missing), ("have unknown", unknown))
        listed = " and ".join(f"{what} {abbreviated(names)}" for what, names in lists if names)
        raise ValueError(f"the files of rank {layout.rank} in {folder} do not fit {layout.model}: they {listed}")
    by_name = {tensor.name: slot for tensor, slot in found}
    with LoadProgress(files, progress) as bar:
        read_all((partial(_read, t, by_name[t.name]) for t in bar.counted(t for t, _ in found)), threads)
        if upload is not None:
            upload.wait()


def _state_name(parameter: str, shard: ShardId) -> str:
    return parameter if shard is None else f"{parameter}.{shard}"


def _noting_scales(tensors: Iterable[CheckpointTensor], writer: _StateWriter) -> Iterator[CheckpointTensor]:
    """Scales of the KV cache are no parameters: they keep their names."""
    for tensor in tensors:
        if is_kv_scale(tensor.name):
            value = torch.empty(tuple(tensor.shape), dtype=torch.float32)
            tensor.read_into(value)
            writer.write(tensor.name, value)
        yield tensor


def _check_tensor(tensor: SafetensorsTensor, slot: LoadSlot) -> None:
    stored = (STORED_NAMES.get(slot.view.dtype), slot.part_shape)
    if (tensor.dtype, tensor.shape) != stored:
        raise ValueError(
            f"{tensor.name} is {tensor.dtype} {list(tensor.shape)} in the files, but this rank's layer takes "
            f"{stored[0]} {list(stored[1])}; save the state again"
        )


def _read(tensor: CheckpointTensor, slot: LoadSlot) -> None:
    with slot.opened() as view:
        tensor.read_into(view)
