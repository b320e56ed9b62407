"""Facts about a CPU as the device."""

import torch

from quire.platforms import cpu_cores, cpu_facts, cpu_isa
from quire.platforms.base import DTYPES
from quire.platforms.cpuid import load_cpuid

SHORT_STEP_TOKENS = 1024  # for each thread; steps of fewer cost more of the host's work than the shorter wait is worth


class CpuPlatform:
    name = "cpu"
    supports_triton = False
    supports_native = True
    has_own_memory = False
    launches_async = False
    default_max_num_seqs = 256
    default_max_num_batched_tokens = 2048

    def __init__(self, threads: int | None = None, pin: bool = True) -> None:
        self.device = torch.device("cpu")
        self.threads = cpu_cores.choose_threads(threads)
        self.short_step_tokens = max(2, self.threads) * SHORT_STEP_TOKENS
        self._pin = pin
        self._claim: cpu_cores.Claim | None = None
        self._cpuid = load_cpuid()
        cpu_isa.ceiling()  # raise for an unknown one now, not while loading

    def prepare(self) -> list[str]:
        cpu_isa.limit_torch()
        cores = cpu_cores.physical_cores()
        notes = [
            cpu_facts.cap_onednn_if_amx_is_broken(self._cpuid),
            cpu_cores.stay_on_nodes(cores, cpu_cores.choose_cores(cores, self.threads)),
        ]
        torch.set_num_threads(self.threads)
        return [note for note in notes if note]

    def cores_to_pin(self) -> list[int]:
        """A CPU for each compute thread, if threads are to be pinned.

        Only if they fill all cores: with fewer, or under a CPU quota, the kernel places them better.
        """
        cores = cpu_cores.physical_cores()
        if not self._pin or self.threads < 2 or self.threads != len(cores) or self.threads != cpu_cores.usable_cores():
            return []
        cpus = [core.cpus[0] for core in cores]
        self._claim = self._claim or cpu_cores.Claim(cpus)
        return cpus if self._claim.granted else []

    def default_dtype(self, model_dtype: str | None) -> torch.dtype:
        if model_dtype == "float32" or not cpu_facts.has_fast_bf16(self._cpuid):
            return torch.float32
        return torch.bfloat16

    def check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES.values():
            raise ValueError(f"dtype {dtype} is not supported on a CPU; allowed: {', '.join(DTYPES)}")

    def check_fp8_cache(self, kv_cache_dtype: str) -> None:
        raise ValueError(
            f"kv_cache_dtype {kv_cache_dtype!r} needs a GPU; allowed on a CPU: auto, bfloat16 or float16 (if it is the "
            "model's), int8_per_token_head (--kv-cache-dtype)"
        )

    def available_memory(self) -> int:
        return cpu_facts.available_memory()
