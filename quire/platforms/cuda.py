"""Facts about a CUDA device."""

import torch

from quire.platforms.base import DTYPES


class CudaPlatform:
    name = "cuda"
    supports_triton = True
    supports_native = False
    has_own_memory = True
    launches_async = True
    default_max_num_seqs = 1024
    default_max_num_batched_tokens = 8192
    short_step_tokens = 0

    def __init__(self, device: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was requested, but torch finds no CUDA device; use 'cpu' or 'auto'")
        self.device = torch.device("cuda", torch.device(device).index or 0)  # memory queries insist on an index

    def prepare(self) -> list[str]:
        torch.cuda.set_device(self.device)
        return []

    def cores_to_pin(self) -> list[int]:
        return []

    def default_dtype(self, model_dtype: str | None) -> torch.dtype:
        dtype = DTYPES.get(model_dtype or "", torch.bfloat16)
        return torch.float16 if dtype is torch.bfloat16 and not self._has_bf16() else dtype

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype {dtype} is not supported on CUDA; allowed: {', '.join(DTYPES)}")
        if dtype is torch.bfloat16 and not self._has_bf16():
            name = torch.cuda.get_device_name(self.device)
            raise ValueError(f"{name} has no bfloat16; allowed: float16, float32")

    def check_fp8_cache(self, kv_cache_dtype: str) -> None:
        if torch.cuda.get_device_capability(self.device) < (8, 9):
            name = torch.cuda.get_device_name(self.device)
            raise ValueError(
                f"{name} has no fp8; allowed there: kv_cache_dtype auto, bfloat16 or float16 (if it is the model's), "
                "int8_per_token_head (--kv-cache-dtype)"
            )

    def _has_bf16(self) -> bool:
        return torch.cuda.get_device_capability(self.device)[0] >= 8

    def available_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]
