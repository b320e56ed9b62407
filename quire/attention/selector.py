"""Which attention kernels a model uses, and why."""

from collections.abc import Sequence

import torch

from quire.attention.base import AttentionBackend
from quire.attention.native import NativeBackend
from quire.attention.torch import TorchBackend
from quire.kernels import native
from quire.kernels.paged_attention import AttentionShape
from quire.platforms.base import Platform

BACKENDS = ("torch", "native", "triton")
MAX_TRITON_HEAD_SIZE, MAX_TRITON_GROUP = 256, 128  # more would not fit the registers of a program
MAX_TRITON_ROWS = 65_535  # of a dimension of the launch grid


def cache_dtype(platform: Platform, dtype: torch.dtype, kv_cache_dtype: str) -> torch.dtype:
    """The dtype in which keys and values are stored."""
    if kv_cache_dtype == "auto":
        return dtype
    platform.check_fp8_cache(kv_cache_dtype)
    return torch.float8_e4m3fn


def choose_backend(
    platform: Platform,
    dtype: torch.dtype,
    shapes: Sequence[AttentionShape],
    max_rows: int,
    requested: str | None = None,
    kv_cache_dtype: str = "auto",
) -> tuple[AttentionBackend, str]:
    """The backend and one sentence that says why it was chosen. `shapes` are those of all layers."""
    if requested is not None and requested not in BACKENDS:
        raise ValueError(f"unknown attention backend {requested!r}; allowed: {', '.join(BACKENDS)}")
    if requested == "triton" and not platform.supports_triton:
        raise ValueError("attention backend 'triton' needs a GPU; allowed on a CPU: native, torch")
    lacking = native_needs(platform, dtype, shapes)
    if requested == "native" and lacking is not None:
        raise ValueError(f"attention backend 'native' needs {lacking}; allowed here: torch")
    if requested == "torch" and kv_cache_dtype != "auto":
        raise ValueError(f"attention backend 'torch' has no kv_cache_dtype {kv_cache_dtype!r}; allowed: auto")
    # In float32 torch's own products are faster than our C kernels.
    on_cpu = "native" if lacking is None and dtype is torch.bfloat16 else "torch"
    name = requested or ("triton" if platform.supports_triton else on_cpu)
    sizes = " and ".join(map(str, sorted({shape.head_size for shape in shapes})))
    served = f"{platform.name}, {str(dtype).removeprefix('torch.')} and head size {sizes}"
    why = f"attention backend {name}: {'it was requested' if requested else f'it serves {served}'}."
    if name == "torch":
        if requested is None and lacking is not None:
            why = f"{why[:-1]}; native needs {lacking}."
        return TorchBackend(), why
    if name == "native":
        return NativeBackend(shapes), why
    for shape in shapes:
        if shape.head_size > MAX_TRITON_HEAD_SIZE or shape.group > MAX_TRITON_GROUP:
            raise ValueError(
                f"attention backend 'triton' has no heads of {shape.head_size} with {shape.group} to a KV head: the "
                f"most are {MAX_TRITON_HEAD_SIZE} and {MAX_TRITON_GROUP}; allowed here: torch "
                "(--attention-backend torch)"
            )
    if max_rows > MAX_TRITON_ROWS:
        raise ValueError(f"max_num_seqs is {max_rows}; on a GPU at most {MAX_TRITON_ROWS} are allowed (--max-num-seqs)")
    from quire.attention.triton import TritonBackend

    return TritonBackend(max_rows, shapes, dtype, platform.device), why


def native_needs(platform: Platform, dtype: torch.dtype, shapes: Sequence[AttentionShape]) -> str | None:
    """What the C kernels lack to be used here; None: nothing."""
    if not platform.supports_native:
        return "a CPU"
    if dtype not in native.TYPES:
        return "float32 or bfloat16"
    if native.library() is None:
        return "a C compiler"
    if not all(native.attention_fits(s.num_heads, s.num_kv_heads, s.head_size) for s in shapes):
        return "heads of at most 256, and at most 192 of them to a KV head"
    return None
