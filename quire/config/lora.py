"""Capacity for LoRA adapters."""

from dataclasses import dataclass

MAX_LORAS = 256
MAX_LORA_RANK = 512


@dataclass
class LoRAConfig:
    """LoRA adapters. Not flags yet: no adapter can be loaded from a checkpoint."""

    enable_lora: bool = False
    max_loras: int = 1  # adapters in device memory, which the requests of a step may use
    max_lora_rank: int = 16
    adapt_experts: bool = False  # experts too: their adapters take as many times the memory as there are experts

    def __post_init__(self) -> None:
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be between 1 and {most}")
