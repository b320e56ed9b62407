"""x [M, K] times a weight [N, K], for the few rows of a decode step, fused with norm, activation and residual."""

import torch
import torch.nn.functional as F

from quire.kernels.dispatch import early_launch, supports_triton, use_triton
from quire.kernels.lora import RowTerms, sums_of_terms_torch
from quire.kernels.rms_norm import RMSNormParams, rms_norm_torch
from quire.kernels.silu_mul import silu_mul_torch
from quire.kernels.skinny_table import SkinnyConfig, choose, choose_fused

EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
Groups = tuple[int, int]  # outputs and inputs that share a scale of the weight: powers of two that divide its sizes


def expand_scales(scale: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[N / groups[0], K / groups[1]] -> [N, K]."""
    return scale.repeat_interleave(groups[0], -2).repeat_interleave(groups[1], -1)


def skinny_linear_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    weight_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: RMSNormParams | None = None,
    silu: bool = False,
    out_dtype: torch.dtype | None = None,
    groups: Groups | None = None,
    terms: RowTerms | None = None,
) -> torch.Tensor:
    """The reference, in float32: see `skinny_linear`."""
    out_dtype = out_dtype or x.dtype
    left, right = x.float(), weight.float()
    if norm is not None:
        left = rms_norm_torch(left, norm[0].float(), norm[1])
    if x_scale is not None:
        left = left * (x_scale.view(-1, 1) if groups is None else x_scale.repeat_interleave(groups[1], 1))
    if weight_scale is not None:
        right = right * (weight_scale.view(-1, 1) if groups is None else expand_scales(weight_scale, groups))
    y = F.linear(left, right, None if bias is None else bias.float())
    if terms is not None:
        y = y + sums_of_terms_torch(terms, left)
    if silu:
        y = silu_mul_torch(y)
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype)


def skinny_linear(
    x: torch.Tensor,  # [M, K], M <= 64: bf16 or fp16, or fp8 or int8 with x_scale
    weight: torch.Tensor,  # [N, K]: as x, or fp8 or int8 with weight_scale
    bias: torch.Tensor | None = None,  # [N]
    *,
    config: SkinnyConfig,
    weight_scale: torch.Tensor | None = None,  # [N] float32; with groups [N / groups[0], K / groups[1]]
    x_scale: torch.Tensor | None = None,  # [M] float32; with groups [M, K / groups[1]], rows next to each other
    residual: torch.Tensor | None = None,  # added to the result; contiguous
    norm: RMSNormParams | None = None,  # RMSNorm of x first; gemv only
    silu: bool = False,  # the weight is [gate; up]: silu(gate) * up, [M, N / 2]
    out_dtype: torch.dtype | None = None,  # default: that of x
    pdl: bool | None = None,  # start while the kernel before still runs; default: where the device can
    groups: Groups | None = None,
    terms: RowTerms | None = None,  # of adapters, added to the product; gemv only, at most MAX_FUSED_ROWS rows
) -> torch.Tensor:
    """The same bits for the same input every time; may be captured in a CUDA graph after `prepare_skinny_linear`."""
    if not use_triton(x):
        return skinny_linear_torch(
            x, weight, bias, weight_scale=weight_scale, x_scale=x_scale,
            residual=residual, norm=norm, silu=silu, out_dtype=out_dtype, groups=groups, terms=terms,
        )  # fmt: skip
    from quire.kernels.triton import skinny_linear as kernel

    dtype = out_dtype or x.dtype
    pdl = early_launch(x)["PDL"] if pdl is None else pdl
    return kernel.skinny_linear(
        x, weight, config, bias, weight_scale, x_scale, residual, norm, silu, dtype, pdl, groups, terms
    )  # fmt: skip


def prepare_skinny_linear(device: torch.device) -> None:
    """Allocate the kernels' workspace on a device; call it before a capture."""
    if supports_triton(device):
        from quire.kernels.triton.skinny_linear import SplitWorkspace

        SplitWorkspace.of(device)


def config_for(x: torch.Tensor, weight: torch.Tensor) -> SkinnyConfig | None:
    """The kernel measured to be the fastest for x times the weight; None: the library's, or ours lack these types."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    fits = (half and x.dtype == weight.dtype) or (weight.dtype in EIGHT_BITS and weight.is_contiguous())
    if not x.is_cuda or not fits or x.stride(-1) != 1:
        return None
    return choose(weight.element_size(), x.shape[0], weight.shape[1], weight.shape[0])


def can_fuse(weight: torch.Tensor) -> bool:
    """Whether a kernel exists that fuses RMSNorm, product and residual for few rows."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    eight = weight.dtype in EIGHT_BITS and weight.is_contiguous()
    return weight.is_cuda and (half or eight) and weight.shape[1] % 16 == 0


def fused_config_for(rows: int, weight: torch.Tensor) -> SkinnyConfig:
    return choose_fused(weight.element_size(), rows, weight.shape[1], weight.shape[0])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear, by the fastest kernel for the number of rows."""
    config = config_for(x, weight)
    return F.linear(x, weight, bias) if config is None else skinny_linear(x, weight, bias, config=config)
