"""Options of LoRA adapters."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, validate

MAX_LORAS = 256
MAX_LORA_RANK = 512
EXPERTS = "experts"
ALL_LINEAR = "all-linear"


@dataclass
class LoRAConfig:
    """LoRA adapters."""

    enable_lora: bool = option(False, "let requests name adapters")
    max_loras: int = option(
        1, "adapters in device memory, which the requests of a step may use", minimum=1, maximum=MAX_LORAS
    )
    max_lora_rank: int = option(16, "the highest rank of an adapter", minimum=1, maximum=MAX_LORA_RANK)
    max_cpu_loras: int | None = option(
        None, "adapters kept in host memory, at least --max-loras; default: 16, or --max-loras if more", minimum=1
    )
    lora_dtype: str = option(
        "auto", "type of adapters' weights; auto: the model's", choices=("auto", "float16", "bfloat16", "float32")
    )
    lora_target_modules: tuple[str, ...] | None = option(
        None,
        f"last parts of the names of modules that take an adapter, as q_proj; default: all but {EXPERTS!r}, which take "
        f"as many times the memory; {ALL_LINEAR}: linear layers, not embedding and head (as embed_tokens, lm_head)",
        several="many",
    )
    fully_sharded_loras: bool = option(False, "accepted as vLLM's: each rank holds its part of an adapter either way")
    default_mm_loras: dict[str, Any] | None = option(
        None, "adapters by modality, as JSON; of no effect on prompts of text"
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}, max_loras {self.max_loras}; adapters in device memory are in "
                "host memory too, so at least as many must fit there (--max-cpu-loras)"
            )

    @property
    def num_host(self) -> int:
        """Adapters in host memory."""
        return self.max_cpu_loras or max(16, self.max_loras)

    @property
    def adapt_experts(self) -> bool:
        return EXPERTS in (self.lora_target_modules or ())

    def takes(self, module: str, vocabulary: bool = False) -> bool:
        """Whether a layer of this name in checkpoints takes an adapter. `vocabulary`: it is an embedding or a head."""
        named = self.lora_target_modules
        return named is None or module.rpartition(".")[2] in named or (not vocabulary and ALL_LINEAR in named)
