import torch

from quire.platforms import cpu_facts
from quire.platforms.base import DTYPES
from quire.platforms.cpuid import load_cpuid


class CpuPlatform:
    name = "cpu"
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2048

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._cpuid = load_cpuid()

    def prepare(self) -> list[str]:
        note = cpu_facts.cap_onednn_if_amx_is_broken(self._cpuid)
        torch.set_num_threads(cpu_facts.usable_cores())
        return [note] if note else []

    def default_dtype(self, model_dtype: str | None) -> torch.dtype:
        if model_dtype == "float32" or not cpu_facts.has_fast_bf16(self._cpuid):
            return torch.float32
        return torch.bfloat16

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype {dtype} is not supported on a CPU; allowed: {', '.join(DTYPES)}")

    def available_memory(self) -> int:
        return cpu_facts.available_memory()

    def synchronize(self) -> None:
        pass
