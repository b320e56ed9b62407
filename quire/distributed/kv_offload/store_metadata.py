"""What the two sides of a store connector tell each other."""

from dataclasses import dataclass, field

from quire.distributed.kv_offload.block_keys import BlockKey
from quire.messages.kv_transfer import ConnectorMetadata, ConnectorReport


@dataclass(slots=True)
class BlockJob:
    """Blocks of the device's cache, and what their contents are named."""

    number: int
    blocks: list[int]
    keys: list[BlockKey]
    salt: bytes
    request_id: str | None = None  # that waits for it to be loaded; None: to be saved


@dataclass(slots=True)
class StoreMetadata(ConnectorMetadata):
    """Saves are copied off the device first, since the plan or a load may overwrite their blocks."""

    saves: list[BlockJob] = field(default_factory=list)
    loads: list[BlockJob] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)  # saves whose blocks the plan overwrites
    ended: list[int] = field(default_factory=list)  # saves whose end was reported


@dataclass(slots=True)
class StoreReport(ConnectorReport):
    """Since the last one, but for `store`."""

    ended: tuple[int, ...] = ()  # saves whose blocks are copied
    dropped: int = 0  # blocks that were not saved: the store is too slow
    lost: list[BlockKey] = field(default_factory=list)  # could not be read: the store has them no longer
    store: dict[str, float] = field(default_factory=dict)  # StoreStats.summary(), since the start
