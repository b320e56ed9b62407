"""Tensors of a GGUF file, dequantized slice by slice into the model's parameters."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from quire.checkpoint.dequantize import Dequantize, dequantizer
from quire.checkpoint.gguf_config import kv_heads, query_heads, require_supported
from quire.checkpoint.gguf_header import GGUFHeader, TensorInfo, read_header
from quire.checkpoint.gguf_names import NO_WEIGHTS, hf_name
from quire.checkpoint.mapped import check_shape, map_bytes

# float32 elements dequantized at a time (2 MiB): measured, smaller is slower and larger only uses more memory.
SLICE_ELEMENTS = 512 * 1024

MAX_EXPERTS = 4096  # each becomes an object

# Families whose rotary pairs are interleaved in the file, though not in their HF checkpoints.
INTERLEAVED = ("llama", "granite", "granitemoe", "smollm3")
PLUS_ONE = ("gemma", "gemma2", "gemma3")


class GGUFTensor:
    """One tensor under its Hugging Face name; `type_name` and `raw` are for weights that stay quantized."""

    def __init__(
        self,
        name: str,
        info: TensorInfo,
        data: torch.Tensor,
        dequantize: Dequantize,
        rope_heads: int = 0,
        added: float = 0.0,
    ):
        self.name = name
        self.shape = info.shape
        self.nbytes = info.nbytes
        self.type_name = info.type.name
        self._type = info.type
        self._data = data[info.offset : info.offset + info.nbytes]
        self._dequantize = dequantize
        self._rope_heads = rope_heads  # > 0: rows are in interleaved-rope order, this many heads
        self._added = added  # by the converter to every element

    @property
    def rotary_half(self) -> int:
        """Number of interleaved rotary pairs in a head; 0 if rows are not interleaved."""
        return self.shape[0] // self._rope_heads // 2 if self._rope_heads else 0

    def raw(self) -> torch.Tensor:
        """The stored bytes, uint8 [rows, bytes per row], in the file's own row order."""
        return self._data.view(-1, self.shape[-1] // self._type.elements * self._type.nbytes)

    def read_into(self, out: torch.Tensor) -> None:
        """Copy into `out`, a view of this tensor's shape in any float type on any device."""
        check_shape(self.name, self.shape, out)
        if self._rope_heads:
            self._read_heads_into(self._data.view(self._rope_heads, -1), out)
        else:
            self._read_rows_into(self.raw(), out)

    def read_part(self, out: torch.Tensor, dim: int, start: int) -> None:
        """Copy what begins at `start` along `dim` into `out`: whole rows, heads or blocks are read without others."""
        size, unit = out.shape[dim], 1
        if dim == 0 and self._rope_heads:
            unit = self.shape[0] // self._rope_heads
        elif dim > 0:
            unit = self._type.elements
        last = len(self.shape) - 1
        if start % unit or size % unit or dim not in (0, last) or len(self.shape) != 2:
            full = torch.empty(self.shape, dtype=out.dtype, device=out.device)
            self.read_into(full)
            out.copy_(full.narrow(dim, start, size))
        elif dim == last:
            nbytes = self._type.nbytes
            columns = self.raw()[:, start // unit * nbytes : (start + size) // unit * nbytes]
            if self._rope_heads:
                columns = columns.contiguous().view(self._rope_heads, -1)
                self._read_heads_into(columns, out)
            else:
                self._read_rows_into(columns, out)
        elif self._rope_heads:
            heads = self._data.view(self._rope_heads, -1)
            self._read_heads_into(heads[start // unit : (start + size) // unit], out)
        else:
            self._read_rows_into(self.raw()[start : start + size], out)

    def _read_rows_into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        columns = out.shape[-1]
        out = out.unsqueeze(0) if out.dim() == 1 else out.view(-1, columns)
        step = max(1, SLICE_ELEMENTS // columns)
        for start in range(0, len(rows), step):
            part = self._values(rows[start : start + step])
            out[start : start + step].copy_(part.view(-1, columns))

    def _read_heads_into(self, blocks: torch.Tensor, out: torch.Tensor) -> None:
        # The file has interleaved rotary pairs (rows 2i and 2i+1 of a head); rotate-half needs all first halves, then
        # all second halves.
        heads = len(blocks)
        pairs = self.shape[0] // self._rope_heads // 2
        columns = out.shape[1:]
        step = max(1, SLICE_ELEMENTS * heads // max(1, out.numel()))
        target = out.unflatten(0, (heads, 2, pairs))
        for start in range(0, heads, step):
            part = self._values(blocks[start : start + step])
            target[start : start + step].copy_(part.view(-1, pairs, 2, *columns).transpose(1, 2))

    def _values(self, stored: torch.Tensor) -> torch.Tensor:
        values = self._dequantize(stored.reshape(-1, self._type.nbytes))
        return values - self._added if self._added else values


def open_gguf(path: Path) -> Iterator[GGUFTensor]:
    """All weights of a file in file order, which is also the fastest order to read them in."""
    header = read_header(path)
    require_supported(header)
    data = map_bytes(path)
    for info in header.tensors.values():
        if info.name not in NO_WEIGHTS:
            for name, part in _named(header, info):
                yield _open_tensor(header, name, part, data)


def _named(header: GGUFHeader, info: TensorInfo) -> list[tuple[str, TensorInfo]]:
    """The Hugging Face tensors that a tensor holds: of experts, one after the other, each is one."""
    name = hf_name(info.name, header.architecture)
    if name is None:
        raise ValueError(f"{header.path}: tensor {info.name} is not known for architecture {header.architecture!r}")
    if name.endswith("shared_expert_gate.weight") and len(info.shape) == 1:
        info = replace(info, shape=(1, *info.shape))
    if "{e}" not in name:
        return [(name, info)]
    if len(info.shape) != (3 if name.endswith(".weight") else 2) or info.shape[0] > MAX_EXPERTS:
        raise ValueError(
            f"{header.path}: tensor {info.name} has the shape {list(info.shape)}; weights of experts are "
            f"[experts, rows, columns], biases [experts, rows], for at most {MAX_EXPERTS} experts"
        )
    count, nbytes = info.shape[0], info.nbytes // info.shape[0]
    parts = (replace(info, shape=info.shape[1:], offset=info.offset + e * nbytes, nbytes=nbytes) for e in range(count))
    return [(name.format(e=e), part) for e, part in enumerate(parts)]


def _open_tensor(header: GGUFHeader, name: str, info: TensorInfo, data: torch.Tensor) -> GGUFTensor:
    dequantize = dequantizer(info.type.name, info.type_id)
    if dequantize is None:
        raise ValueError(
            f"{header.path}: tensor {info.name} has type {info.type.name}, which cannot be dequantized yet"
        )
    # llama.cpp stores 1 + weight for Gemma's norms, checkpoints store weight.
    added = 1.0 if header.architecture in PLUS_ONE and name.endswith("norm.weight") else 0.0
    return GGUFTensor(name, info, data, dequantize, _rope_heads(header, info), added)


def _rope_heads(header: GGUFHeader, info: TensorInfo) -> int:
    if header.architecture not in INTERLEAVED:
        return 0
    if ".attn_q." in info.name:
        heads = query_heads(header)
    elif ".attn_k." in info.name:
        heads = kv_heads(header)
    else:
        return 0
    if info.shape[0] % (2 * heads):
        raise ValueError(
            f"{header.path}: tensor {info.name} has {info.shape[0]} rows, not an even number per {heads} heads"
        )
    return heads
