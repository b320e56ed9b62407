"""All options of an engine: one config object per concern, and their keyword arguments."""

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig
from quire.config.environment import option_defaults
from quire.config.fields import options
from quire.config.kv_events import EventsConfig
from quire.config.load import LoadConfig
from quire.config.logs import check_environment
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.observability import ObservabilityConfig
from quire.config.parallel import ParallelConfig
from quire.config.pooling import PoolingConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.config.transfer import TransferConfig
from quire.config.vllm.table import settle
from quire.config.vllm.unpack import unpack


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
    kv_events: EventsConfig = field(default_factory=EventsConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __getattr__(self, name: str) -> Any:
        """vLLM's names of the parts: `model_config` is `model`."""
        part = name.removesuffix("_config")
        if part == name or part not in self.parts():
            raise AttributeError(f"EngineConfig has no {name!r}; it has {', '.join(self.parts())}")
        return getattr(self, part)

    @staticmethod
    def parts() -> dict[str, type]:
        """Those whose fields are users' arguments and flags."""
        return {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "load": LoadConfig,
            "device": DeviceConfig,
            "parallel": ParallelConfig,
            "transfer": TransferConfig,
            "kv_events": EventsConfig,
            "speculative": SpeculativeConfig,
            "observability": ObservabilityConfig,
            "structured_outputs": StructuredOutputsConfig,
            "lora": LoRAConfig,
            "pooling": PoolingConfig,
        }

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """Build from flat vLLM-style arguments; an unknown one is an error that suggests the nearest. vLLM's that
        are no options here are handled as its table says."""
        known = {name: part for part, config in cls.parts().items() for name in options(config)}
        check_environment(bool(kwargs.pop("fail_on_environ_validation", False)))
        kwargs = option_defaults(known) | settle(unpack(kwargs), known)
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
