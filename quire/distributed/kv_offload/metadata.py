"""What the two sides of the offloading connector tell each other."""

from dataclasses import dataclass, field

import numpy as np

from quire.messages.kv_transfer import ConnectorMetadata, ConnectorReport


@dataclass(slots=True, eq=False)
class CopyJob:
    """Blocks of the device's cache and slots of host memory, as many: copied one to one, either way."""

    number: int
    blocks: np.ndarray  # int64
    slots: np.ndarray  # int64
    request_id: str | None = None  # that waits for it


@dataclass(slots=True)
class OffloadMetadata(ConnectorMetadata):
    """Copies to start with a plan: saves first, since the plan or a load may overwrite their blocks."""

    saves: list[CopyJob] = field(default_factory=list)
    loads: list[CopyJob] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)  # saves whose blocks the plan overwrites
    ended: list[int] = field(default_factory=list)  # jobs whose end was reported, on which this plan relies


@dataclass(slots=True)
class OffloadReport(ConnectorReport):
    """Since the last one."""

    ended: tuple[int, ...] = ()  # jobs
    num_slots: int = 0  # that can be used by now
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
