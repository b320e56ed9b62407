"""Cache file of packed weights (kernels/packed_linear.py), which later starts map instead of loading the checkpoint."""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from quire.checkpoint.gguf_header import read_header
from quire.checkpoint.identity import file_identity
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.safetensors_file import DTYPES, open_safetensors
from quire.kernels.packed_linear import panel_layout
from quire.layers.load_slot import all_load_slots
from quire.models.decoder import DecoderModel
from quire.platforms.private_files import PrivateFolder, path_of
from quire.quantization.base import HasPanels

logger = logging.getLogger("quire")

ALIGNMENT = 64  # a panel's vectors are read whole; across two cache lines that takes twice as long
PANELS = "panels"
PACKAGE = Path(__file__).parents[2]
CODE_FOLDERS = ("checkpoint", "kernels", "layers", "models", "quantization")
OLD = 24 * 3600  # seconds after which an unfinished file is considered abandoned
OURS = __name__.partition(".")[0]
STORED_NAMES = {getattr(torch, name): stored for stored, (name, _) in DTYPES.items()}


class PackedCache:
    """The file of one model in one packed layout."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.file)  # Path.exists raises on a folder without permission

    def map_into(self, model: DecoderModel) -> bool:
        """Whether all weights were mapped from the file; if not, the model may be partially filled."""
        try:
            with PrivateFolder(self.file.parent) as folder:
                fd = folder.open(self.file.name)
            if fd is None:
                return False
            with os.fdopen(fd):
                size = self._map_into(model, path_of(fd))
        except (OSError, ValueError) as error:
            reason = str(error).removesuffix("; download it again")
            logger.warning("the packed weights of %s cannot be used and are packed again: %s", self.file, reason)
            return False
        model.mapped_bytes = size
        logger.info("weights mapped from the packed cache (%s)", self.file)
        return True

    def _map_into(self, model: DecoderModel, opened: Path) -> int:
        """Map the opened file, not its name, which may be replaced meanwhile. Returns its size in bytes."""
        try:
            read_ahead((opened,))
            stored = {tensor.name: tensor.tensor() for tensor in open_safetensors((opened,))}
            size = sum(tensor.nbytes for tensor in stored.values())
            _fill(model, stored)
        except ValueError as error:
            raise ValueError(str(error).replace(str(opened), self.file.name)) from error
        return size

    def write(self, model: DecoderModel) -> None:
        """Atomically; on failure a warning is logged."""
        folder, unfinished = self.file.parent, None
        try:
            PrivateFolder(folder).close()
            for left in folder.glob(".*.unfinished"):  # of a killed process
                if time.time() - left.stat().st_mtime > OLD:
                    left.unlink(missing_ok=True)
            number, unfinished = tempfile.mkstemp(".unfinished", f".{self.file.stem}.", folder)  # private to the user
            with open(number, "wb") as stream:
                _write(stream, _cached_tensors(model))
                stream.flush()
                os.fsync(number)  # else a crash could leave a complete name with zeros as content
            os.replace(unfinished, self.file)
        except OSError as error:
            logger.warning("packed weights could not be written to %s, the next start packs again: %s", folder, error)
        else:
            logger.info("packed weights written to %s", self.file)
        finally:
            if unfinished is not None:
                Path(unfinished).unlink(missing_ok=True)


def open_cache(
    folder: str, model: DecoderModel, ckpt: Checkpoint, dtype: torch.dtype, key: tuple[Any, ...]
) -> PackedCache | None:
    """The cache file for a model just built; `key`: what else its weights depend on. None, with a warning, if the file
    could not hold everything that loading produces."""
    obstacle = _obstacle(model, ckpt, dtype)
    if obstacle is not None:
        warn_no_effect(obstacle)
        return None
    facts = (*map(file_identity, ckpt.files), _config_identity(ckpt), dtype, key, *_code_identity(model))
    name = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return PackedCache(Path(folder).expanduser() / f"{name}.safetensors")


def warn_no_effect(reason: str) -> None:
    logger.warning("--packed-weights-cache has no effect for %s", reason)


def _obstacle(model: DecoderModel, ckpt: Checkpoint, dtype: torch.dtype) -> str | None:
    """Why the model cannot be cached: all loaded tensors must be parameters, and remain parameters or become panels."""
    if ckpt.format == "dummy":
        return "random weights"
    if ckpt.format == "sharded_state":
        return "sharded state"
    if type(model).__module__.partition(".")[0] != OURS:
        return f"{type(model).__name__}, a plugin's, whose version is unknown"
    if dtype is not torch.bfloat16:
        return f"{str(dtype).removeprefix('torch.')}, in which weights are not packed"
    if panel_layout() is None:
        return "weights that our own C kernels do not multiply"
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for (name, _), slot in all_load_slots(model).items():
        if slot.view.is_meta or slot.view.untyped_storage().data_ptr() not in parameters:
            return f"quantized weights ({name})"
    for path, module in model.named_modules():
        for holder in (module, getattr(module, "method", None)):
            if not leaves_panels_only(type(holder)):
                return f"{type(holder).__name__} ({path or 'the model'})"
    return None


def leaves_panels_only(kind: type) -> bool:
    """Whether the class that defines process_after_loading declares it: an override has to declare it again."""
    owner = next((base for base in kind.__mro__ if "process_after_loading" in vars(base)), None)
    return owner is None or bool(vars(owner).get("leaves_panels_only"))


def _config_identity(ckpt: Checkpoint) -> Any:
    if ckpt.is_gguf:
        tensors = read_header(ckpt.path).tensors.values()
        return [(tensor.name, tensor.shape, tensor.type_id, tensor.offset) for tensor in tensors]
    return (ckpt.path / "config.json").read_text(errors="replace")


def _code_identity(model: nn.Module) -> tuple[str | None, ...]:
    """The model's class and a hash of our source: a version number does not identify a checkout."""
    digest = hashlib.sha256()
    for folder in CODE_FOLDERS:
        for source in sorted((PACKAGE / folder).rglob("*.py")):
            digest.update(source.read_bytes())
    return type(model).__module__, type(model).__qualname__, digest.hexdigest(), torch.__version__, panel_layout()


