"""KV-cache blocks in Redis or Valkey, which engines on any machine may share."""

import functools
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

from quire.distributed.kv_offload.block_store import Buffer, OperationStats, StoreStats
from quire.distributed.kv_offload.circuit_breaker import CircuitBreaker

logger = logging.getLogger("quire")

PREFIX = b"quire:kv:"
CHECKSUM_BYTES = 4
BATCH_BYTES = 16 << 20  # of one command; others are served between two
Result = TypeVar("Result")


class RedisStore:
    """A server that is gone, slow or full is a miss: after a few failures it is left alone for a while. It should evict
    by itself (maxmemory with allkeys-lru), or blocks should have a time to live."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 1.0,
        ttl: float | None = None,
        max_connections: int = 8,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        """`timeout`: of connecting, and of an answer, in seconds. `ttl`: seconds that a block is kept."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError:
            raise ValueError("a KV cache in Redis needs its client: pip install 'quire[redis]'") from None
        try:
            pool = redis.BlockingConnectionPool.from_url(
                url,
                max_connections=max_connections,
                timeout=timeout,  # for a connection of the pool
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),  # whoever waits would rather compute
            )
        except (ValueError, AttributeError):  # whose text may have a part of the password
            raise ValueError(
                "the url of Redis must be redis://[[user]:password@]host[:port][/database], rediss://... or unix://path"
            ) from None
        self.stats = StoreStats()
        self._client = redis.Redis(connection_pool=pool)
        self._errors: tuple[type[Exception], ...] = (redis.RedisError, OSError)
        self._ttl_ms = None if ttl is None else int(ttl * 1000)
        self._breaker = breaker or CircuitBreaker()
        self._writes = CircuitBreaker(failures=1)  # a full server is still read from

    def register_buffers(self, memory: Buffer) -> None: ...

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        stats = self.stats
        with stats.timed(stats.lookups, len(keys)):
            found = self._call(stats.lookups, lambda: self._exist(keys)) or [False] * len(keys)
        stats.add(stats.lookups, hits=sum(found))
        return found

    def get(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        stats, found = self.stats, [False] * len(keys)
        with stats.timed(stats.reads, len(keys)):
            for part in _batches(buffers):
                names = [PREFIX + key for key in keys[part]]
                answers = self._call(stats.reads, functools.partial(self._client.mget, names))
                values = cast("list[bytes | None] | None", answers)  # texts come only if a client asks for them
                for i, value in enumerate(values or (), part.start):
                    found[i] = value is not None and self._fill(buffers[i], value, names[i - part.start])
        stats.add(stats.reads, hits=sum(found), bytes=sum(len(b) for hit, b in zip(found, buffers, strict=True) if hit))
        return found

    def put(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        stats, kept = self.stats, [False] * len(keys)
        with stats.timed(stats.writes, len(keys)):
            for part in _batches(buffers):
                if not self._writes.allows():
                    stats.add(stats.writes, errors=part.stop - part.start)
                    continue
                sent = None
                try:
                    sent = self._call(stats.writes, functools.partial(self._set, keys[part], buffers[part]))
                finally:
                    if sent is None:
                        self._writes.failed()
                kept[part] = sent or [False] * (part.stop - part.start)
        stats.add(stats.writes, hits=sum(kept))
        return kept

    def close(self) -> None:
        self._client.close()
        self._client.connection_pool.disconnect()

    def _exist(self, keys: Sequence[bytes]) -> list[bool]:
        with self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(PREFIX + key)
            return [bool(found) for found in pipe.execute()]

    def _set(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[bool]:
        """Those that are not there yet; the bytes of a key never change."""
        names = [PREFIX + key for key in keys]
        there = self._exist(keys)
        missing = [i for i, found in enumerate(there) if not found]
        with self._client.pipeline(transaction=False) as pipe:
            for i in missing:
                value = b"".join((buffers[i], _checksum(buffers[i])))
                pipe.set(names[i], value, px=self._ttl_ms)
            answers = pipe.execute(raise_on_error=False)
        for i, answer in zip(missing, answers, strict=True):
            there[i] = answer is True
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            self.stats.add(self.stats.writes, errors=len(refused))
            if self._writes.failed():
                logger.warning(
                    "Redis refuses KV-cache blocks (%s); they are kept nowhere until it takes them", refused[0]
                )
        elif self._writes.succeeded():
            logger.info("Redis takes KV-cache blocks again")
        self.stats.add(self.stats.writes, bytes=sum(len(buffers[i]) for i in missing if there[i]))
        return there

    def _fill(self, buffer: Buffer, value: bytes, name: bytes) -> bool:
        if len(value) != len(buffer) + CHECKSUM_BYTES:
            right = False
        else:
            buffer[:] = value[:-CHECKSUM_BYTES]
            right = _checksum(buffer) == value[-CHECKSUM_BYTES:]
        if not right:
            self.stats.add(self.stats.reads, errors=1)
            self._call(self.stats.reads, lambda: self._client.delete(name))
        return right

    def _call(self, operation: OperationStats, call: Callable[[], Result]) -> Result | None:
        """None if the server does not answer, or did not before."""
        if not self._breaker.allows():
            self.stats.add(operation, errors=1)
            return None
        try:
            result = call()
        except self._errors as error:
            self.stats.add(operation, errors=1)
            if self._breaker.failed():
                logger.warning("Redis does not answer (%s); the KV cache is computed without it", error)
            return None
        except BaseException:
            self._breaker.failed()
            raise
        if self._breaker.succeeded():
            logger.info("Redis answers again")
        return result


def _batches(buffers: Sequence[Buffer]) -> Iterator[slice]:
    start = size = 0
    for i, buffer in enumerate(buffers):
        if size and size + len(buffer) > BATCH_BYTES:
            yield slice(start, i)
            start, size = i, 0
        size += len(buffer)
    if start < len(buffers):
        yield slice(start, len(buffers))


def _checksum(buffer: Buffer) -> bytes:
    return zlib.crc32(buffer).to_bytes(CHECKSUM_BYTES, "little")
