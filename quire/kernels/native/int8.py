"""Linear layers in int8 on a CPU: weights with a scale per output, inputs with one per row and group of them."""

from dataclasses import dataclass

import torch

from quire.kernels.native import PANEL, TYPES, native_function

FOUR = 4  # inputs that one instruction multiplies for each output
GROUP = 192  # inputs of a row that are rounded with one scale: a multiple of 16
ZERO = 128  # inputs are stored so much higher, without sign
TOP = 127
ROWS_AT_A_TIME = 4096  # limits the float32 copies


@dataclass(frozen=True)
class Int8Weight:
    """A weight [outputs, inputs] in panels (int8_linear.c)."""

    packed: torch.Tensor  # int8 [panels, fours of inputs, PANEL, FOUR]
    start: torch.Tensor  # int32 [panels, groups, PANEL]
    scale: torch.Tensor  # float32 [panels * PANEL]
    outputs: int
    inputs: int


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] -> codes int8 [N, K] and scales float32 [N]: each output's greatest magnitude becomes 127."""
    parts = [_quantize_rows(rows.float()) for rows in weight.split(ROWS_AT_A_TIME)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def _quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    most = weight.abs().amax(1)
    scales = torch.where(most == 0, 1.0, most / TOP)
    return (weight / scales[:, None]).round().clamp(-TOP, TOP).to(torch.int8), scales


def pack_int8(codes: torch.Tensor, scales: torch.Tensor) -> Int8Weight:
    outputs, inputs = codes.shape
    panels, fours = -(-outputs // PANEL), -(-inputs // FOUR)
    padded = torch.zeros(panels * PANEL, fours * FOUR, dtype=torch.int8)
    padded[:outputs, :inputs] = codes
    groups = [part.sum(1, dtype=torch.int32) for part in padded.split(GROUP, dim=1)]
    start = -ZERO * torch.stack(groups).view(len(groups), panels, PANEL).transpose(0, 1).contiguous()
    scale = torch.zeros(panels * PANEL)
    scale[:outputs] = scales
    packed = padded.view(panels, PANEL, fours, FOUR).permute(0, 2, 1, 3).contiguous()
    return Int8Weight(packed, start, scale, outputs, inputs)


def int8_linear_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] -> [M, N] in the type of x: what `int8_linear` computes, to the bit."""
    sums = torch.zeros(len(x), len(codes), dtype=torch.float64)
    for part, weights in zip(x.float().split(GROUP, dim=1), codes.split(GROUP, dim=1), strict=True):
        most = part.abs().amax(1, keepdim=True)
        rounded = (part * torch.where(most > 1e-30, torch.tensor(float(TOP)) / most, 0.0)).round()
        product = (rounded.double() @ weights.double().t()).float().double()
        sums = (sums + product * (most * (1 / TOP)).double()).float().double()
    product = sums * scales.double()
    return (product if bias is None else product + bias.double()).float().to(x.dtype)


def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] float32 or bf16 -> [M, outputs] in the type of x."""
    x = x.contiguous()
    assert x.dim() == 2 and x.shape[1] == weight.inputs
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype)
    native_function("quire_int8_linear")(
        x.data_ptr(), weight.packed.data_ptr(), weight.start.data_ptr(), weight.scale.data_ptr(),
        bias.data_ptr() if bias is not None else None, out.data_ptr(), len(x), weight.outputs, weight.inputs,
        TYPES[x.dtype],
    )  # fmt: skip
    return out
