"""What the two sides of a KV connector tell each other: metadata with a plan, and what has ended with its results."""

from dataclasses import dataclass, field


class ConnectorMetadata:
    """Base class of what a connector's scheduler side sends its worker side with a plan. It may be pickled."""


@dataclass(slots=True)
class FailedMetadata(ConnectorMetadata):
    """A connector could not build its metadata: the plan fails, and with it the connector's transfers."""

    error: str


@dataclass(slots=True)
class FinishedTransfers:
    """Ids of requests whose transfers have ended since the last report of a connector."""

    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # request id -> why; nothing is read or written any more

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)


class ConnectorError(RuntimeError):
    """A connector raised on the worker's side: its transfers have ended, all of them."""

    def __init__(self, connector: int, message: str) -> None:
        super().__init__(connector, message)
        self.connector = connector  # its place in the list

    def __str__(self) -> str:
        return str(self.args[1])
