"""GPTQ checkpoints: 4- or 8-bit numbers packed along the inputs, groups in the order of inputs or by g_idx."""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.quantization.checkpoint_config import (
    names_in,
    supported_bits,
    supported_group_size,
    unsupported,
    well_formed,
)
from quire.quantization.int_kernels import choose_int_kernel
from quire.quantization.int_linear import Axis, IntCheckpoint, StoredTensor
from quire.quantization.int_weight import IntWeight, checked_groups, unpack_words

FORMATS = ("gptq", "gptq_v2")
ONE_IN_EACH = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True)
class GPTQScheme:
    """qweight [inputs packed, outputs], scales [groups, outputs], qzeros [groups, outputs packed], g_idx [inputs]."""

    bits: int
    group_size: int
    adds_one: bool  # to zero points: the first version of the format stores them minus one

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        packed = 32 // self.bits
        for count, what in ((inputs, "inputs"), (outputs, "outputs")):
            if count % packed:
                raise ValueError(f"gptq packs {packed} {what} in a number, but it has {count}")
        by_output, by_input = Axis(1), Axis(0, packed)
        return {
            "qweight": StoredTensor((inputs // packed, outputs), torch.int32, by_output, by_input),
            "scales": StoredTensor((groups, outputs), torch.float32, by_output),
            "qzeros": StoredTensor((groups, outputs // packed), torch.int32, Axis(1, packed)),
            "g_idx": StoredTensor((inputs,), torch.int64, inputs=Axis(0), optional=True),
        }

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        qzeros = stored["qzeros"]
        if self.adds_one:
            # To whole numbers of 32 bits, as they were subtracted: a zero point of 0 borrowed from its neighbour.
            qzeros = (qzeros.to(torch.int64) + ONE_IN_EACH[self.bits]).to(torch.int32)
        return IntWeight(
            self.bits,
            unpack_words(stored["qweight"].t(), self.bits),
            stored["scales"].t().contiguous(),
            unpack_words(qzeros, self.bits).t().to(torch.int16).contiguous(),
            group_size,
            checked_groups(stored.get("g_idx"), len(qzeros)),
        )


@dataclass(frozen=True)
class GPTQConfig:
    """`default` for the linear layers of the decoder's blocks; `rules` come first, in order: a pattern, and the scheme
    of layers that it matches, or None."""

    default: GPTQScheme
    rules: tuple[tuple[str, GPTQScheme | None], ...] = ()
    head: bool = False
    within_blocks: tuple[str, ...] | None = None  # ends of the names of those quantized; None: all

    @classmethod
    def parse(cls, stored: dict[str, Any]) -> "GPTQConfig":
        with well_formed():
            kind = stored.get("checkpoint_format") or stored.get("format") or "gptq"
            if kind not in FORMATS or stored.get("is_marlin_format"):
                raise unsupported(f"checkpoint_format {kind!r}", ", ".join(FORMATS))
            if (stored.get("pack_dtype") or "int32") != "int32":
                raise unsupported(f"pack_dtype {stored['pack_dtype']!r}", "int32")
            default = GPTQScheme(
                supported_bits(stored["bits"], (4, 8)), supported_group_size(stored["group_size"]), kind == "gptq"
            )
            rules = [_rule(pattern, changes, default) for pattern, changes in (stored.get("dynamic") or {}).items()]
            inside = names_in(stored, "modules_in_block_to_quantize") or None
            return cls(default, tuple(rules), bool(stored.get("lm_head")), inside)

    def scheme(self, name: str) -> GPTQScheme | None:
        for pattern, scheme in self.rules:
            if re.match(pattern, name):
                return scheme
        if name == "lm_head":
            return self.default if self.head else None
        if self.within_blocks is not None and not name.endswith(tuple(f".{end}" for end in self.within_blocks)):
            return None
        return self.default

    def describe(self) -> str:
        size = self.default.group_size
        groups = "a scale per output" if size < 0 else f"groups of {size}"
        return f"gptq: {self.default.bits}-bit weights, {groups}" + (", by module" if self.rules else "")


def _rule(pattern: str, changes: dict[str, Any], default: GPTQScheme) -> tuple[str, GPTQScheme | None]:
    """'-:pattern': not quantized; '+:pattern' or 'pattern': with other options."""
    bare = pattern.removeprefix("-:").removeprefix("+:")
    re.compile(bare)
    if pattern.startswith("-:"):
        return bare, None
    try:
        bits = supported_bits(changes.get("bits", default.bits), (4, 8))
        group_size = supported_group_size(changes.get("group_size", default.group_size))
    except ValueError as error:
        raise ValueError(f"for modules {bare!r} (dynamic), {error}") from error
    return bare, replace(default, bits=bits, group_size=group_size)


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> IntCheckpoint:
    return IntCheckpoint(GPTQConfig.parse(stored), choose_int_kernel(dtype, device, dequantize))
