"""KV-cache blocks in a real Redis: shared, stopped, slow, full. `make test-redis` installs one."""

import threading

import pytest

from quire.distributed.kv_offload.block_store import StoreKeys
from quire.distributed.kv_offload.circuit_breaker import CircuitBreaker
from quire.distributed.kv_offload.redis_store import PREFIX, RedisStore
from tests.distributed.redis_server import redis_server  # noqa: F401 - a fixture

SIZE = 8192
KEYS = [StoreKeys(1).key(bytes([i]) * 32, 0, 0) for i in range(8)]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def buffer(value=0):
    return memoryview(bytearray([value]) * SIZE)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(redis_server, clock):  # noqa: F811
    opened = RedisStore(redis_server.url, timeout=0.2, breaker=CircuitBreaker(clock=clock))
    opened._writes = CircuitBreaker(failures=1, clock=clock)
    yield opened
    opened.close()


def test_another_engine_reads_what_one_has_written(store, redis_server):  # noqa: F811
    other = RedisStore(redis_server.url, ttl=100)
    assert store.put(KEYS[:2], [buffer(1), buffer(2)]) == [True, True]
    assert other.contains(KEYS[:3]) == [True, True, False]
    found = [buffer(), buffer(), buffer()]
    assert other.get(KEYS[:3], found) == [True, True, False]
    assert bytes(found[1]) == b"\2" * SIZE
    other.put(KEYS[2:3], [buffer(3)])
    assert redis_server.client.ttl(PREFIX + KEYS[2]) > 0 and redis_server.client.ttl(PREFIX + KEYS[0]) == -1
    other.close()


def test_damaged_values_are_misses_and_deleted(store, redis_server):  # noqa: F811
    store.put(KEYS[:2], [buffer(1), buffer(2)])
    redis_server.client.setrange(PREFIX + KEYS[0], 100, b"x")
    redis_server.client.set(PREFIX + KEYS[1], b"short")
    assert store.get(KEYS[:2], [buffer(), buffer()]) == [False, False]
    assert store.contains(KEYS[:2]) == [False, False] and store.stats.reads.errors == 2


def test_a_stopped_server_is_left_alone_and_found_again(store, redis_server, clock, caplog):  # noqa: F811
    store.put(KEYS[:1], [buffer(1)])
    redis_server.stop()
    for _ in range(5):
        assert store.contains(KEYS[:2]) == [False, False]
        assert store.get(KEYS[:1], [buffer()]) == [False] and store.put(KEYS[:1], [buffer(1)]) == [False]
    assert store._breaker.is_open and caplog.text.count("does not answer") == 1
    errors = store.stats.lookups.errors
    redis_server.start()
    assert store.contains(KEYS[:1]) == [False] and store.stats.lookups.errors == errors + 1  # not asked
    clock.now = 100
    assert store.contains(KEYS[:1]) == [False] and not store._breaker.is_open  # a new server, which is empty
    assert store.put(KEYS[:1], [buffer(1)]) == [True] and store.contains(KEYS[:1]) == [True]


def test_a_slow_server_is_a_miss(store, redis_server, clock):  # noqa: F811
    store.put(KEYS[:1], [buffer(1)])
    redis_server.client.client_pause(60_000, all=True)
    for _ in range(3):
        assert store.get(KEYS[:1], [buffer()]) == [False]
    assert store._breaker.is_open
    assert store.stats.reads.percentiles()[50] < 30  # its own timeout, not the server's pause
    assert store.contains(KEYS[:1]) == [False]


def test_a_full_server_is_still_read(store, redis_server, clock, caplog):  # noqa: F811
    store.put(KEYS[:1], [buffer(1)])
    redis_server.client.config_set("maxmemory-policy", "noeviction")
    redis_server.client.config_set("maxmemory", "1")
    assert store.put(KEYS[1:3], [buffer(2), buffer(3)]) == [False, False]
    assert store.put(KEYS[1:3], [buffer(2), buffer(3)]) == [False, False]  # not even sent
    assert caplog.text.count("refuses KV-cache blocks") == 1
    assert store.get(KEYS[:1], [buffer()]) == [True]
    redis_server.client.config_set("maxmemory", "0")
    clock.now = 100
    assert store.put(KEYS[1:2], [buffer(2)]) == [True]


def test_many_threads_share_its_connections(store):
    results = []

    def work(i):
        store.put([KEYS[i]], [buffer(i)])
        found = buffer(99)
        results.append(store.get([KEYS[i]], [found]) == [True] and bytes(found) == bytes([i]) * SIZE)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_a_url_that_is_none():
    pytest.importorskip("redis")
    with pytest.raises(ValueError, match="redis://"):
        RedisStore("http://user:secret@host")
    with pytest.raises(ValueError, match="redis://") as refused:
        RedisStore("user:secret@host")
    assert "secret" not in str(refused.value)


def test_the_circuit_breaker_waits_ever_longer():
    clock = Clock()
    breaker = CircuitBreaker(failures=2, first=1, longest=3, clock=clock)
    assert not breaker.failed() and breaker.allows()
    assert breaker.failed() and not breaker.allows()
    for pause in (1, 2, 3, 3):
        clock.now += pause - 0.5
        assert not breaker.allows()
        clock.now += 0.5
        assert breaker.allows() and not breaker.allows()  # one tries
        assert not breaker.failed()
    clock.now += 3
    assert breaker.allows() and breaker.succeeded() and breaker.allows() and not breaker.is_open
