"""Options: one dataclass per concern, and EngineConfig, which holds them. Imports nothing else of Quire."""

from quire.config.cache import CacheConfig
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.scheduler import SchedulerConfig

VllmConfig = EngineConfig  # vLLM's name

# vLLM's classes for arguments that are mappings here.
MAPPINGS = (
    "AttentionConfig",
    "CompilationConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "WeightTransferConfig",
)


def __getattr__(name: str) -> type[dict[str, object]]:
    if name in MAPPINGS:
        return dict
    raise AttributeError(f"module 'quire.config' has no attribute {name!r}")


__all__ = ["CacheConfig", "EngineConfig", "LoadConfig", "ModelConfig", "SchedulerConfig", "VllmConfig"]
