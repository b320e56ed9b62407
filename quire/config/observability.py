from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class ObservabilityConfig:
    """What the engine tells about itself."""

    disable_log_stats: bool = option(False, "no log line about load and throughput every 10 s of a server's work")

    def __post_init__(self) -> None:
        validate(self)
