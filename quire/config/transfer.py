"""Options of KV-cache transfer."""

from dataclasses import dataclass

from quire.config.fields import option, validate


@dataclass
class TransferConfig:
    """KV-cache transfer."""

    kv_connector: str | None = option(None, "KV connector: noop, or your own class as module:Class")

    def __post_init__(self) -> None:
        validate(self)
