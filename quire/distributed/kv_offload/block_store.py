"""What a store of KV-cache blocks can do, and what it counts. A folder and Redis are stores; so can be any service that
takes many keys at once and reads into buffers it was told of."""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

Buffer: TypeAlias = memoryview  # of bytes, writable, one block of a rank: its pages, layer after layer

FORMAT = b"quire-kv-1"  # of what a block's bytes mean; another one is another key
LATENCIES = 512  # the last ones, of which percentiles are told
PERCENTILES = (50, 90, 99)
PERCENTILE_SECONDS = 1.0  # for which they are not computed again


class BlockStore(Protocol):
    """Every method may block, may be called from several threads, and raises nothing: what fails is a miss, counted
    in `stats`."""

    stats: "StoreStats"

    def register_buffers(self, memory: Buffer) -> None:
        """All buffers that will be given are parts of this; for stores that read and write memory by themselves."""
        ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the blocks could be read."""
        ...

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        """Fill the buffers. False for a block that is not there, or not as it was put: its buffer holds anything."""
        ...

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        """Keep the blocks. False for one that could not be kept; one that is there already is not written again."""
        ...

    def close(self) -> None: ...


class StoreKeys:
    """Keys of blocks in a store that engines share. A block's hash tells what it holds (`kv_fingerprint`); a key tells
    further which part of it one rank has, in which group, so no engine reads another layout's bytes."""

    def __init__(self, num_ranks: int, salt: bytes = b"") -> None:
        """Engines with another `salt` share nothing."""
        self.num_ranks = num_ranks
        self.salt = salt

    def key(self, block_hash: bytes, group: int, rank: int) -> bytes:
        return hashlib.sha256(
            b"%s %d %d %d %s " % (FORMAT, group, rank, self.num_ranks, self.salt) + block_hash
        ).digest()

    def of_all_ranks(self, block_hash: bytes, group: int) -> list[bytes]:
        return [self.key(block_hash, group, rank) for rank in range(self.num_ranks)]


@dataclass
class OperationStats:
    """One kind of call: how many blocks, how they went, how long calls took."""

    blocks: int = 0
    hits: int = 0  # found, or kept
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))

    def percentiles(self) -> dict[int, float]:
        """Seconds of a call."""
        found = sorted(self.latencies)
        return {p: found[min(len(found) - 1, len(found) * p // 100)] for p in PERCENTILES} if found else {}


class StoreStats:
    """Counted by the store's threads, read by anyone."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lookups, self.reads, self.writes = OperationStats(), OperationStats(), OperationStats()
        self.num_changes = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._percentiles: dict[str, float] = {}
        self._computed = -PERCENTILE_SECONDS

    @contextmanager
    def timed(self, operation: OperationStats, blocks: int) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            with self._lock:
                self.num_changes += 1
                operation.blocks += blocks
                operation.seconds += took
                operation.latencies.append(took)

    def add(self, operation: OperationStats, hits: int = 0, bytes: int = 0, errors: int = 0) -> None:
        with self._lock:
            self.num_changes += 1
            operation.hits += hits
            operation.bytes += bytes
            operation.errors += errors

    def summary(self) -> dict[str, float]:
        """Flat: `read_blocks`, `read_hits`, ..., `read_p99`, which is in seconds and of the last calls."""
        operations = {"lookup": self.lookups, "read": self.reads, "write": self.writes}
        with self._lock:
            now = self._clock()
            if now - self._computed >= PERCENTILE_SECONDS:
                self._computed = now
                self._percentiles = {
                    f"{name}_p{percent}": seconds
                    for name, operation in operations.items()
                    for percent, seconds in operation.percentiles().items()
                }
            numbers = dict(self._percentiles)
            for name, operation in operations.items():
                numbers[f"{name}_blocks"] = operation.blocks
                numbers[f"{name}_hits"] = operation.hits
                numbers[f"{name}_errors"] = operation.errors
                numbers[f"{name}_bytes"] = operation.bytes
                numbers[f"{name}_seconds"] = operation.seconds
        return numbers
