"""Options of logging, and of watching over the engine process."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, require_object, validate


@dataclass
class ObservabilityConfig:
    """Logging and health checks."""

    disable_log_stats: bool = option(False, "no log line about load and throughput every 10 s of a server's work")

    profiler_config: dict[str, Any] | None = option(
        None, 'what start_profile records, as JSON: {"profiler": "torch", "torch_profiler_dir": "FOLDER"}'
    )
    engine_heartbeat_timeout: float = option(
        30.0, "seconds without a heartbeat after which an engine process counts as stopped; 0: never", minimum=0
    )
    engine_stall_timeout: float = option(
        300.0, "seconds that one step may take before the engine counts as stuck; 0: any", minimum=0
    )
    engine_call_timeout: float = option(
        30.0, "timeout in seconds for calls to an engine, such as for its state", minimum=0.001
    )

    def __post_init__(self) -> None:
        require_object("profiler_config", self.profiler_config)
        validate(self)
