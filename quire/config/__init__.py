"""One dataclass per concern, one EngineConfig that holds them. Imports nothing of Quire and nothing heavy."""

from quire.config.cache import CacheConfig
from quire.config.engine import EngineConfig
from quire.config.load import LoadConfig
from quire.config.model import ModelConfig
from quire.config.scheduler import SchedulerConfig

__all__ = ["CacheConfig", "EngineConfig", "LoadConfig", "ModelConfig", "SchedulerConfig"]
