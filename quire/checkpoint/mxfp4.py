"""Weights in mxfp4: 4-bit floats in blocks of 32, each block with an exponent."""

from collections.abc import Iterable, Iterator

import torch

from quire.checkpoint.tensors import CheckpointTensor

BLOCKS, SCALES = "_blocks", "_scales"
# Low bits first in a byte: sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


class Mxfp4Tensor:
    """Dequantizes two tensors of a checkpoint, [..., rows, groups, 16] bytes and [..., rows, groups] exponents, to
    [..., rows, groups * 32]."""

    def __init__(self, name: str, blocks: CheckpointTensor, scales: CheckpointTensor) -> None:
        self.name = name
        if tuple(blocks.shape[:-1]) != tuple(scales.shape) or blocks.shape[-1] != 16:
            raise ValueError(f"{blocks.name} {list(blocks.shape)} and {scales.name} {list(scales.shape)} do not fit")
        *rows, groups, _ = blocks.shape
        self.shape = (*rows, groups * 32)
        self._blocks, self._scales = blocks, scales

    def read_into(self, out: torch.Tensor) -> None:
        blocks = torch.empty(self._blocks.shape, dtype=torch.uint8)
        scales = torch.empty(self._scales.shape, dtype=torch.uint8)
        self._blocks.read_into(blocks)
        self._scales.read_into(scales)
        values = torch.tensor(VALUES)
        # One expert at a time: float32 takes eight times the stored size.
        for target, bytes_, exponents in zip(out, blocks, scales, strict=True):
            pairs = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2).int()
            numbers = torch.ldexp(values[pairs], exponents.int().unsqueeze(-1) - EXPONENT_BIAS)
            target.copy_(numbers.flatten(-2))


def pair_mxfp4(tensors: Iterable[CheckpointTensor]) -> Iterator[CheckpointTensor]:
    """Blocks and their exponents as one tensor, named `..._mxfp4`; all others unchanged."""
    waiting: dict[str, CheckpointTensor] = {}
    for tensor in tensors:
        kind = next((suffix for suffix in (BLOCKS, SCALES) if tensor.name.endswith(suffix)), None)
        if kind is None:
            yield tensor
            continue
        name = tensor.name.removesuffix(kind)
        other = waiting.pop(name, None)
        if other is None:
            waiting[name] = tensor
        else:
            blocks, scales = (tensor, other) if kind == BLOCKS else (other, tensor)
            yield Mxfp4Tensor(f"{name}_mxfp4", blocks, scales)
    if waiting:
        alone = ", ".join(tensor.name for tensor in waiting.values())
        raise ValueError(f"the checkpoint lacks the other half of {alone}: mxfp4 weights are {BLOCKS} and {SCALES}")
