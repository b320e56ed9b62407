"""AWQ checkpoints in GEMM layout: 4-bit numbers, eight outputs in an int32, in an order of their own."""

from dataclasses import dataclass
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
from quire.quantization.int_weight import IntWeight

BITS, PACKED = 4, 8
PLACE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # of eight outputs, in their number: the lowest four bits are place 0


@dataclass(frozen=True)
class AWQScheme:
    """qweight [inputs, outputs packed], scales [groups, outputs], qzeros [groups, outputs packed]."""

    group_size: int

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        if outputs % PACKED:
            raise ValueError(f"awq packs {PACKED} outputs in a number, but it has {outputs}")
        packed = Axis(1, PACKED)
        return {
            "qweight": StoredTensor((inputs, outputs // PACKED), torch.int32, packed, Axis(0)),
            "scales": StoredTensor((groups, outputs), torch.float32, Axis(1)),
            "qzeros": StoredTensor((groups, outputs // PACKED), torch.int32, packed),
        }

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        return IntWeight(
            BITS,
            _unpack(stored["qweight"]),
            stored["scales"].t().contiguous(),
            _unpack(stored["qzeros"]).to(torch.int16),
            group_size,
        )


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, outputs packed] -> uint8 [outputs, n]."""
    words = words.t().contiguous()
    codes = torch.empty(words.shape[0], PACKED, words.shape[1], dtype=torch.uint8, device=words.device)
    for output, place in enumerate(PLACE_OF_OUTPUT):
        codes[:, output] = words >> BITS * place & 15
    return codes.flatten(0, 1)


@dataclass(frozen=True)
class AWQConfig:
    default: AWQScheme
    skipped: tuple[str, ...] = ()  # parts of the names of layers that are not quantized

    @classmethod
    def parse(cls, stored: dict[str, Any]) -> "AWQConfig":
        with well_formed():
            version = str(stored.get("version") or stored.get("checkpoint_format") or "gemm").lower()
            if version != "gemm":
                raise unsupported(f"awq version {version!r}", "gemm")
            supported_bits(stored["bits"] if "bits" in stored else stored["w_bit"], (BITS,))
            if not stored.get("zero_point", True):
                raise unsupported("awq weights without zero points", "zero_point true")
            size = stored["group_size"] if "group_size" in stored else stored["q_group_size"]
            return cls(AWQScheme(supported_group_size(size)), names_in(stored, "modules_to_not_convert"))

    def scheme(self, name: str) -> AWQScheme | None:
        # As the format's own library decides, also within words: whoever quantized the layer went by that.
        if name == "lm_head" or any(part in name for part in self.skipped):
            return None
        return self.default

    def describe(self) -> str:
        return f"awq: {BITS}-bit weights, groups of {self.default.group_size}"


def quantization(stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool) -> IntCheckpoint:
    return IntCheckpoint(AWQConfig.parse(stored), choose_int_kernel(dtype, device, dequantize))
