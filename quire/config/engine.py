"""All options of an engine: one config object per concern, and their keyword arguments."""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig
from quire.config.environment import option_defaults
from quire.config.fields import options
from quire.config.load import LoadConfig
from quire.config.logs import warn_of_environment
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig
from quire.config.structured_outputs import StructuredOutputsConfig, backend_of
from quire.config.transfer import TransferConfig


@dataclass
class EngineConfig:
    """All options of an engine, one part per concern."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)

    @staticmethod
    def parts() -> dict[str, type]:
        return {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "load": LoadConfig,
            "device": DeviceConfig,
            "parallel": ParallelConfig,
            "transfer": TransferConfig,
            "speculative": SpeculativeConfig,
            "observability": ObservabilityConfig,
            "structured_outputs": StructuredOutputsConfig,
        }

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Build from flat vLLM-style arguments; an unknown one is an error that suggests the nearest."""
        kwargs = {name: value for name, value in kwargs.items() if not _is_unavailable(name, value)}
        kwargs |= backend_of(kwargs.pop("structured_outputs_config", None))
        known = {name: part for part, config in cls.parts().items() for name in options(config)}
        warn_of_environment()
        kwargs = option_defaults(known) | kwargs
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(sorted(known))}"
                raise ValueError(f"unknown engine argument {name!r}; {hint}")
        built = {
            part: config(**{n: v for n, v in kwargs.items() if known[n] == part})
            for part, config in cls.parts().items()
        }
        return cls(**built)

    def replace(self, **parts: Any) -> "EngineConfig":
        return dataclasses.replace(self, **parts)


# vLLM's arguments for features that Quire does not have yet: the neutral value, and the feature.
UNAVAILABLE: dict[str, tuple[Any, str]] = {
    "spec_method": (None, "speculative decoding"),
    "spec_model": (None, "speculative decoding"),
    "spec_tokens": (None, "speculative decoding"),
    "enable_lora": (False, "LoRA"),
    "runner": ("generate", "pooling models"),
    "compilation_config": (None, "compilation"),
}


def _is_unavailable(name: str, value: Any) -> bool:
    """Whether the argument can be dropped; ValueError if it requests a feature that is not available yet."""
    if name not in UNAVAILABLE:
        return False
    neutral, feature = UNAVAILABLE[name]
    if value != neutral:
        raise ValueError(f"{name}={value!r}: {feature} is not available yet; leave it out or pass {neutral!r}")
    return True
