"""What the two sides of a KV connector tell each other: metadata with a plan, and what has ended with its results."""

from dataclasses import dataclass, field

import msgspec


class ConnectorMetadata:
    """Base class of what a connector's scheduler side sends its worker side with a plan. It may be pickled."""


@dataclass(slots=True)
class FailedMetadata(ConnectorMetadata):
    """A connector could not build its metadata: the plan fails, and with it the connector's transfers."""

    error: str


class ConnectorReport:
    """Base class of what a connector's worker side tells its scheduler side with results. It may be pickled."""


@dataclass(slots=True)
class FinishedTransfers:
    """Ids of requests whose transfers have ended since the last report of a connector."""

    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)  # request id -> why; nothing is read or written any more
    reports: tuple[ConnectorReport, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed or self.reports)

    def with_later(self, later: "FinishedTransfers") -> "FinishedTransfers":
        return FinishedTransfers(
            self.sent + later.sent,
            self.received + later.received,
            self.failed | later.failed,
            self.reports + later.reports,
        )


class TierStats(msgspec.Struct):
    """What a connector keeps beside the device's cache, since the start."""

    tier: str  # its name in metrics: "cpu", "disk", ...
    queries: int = 0  # tokens that it was asked for: those of requests that the device did not have
    hits: int = 0  # of these, the tokens that were loaded
    restored: int = 0  # of the tokens loaded, those of requests that had been preempted
    blocks: int = 0  # held now
    capacity: int = 0  # that fit, 0: unknown
    saved_blocks: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    evicted_blocks: int = 0  # for others
    dropped_blocks: dict[str, int] = {}  # not saved, by reason
    errors: dict[str, int] = {}  # of a store, by what it was to do: lookup, load, save
    latencies: dict[str, dict[int, float]] = {}  # likewise, percentiles of its last calls in seconds
    waits: int = 0  # blocks that were overwritten while they were being saved: their plans had to wait


class ConnectorError(RuntimeError):
    """A connector raised on the worker's side: its transfers have ended, all of them."""

    def __init__(self, connector: int, message: str) -> None:
        super().__init__(connector, message)
        self.connector = connector  # its place in the list

    def __str__(self) -> str:
        return str(self.args[1])
