"""Integer weights on a GPU: packed after loading, multiplied as stored (kernels/int_linear.py)."""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from quire.kernels.int_linear import (
    HALF,
    Kind,
    PackedIntWeight,
    can_fuse,
    check_groups,
    fused_linear,
    linear,
    pack_int_weight,
    prepare_int_linear,
)
from quire.kernels.int_table import BUCKETS
from quire.kernels.rms_norm import RMSNormParams
from quire.quantization.base import keep

logger = logging.getLogger("quire")


class IntegerWeight(Protocol):
    """A decoded weight: w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]); g is group_of[k], or k // group_size. Or
    4-bit floats, and factors of outputs: see IntWeight."""

    @property
    def bits(self) -> int: ...
    @property
    def codes(self) -> torch.Tensor: ...  # uint8 [outputs, inputs]
    @property
    def scales(self) -> torch.Tensor: ...  # [outputs, groups]
    @property
    def zeros(self) -> torch.Tensor | None: ...  # [outputs, groups]; None: 2 ** (bits - 1)
    @property
    def group_size(self) -> int: ...
    @property
    def group_of(self) -> torch.Tensor | None: ...  # [inputs]
    @property
    def kind(self) -> Kind: ...
    @property
    def factors(self) -> torch.Tensor | None: ...  # [outputs]

    def in_group_order(self) -> tuple["IntegerWeight", torch.Tensor | None]:
        """With the inputs of a group next to each other, and the order that makes them so."""
        ...

    def dequantize_into(self, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class IntPart:
    """Outputs of a layer that are multiplied at once."""

    weight: PackedIntWeight | torch.Tensor  # a tensor if it cannot be packed: dequantized
    order: torch.Tensor | None  # of the inputs

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        if isinstance(self.weight, torch.Tensor):
            return F.linear(x, self.weight, bias)
        return linear(x, self.weight, bias)


@dataclass(frozen=True)
class TritonIntKernel:
    """`layer.int_parts`: one if all members have the same groups and order of inputs, else one for each member."""

    dtype: torch.dtype

    def prepare(self, layer: nn.Module, weights: Iterable[IntegerWeight], module: str) -> None:
        ordered = [weight.in_group_order() for weight in weights]
        if all(_fuses(ordered[0], member) for member in ordered[1:]):
            ordered = [(_Joined.of([weight for weight, _ in ordered]), ordered[0][1])]
        parts = [IntPart(self._packed(weight, module), order) for weight, order in ordered]
        keep_parts(layer, parts)
        prepare_int_linear(ordered[0][0].codes.device)

    def _packed(self, weight: IntegerWeight, module: str) -> PackedIntWeight | torch.Tensor:
        obstacle, inputs = None, weight.codes.shape[1]
        try:
            check_groups(inputs, weight.group_size if weight.scales.shape[1] > 1 else inputs, weight.bits)
        except ValueError as error:
            obstacle = str(error)
        if self.dtype not in HALF:
            obstacle = "there are kernels for bfloat16 and float16 only"
        elif weight.group_of is not None:
            obstacle = "its groups have different numbers of inputs"
        if obstacle is None:
            w = weight
            return pack_int_weight(w.codes, w.scales, w.zeros, w.bits, self.dtype, w.kind, w.factors)
        _log_dequantized(str(self.dtype).removeprefix("torch."), obstacle, module)
        whole = torch.empty(weight.codes.shape, dtype=self.dtype, device=weight.codes.device)
        weight.dequantize_into(whole)
        return whole

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts: list[IntPart] = layer.int_parts  # type: ignore[assignment]
        if len(parts) == 1:
            return parts[0].multiply(x, bias)
        outputs = torch.cat([part.multiply(x, None) for part in parts], dim=1)
        return outputs if bias is None else outputs + bias

    def can_fuse(self, layer: nn.Module) -> bool:
        weight = packed_of(layer)
        return weight is not None and can_fuse(weight)

    def apply_fused(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNormParams | None = None,
        residual: torch.Tensor | None = None,
        silu: bool = False,
    ) -> torch.Tensor:
        weight = packed_of(layer)
        assert weight is not None
        return fused_linear(x, weight, bias, norm, residual, silu)

    def describe(self) -> str:
        compute = str(self.dtype).removeprefix("torch.")
        return f"weights stay as stored; activations and products in {compute}"


def keep_parts(layer: nn.Module, parts: list[IntPart]) -> None:
    keep(layer, "int_parts", parts)
    keep(layer, "kernel_row_counts", (*BUCKETS, 2 * BUCKETS[-1]))  # above the last weights are dequantized


def packed_of(layer: nn.Module) -> PackedIntWeight | None:
    """The layer's weight if it is one packed weight, whose inputs are in their own order."""
    parts: list[IntPart] = getattr(layer, "int_parts", [])
    if len(parts) != 1 or parts[0].order is not None or isinstance(parts[0].weight, torch.Tensor):
        return None
    return parts[0].weight


@dataclass(frozen=True)
class _Joined:
    """Members of a fused layer as one weight."""

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    group_of: torch.Tensor | None
    kind: Kind
    factors: torch.Tensor | None
    members: list[IntegerWeight]

    @classmethod
    def of(cls, members: list[IntegerWeight]) -> IntegerWeight:
        if len(members) == 1:
            return members[0]
        first, zeros = members[0], [m.zeros for m in members if m.zeros is not None]
        factors = [m.factors for m in members if m.factors is not None]
        return cls(
            first.bits,
            torch.cat([m.codes for m in members]),
            torch.cat([m.scales for m in members]),
            torch.cat(zeros) if zeros else None,
            first.group_size,
            first.group_of,
            first.kind,
            torch.cat(factors) if factors else None,
            members,
        )

    def in_group_order(self) -> tuple[IntegerWeight, torch.Tensor | None]:
        return self, None

    def dequantize_into(self, out: torch.Tensor) -> None:
        for member, rows in zip(self.members, out.split([len(m.codes) for m in self.members]), strict=True):
            member.dequantize_into(rows)


Ordered = tuple[IntegerWeight, torch.Tensor | None]


def _fuses(one: Ordered, other: Ordered) -> bool:
    (a, order_a), (b, order_b) = one, other
    same = _form(a) == _form(b)
    return same and _equal(order_a, order_b) and _equal(a.group_of, b.group_of)


def _form(w: IntegerWeight) -> tuple[object, ...]:
    return w.bits, w.group_size, w.kind, w.zeros is None, w.factors is None


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@functools.cache
def _log_dequantized(compute: str, why: str, module: str) -> None:
    logger.warning("%s is dequantized to %s: %s", module, compute, why)
