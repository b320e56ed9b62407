"""Linear layers in int8 on a CPU: weights with a scale for each output, rows of inputs with one each."""

from dataclasses import dataclass

import torch

from quire.kernels.native import PANEL, TYPES, native_function

FOUR = 4  # inputs that one instruction multiplies for each output
ZERO = 128  # inputs are stored so much higher, without sign
TOP = 127
ROWS_AT_A_TIME = 4096  # limits the float32 copies


@dataclass(frozen=True)
class Int8Weight:
    """A weight [outputs, inputs] in panels (int8_linear.c)."""

    packed: torch.Tensor  # int8 [panels, fours of inputs, PANEL, FOUR]
    start: torch.Tensor  # int32 [panels * PANEL]
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
    start, scale = torch.zeros(panels * PANEL, dtype=torch.int32), torch.zeros(panels * PANEL)
    start[:outputs] = -ZERO * codes.sum(1, dtype=torch.int32)
    scale[:outputs] = scales
    packed = padded.view(panels, PANEL, fours, FOUR).permute(0, 2, 1, 3).contiguous()
    return Int8Weight(packed, start, scale, outputs, inputs)


def int8_linear_reference(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [M, K] -> [M, N] in the type of x: what `int8_linear` computes, to the bit."""
    most = x.float().abs().amax(1, keepdim=True)
    rounded = (x.float() * torch.where(most > 1e-30, torch.tensor(float(TOP)) / most, 0.0)).round()
    sums = (rounded.double() @ codes.double().t()).float()
    product = sums.double() * (scales * (most * (1 / TOP))).double()
    return (product if bias is None else product + bias.double()).float().to(x.dtype)


def int8_linear(x: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] float32 or bf16 -> [M, outputs] in the type of x."""
    x = x.contiguous()
    out = torch.empty(len(x), weight.outputs, dtype=x.dtype)
    native_function("quire_int8_linear")(
        x.data_ptr(), weight.packed.data_ptr(), weight.start.data_ptr(), weight.scale.data_ptr(),
        bias.data_ptr() if bias is not None else None, out.data_ptr(), len(x), weight.outputs, weight.inputs,
        TYPES[x.dtype],
    )  # fmt: skip
    return out
