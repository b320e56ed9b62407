"""Options: one dataclass per concern, and EngineConfig, which holds them. Imports nothing else of Quire."""

from quire.config.cache import CacheConfig
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.scheduler import SchedulerConfig

VllmConfig = EngineConfig  # vLLM's name

__all__ = ["CacheConfig", "EngineConfig", "LoadConfig", "ModelConfig", "SchedulerConfig", "VllmConfig"]
