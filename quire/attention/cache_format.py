"""How keys and values are stored: in the model's precision, or quantized, by the option and the checkpoint."""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from quire.platforms.base import Platform

logger = logging.getLogger("quire")

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class CacheFormat:
    """Numbers of the cache, and whether each token and head has a scale beside them."""

    dtype: torch.dtype
    by_token: bool = False
    name: str = ""  # for the log; empty: not quantized

    @property
    def has_layer_scales(self) -> bool:
        """Whether a layer's scales are those of the checkpoint."""
        return self.dtype is FP8 and not self.by_token


QUANTIZED = {
    "fp8": CacheFormat(FP8, name="fp8"),
    "fp8_e4m3": CacheFormat(FP8, name="fp8"),
    "fp8_per_token_head": CacheFormat(FP8, by_token=True, name="fp8 (a scale per token and head)"),
    "int8_per_token_head": CacheFormat(torch.int8, by_token=True, name="int8 (a scale per token and head)"),
}


def cache_format(
    platform: Platform, dtype: torch.dtype, kv_cache_dtype: str, hf_config: dict[str, Any] | None = None
) -> CacheFormat:
    """`dtype`: the model's. With "auto" a checkpoint made for a cache in fp8 gets one, where the platform has fp8."""
    if kv_cache_dtype == "auto":
        return _checkpoint_format(platform, hf_config or {}) or CacheFormat(dtype)
    if kv_cache_dtype not in QUANTIZED:
        model = str(dtype).removeprefix("torch.")
        if kv_cache_dtype != model:
            own = () if dtype is torch.float32 else (model,)  # which is no choice: "auto"
            raise ValueError(
                f"kv_cache_dtype is {kv_cache_dtype!r}, but the model is in {model}; allowed: "
                f"{', '.join(('auto', *own, *QUANTIZED))} (--kv-cache-dtype)"
            )
        return CacheFormat(dtype)
    chosen = QUANTIZED[kv_cache_dtype]
    if chosen.dtype is FP8:
        platform.check_fp8_cache(kv_cache_dtype)
    return chosen


def _checkpoint_format(platform: Platform, hf_config: dict[str, Any]) -> CacheFormat | None:
    scheme = checkpoint_scheme(hf_config)
    if scheme is None:
        return None
    if scheme != "fp8":
        logger.warning(
            "the checkpoint was made for a KV cache of %s, which is not supported; the cache is not quantized", scheme
        )
        return None
    try:
        platform.check_fp8_cache("fp8")
    except ValueError as error:
        logger.info("the checkpoint was made for a KV cache in fp8; the cache is not quantized: %s", error)
        return None
    return QUANTIZED["fp8"]


def checkpoint_scheme(hf_config: dict[str, Any]) -> str | None:
    """The KV cache that the checkpoint's quantization_config asks for: "fp8", or what is not supported; None: none."""
    stored = hf_config.get("quantization_config") or hf_config.get("compression_config") or {}
    inner = stored.get("quantization") or {}
    places = [place for place in (inner, stored) if isinstance(place, dict)]
    found = [place.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo") for place in places]
    scheme = next((each for each in found if each), None)
    if isinstance(scheme, str):
        return "fp8" if scheme.lower() in ("fp8", "fp8_e4m3") else None if scheme.lower() == "none" else scheme
    if isinstance(scheme, dict):
        strategy = scheme.get("strategy") or "tensor"
        kind = (scheme.get("type"), scheme.get("num_bits"), bool(scheme.get("dynamic")), strategy)
        return "fp8" if kind == ("float", 8, False, "tensor") else f"the kind {scheme}"
    return None