def _layers_with_panels(model: nn.Module) -> Iterator[tuple[str, nn.Module, HasPanels]]:
    for path, module in model.named_modules():
        method = getattr(module, "method", None)
        if isinstance(method, HasPanels):
            yield f"{path}.{PANELS}", module, method


def _cached_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, layer, method in _layers_with_panels(model):
        panels = method.panels(layer)
        if panels is not None:
            tensors[name] = panels
    return tensors


def _fill(model: DecoderModel, stored: dict[str, torch.Tensor]) -> None:
    """Instead of loading the checkpoint and process_after_loading. Missing or unknown tensors are a ValueError."""
    # Before panels replace some parameters.
    model.num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for name, layer, method in list(_layers_with_panels(model)):
        if name in stored:
            method.load_panels(layer, stored.pop(name))
    for name, parameter in model.named_parameters():
        found = stored.pop(name, None)
        if found is None or (found.shape, found.dtype) != (parameter.shape, parameter.dtype):
            raise ValueError(f"it lacks {name} of shape {list(parameter.shape)}")
        parameter.data = found
    if stored:
        raise ValueError(f"it has unknown {', '.join(list(stored)[:5])}")


def _write(stream: BinaryIO, tensors: dict[str, torch.Tensor]) -> None:
    """In safetensors format. The header is padded and tensors of unaligned sizes come last, so that all others are
    aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNMENT != 0, -item[1].itemsize))
    header, at = {}, 0
    for name, tensor in ordered:
        offsets = [at, at + tensor.nbytes]
        header[name] = {"dtype": STORED_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        stream.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
