"""Weights of 4 and 8 bits, integers and floats, in every layout, for tests on any device."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.kernels.int_linear import NUMBERS, Kind, PackedIntWeight, pack_int_weight
from quire.kernels.moe import ExpertWeights, InputRounding, activate_torch, sum_experts
from quire.kernels.round_fp4 import round_mxfp4_torch, round_nvfp4_torch


@dataclass(frozen=True)
class Layout:
    bits: int
    inputs: int
    group: int
    zeros: bool = False
    kind: Kind = "int"
    factors: bool = False
    centres: bool = False

    def __str__(self) -> str:
        rest = [name for name in ("zeros", "factors", "centres") if getattr(self, name)]
        return ", ".join((f"{self.bits} bits of {self.kind}", f"{self.inputs} in groups of {self.group}", *rest))


LAYOUTS = [
    Layout(4, 1024, 128),
    Layout(4, 384, 32, zeros=True),
    Layout(8, 256, 128, zeros=True),
    Layout(4, 256, 64),
    Layout(4, 512, 256, zeros=True),
    Layout(4, 192, 96),  # groups that are no power of two
    Layout(4, 160, 32),  # inputs that are no multiple of a chunk
    Layout(4, 200, 200),  # a scale per output
    Layout(4, 512, 512, zeros=True),
    Layout(8, 512, 128),
    Layout(8, 96, 32),
    Layout(8, 256, 256),
    Layout(8, 320, 320, zeros=True),
    Layout(4, 192, 16, zeros=True),
    Layout(4, 1024, 16, kind="e2m1", factors=True),
    Layout(4, 720, 16, kind="e2m1"),
    Layout(4, 768, 16, kind="e2m1", factors=True),
    Layout(4, 160, 16, kind="e2m1", factors=True),
    Layout(4, 384, 32, kind="e2m1"),
    Layout(4, 1024, 32, kind="e2m1"),
    Layout(4, 320, 32, kind="e2m1"),
    Layout(4, 512, 128, kind="e2m1", factors=True),
    Layout(4, 200, 200, kind="e2m1"),
    Layout(8, 256, 16),
    Layout(8, 224, 16, kind="int7"),
    Layout(8, 128, 32, kind="int7", centres=True),
    Layout(4, 256, 32, centres=True),
    Layout(4, 32, 32, centres=True),  # one group
    Layout(8, 160, 32, centres=True),
    Layout(4, 1024, 64, kind="nf4"),
    Layout(4, 192, 64, kind="nf4"),
    Layout(4, 512, 128, kind="fp4", factors=True),
]


def make_weight(
    layout: Layout,
    outputs: int,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    experts: int | None = None,
    scale_dtype: torch.dtype | None = None,
) -> tuple[PackedIntWeight, torch.Tensor]:
    """A packed weight, and the same [outputs, inputs] dequantized in `dtype`."""
    lead = () if experts is None else (experts,)
    groups = layout.inputs // layout.group
    top = 1 << layout.bits
    top = 128 if layout.kind == "int7" else top
    codes = torch.randint(top, (*lead, outputs, layout.inputs), dtype=torch.uint8, device=device)
    spread = top * layout.inputs**0.5 / 3  # outputs of about the size of the inputs
    scales = ((torch.rand(*lead, outputs, groups, device=device) + 0.5) / spread).to(scale_dtype or dtype)
    if layout.kind in NUMBERS:
        return make_floats(layout, codes, scales, dtype)
    zeros = None
    if layout.zeros:
        # One more than a code can be: GPTQ stores zero points less one.
        zeros = torch.randint(top + (layout.bits == 4), (*lead, outputs, groups), device=device)
    if layout.centres:
        centres = (torch.rand(*lead, outputs, groups, device=device) - 0.5) * top * scales.float()
        numbers = [t.to(dtype).float().repeat_interleave(layout.group, -1) for t in (scales, centres)]
        made = (codes.float() - top // 2) * numbers[0] + numbers[1]
        return pack_int_weight(codes, scales, None, layout.bits, dtype, layout.kind, centres=centres), made.to(dtype)
    middle = torch.full_like(scales, top // 2, dtype=torch.float32) if zeros is None else zeros.float()
    wide = (t.float().repeat_interleave(layout.group, -1) for t in (middle, scales))
    dequantized = ((codes.float() - next(wide)) * next(wide)).to(dtype)
    return pack_int_weight(codes, scales, zeros, layout.bits, dtype, layout.kind), dequantized


def make_floats(
    layout: Layout, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> tuple[PackedIntWeight, torch.Tensor]:
    """NVFP4 if groups of 16 have factors, MXFP4 if they are of 32; other scales are any of 16 bits."""
    factors = None
    if layout.factors:
        factors = (torch.rand(codes.shape[:-1], device=codes.device) + 1.0) * scales.float().mean() / 16
        scales = torch.rand(scales.shape, device=codes.device) * 30
        scales = scales.to(torch.float8_e4m3fn).float() if layout.group == 16 else scales.to(dtype)
    elif layout.group == 32 and layout.kind == "e2m1":
        scales = 2.0 ** scales.float().log2().round()
    numbers = torch.tensor(NUMBERS[layout.kind], device=codes.device).to(dtype).float()
    values = numbers[codes.int()] * scales.float().repeat_interleave(layout.group, -1)
    wide = (values if factors is None else values * factors[..., None]).to(dtype)
    return pack_int_weight(codes, scales, None, 4, dtype, layout.kind, factors), wide


def rounded_experts_torch(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, w: ExpertWeights, rounding: InputRounding
) -> torch.Tensor:
    """Each expert on its own, with inputs rounded before both of its products."""

    def rounded(rows: torch.Tensor, scales: torch.Tensor | None, e: int) -> torch.Tensor:
        return round_mxfp4_torch(rows) if scales is None else round_nvfp4_torch(rows, float(scales[e]))

    def expert(rows: torch.Tensor, e: int, _: torch.Tensor | None) -> torch.Tensor:
        inner = F.linear(rounded(rows, rounding.gate_up, e).float(), w.gate_up[e].float())
        inner = activate_torch(inner, w.activation).to(x.dtype)
        return F.linear(rounded(inner, rounding.down, e).float(), w.down[e].float())

    return sum_experts(x, weights, experts, len(w.down), expert)
