"""Options of logging, and of watching over the engine process."""

from dataclasses import dataclass

from quire.config.environment import LOG_LEVELS
from quire.config.fields import option, validate


@dataclass
class ObservabilityConfig:
    """Logging and health checks."""

    log_level: str | None = option(None, "lowest level of log lines; default: INFO", choices=LOG_LEVELS)
    log_config_file: str | None = option(None, "JSON file that configures logging, for logging.config.dictConfig")
    disable_log_stats: bool = option(False, "no log line about load and throughput every 10 s of a server's work")

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
        validate(self)
