"""bitsandbytes' 4-bit weights (NF4, FP4): from its checkpoints, or quantized while loading."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.kernels.int_linear import HALF, NUMBERS, Kind, pack_int_weight
from quire.layers.load_slot import LoadSlot, ShardId
from quire.quantization.base import LinearMethod, Partition
from quire.quantization.bitsandbytes_state import BLOCK, StateTensor, regrouped
from quire.quantization.checkpoint_config import names_in, unsupported, well_formed
from quire.quantization.fp4 import codes_of_bytes
from quire.quantization.int_kernels import DequantizedKernel, IntKernel
from quire.quantization.int_linear import Axis, IntCheckpoint, StoredTensor
from quire.quantization.int_online import OnlineIntLinearMethod, OnlineIntQuantization
from quire.quantization.int_triton import IntPart, TritonIntKernel, keep_parts
from quire.quantization.int_weight import IntWeight
from quire.quantization.staging import Staging

ROWS_AT_A_TIME = 4096  # limits the float32 copies


@dataclass(frozen=True)
class BitsAndBytesScheme:
    """weight [outputs, inputs / 2] uint8, the first of two codes in the high bits, and absmax [outputs, groups], as
    `regrouped` makes them of the stored tensors."""

    kind: Kind
    group_size: int = BLOCK

    def tensors(self, outputs: int, inputs: int, groups: int) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((outputs, inputs // 2), torch.uint8, Axis(0), Axis(1, 2)),
            "absmax": StoredTensor((outputs, groups), torch.float32, Axis(0)),
        }

    def decode(self, stored: dict[str, torch.Tensor], outputs: int, group_size: int) -> IntWeight:
        swapped = stored["weight"] << 4 | stored["weight"] >> 4
        return IntWeight(4, codes_of_bytes(swapped), stored["absmax"], None, group_size, kind=self.kind)


@dataclass(frozen=True)
class BitsAndBytesConfig:
    default: BitsAndBytesScheme
    skipped: tuple[str, ...] = ()  # names, or parts of names, of layers that are not quantized

    @classmethod
    def parse(cls, stored: dict[str, Any]) -> "BitsAndBytesConfig":
        with well_formed():
            if stored.get("load_in_8bit") or stored.get("_load_in_8bit"):
                raise unsupported("8-bit weights of bitsandbytes (load_in_8bit)", "load_in_4bit")
            if not (stored.get("load_in_4bit") or stored.get("_load_in_4bit")):
                raise unsupported("weights of bitsandbytes without load_in_4bit", "load_in_4bit")
            kind = stored.get("bnb_4bit_quant_type", "fp4")
            if kind not in ("nf4", "fp4"):
                raise unsupported(f"bnb_4bit_quant_type {kind!r}", "nf4, fp4")
            if (stored.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
                raise unsupported(f"bnb_4bit_quant_storage {stored['bnb_4bit_quant_storage']!r}", "uint8")
            return cls(BitsAndBytesScheme(kind), names_in(stored, "llm_int8_skip_modules"))

    def scheme(self, name: str) -> BitsAndBytesScheme | None:
        if name == "lm_head" or any(f".{skipped}." in f".{name}." for skipped in self.skipped):
            return None
        return self.default

    def describe(self) -> str:
        return f"bitsandbytes: 4-bit weights ({self.default.kind}), groups of {self.default.group_size}"


class BitsAndBytesCheckpoint(IntCheckpoint):
    """A checkpoint with tensors of bitsandbytes' state beside each weight."""

    def __init__(self, config: BitsAndBytesConfig, kernel: IntKernel) -> None:
        super().__init__(config, kernel)
        self.kind = config.default.kind

    def regroup(self, tensors: Iterable[StateTensor]) -> Iterator[StateTensor]:
        return regrouped(tensors, self.kind)


def quantize_nf4(weight: torch.Tensor, group_size: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> codes uint8 [N, K] of the nearest numbers, and the largest magnitude of each group [N, groups]."""
    numbers = torch.tensor(NUMBERS["nf4"], device=weight.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    codes, absmax = [], []
    for rows in weight.split(ROWS_AT_A_TIME):
        groups = rows.float().unflatten(-1, (-1, group_size))
        most = groups.abs().amax(-1)
        part = groups / torch.where(most == 0, 1.0, most)[..., None]
        codes.append(torch.bucketize(part, between).flatten(-2).to(torch.uint8))
        absmax.append(most)
    return torch.cat(codes), torch.cat(absmax)


@dataclass(frozen=True)
class OnlineNF4LinearMethod(OnlineIntLinearMethod):
    """Quantizes to NF4 instead of integers."""

    def create_weights(
        self,
        layer: nn.Module,
        in_features: int,
        out_partition_sizes: list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if in_features % BLOCK:
            raise ValueError(f"bitsandbytes needs layers whose inputs are a multiple of {BLOCK}; one has {in_features}")
        super().create_weights(layer, in_features, out_partition_sizes, dtype, device)

    def load_slots(self, layer: nn.Module, partitions: list[Partition]) -> dict[tuple[str, ShardId], LoadSlot]:
        shape, dtype, device = layer.staged  # type: ignore[misc]

        def finish(weight: torch.Tensor) -> None:
            codes, absmax = quantize_nf4(weight)
            keep_parts(layer, [IntPart(pack_int_weight(codes, absmax, None, 4, dtype, "nf4"), None)])

        return Staging(shape, dtype, device, len(partitions), finish).slots(partitions)


class OnlineNF4Quantization(OnlineIntQuantization):
    """For all linear layers except the head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4, dtype)

    def linear_method(self, name: str) -> LinearMethod | None:
        return OnlineNF4LinearMethod(4, TritonIntKernel(self.dtype))

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return (
            f"bitsandbytes: weights quantized to nf4 while loading, groups of {BLOCK}; activations, embedding and head "
            f"in {compute}"
        )


def quantization(
    stored: dict[str, Any], dtype: torch.dtype, device: torch.device, dequantize: bool
) -> BitsAndBytesCheckpoint:
    config = BitsAndBytesConfig.parse(stored)
    if device.type == "cuda" and dtype in HALF and not dequantize:
        return BitsAndBytesCheckpoint(config, TritonIntKernel(dtype))
    why = "as requested" if dequantize else "only a GPU multiplies by them as stored, in bfloat16 or float16"
    return BitsAndBytesCheckpoint(config, DequantizedKernel(str(dtype).removeprefix("torch."), why))


def online_quantization(dtype: torch.dtype, device: torch.device) -> OnlineNF4Quantization:
    if device.type != "cuda" or dtype not in HALF:
        found = "this is a CPU" if device.type != "cuda" else f"dtype is {str(dtype).removeprefix('torch.')}"
        raise ValueError(
            f"quantization 'bitsandbytes' quantizes while loading on a GPU, in bfloat16 or float16; {found}; "
            "allowed on a CPU: int8, int4"
        )
    return OnlineNF4Quantization(dtype)
