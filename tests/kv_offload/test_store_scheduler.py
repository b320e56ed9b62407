"""Lookups of a store connector's scheduler side: what counts as a store that hangs."""

import threading
from types import SimpleNamespace

import pytest

from quire.config.transfer import ConnectorConfig
from quire.distributed.kv_offload import store_scheduler
from quire.distributed.kv_offload.block_store import StoreStats
from quire.distributed.kv_offload.store_scheduler import LOOKUP_THREADS, StoreScheduler
from quire.messages.kv_cache import KVCacheConfig, KVCacheGroup
from tests.core.fake_engine import spec

LAYOUT = KVCacheConfig(64, (KVCacheGroup((0,), spec()),))


class SlowStore:
    """Answers once it is let go."""

    def __init__(self):
        self.stats, self.begun, self.goes_on = StoreStats(), threading.Semaphore(0), threading.Event()

    def contains(self, keys):
        self.begun.release()
        assert self.goes_on.wait(60)
        return [True] * len(keys)

    def close(self):
        pass


class Deadlines:
    """Pass when they are told to."""

    def __init__(self, seconds):
        self.seconds, self.waits = seconds, []
        self.add = self.waits.append

    def close(self):
        pass


@pytest.fixture
def connector(monkeypatch):
    monkeypatch.setattr(store_scheduler, "Deadlines", Deadlines)
    made = StoreScheduler(ConnectorConfig("store"), LAYOUT, SlowStore(), "disk", asynchronous=False, deadline=1000)
    made.asked_again = threading.Semaphore(0)
    made.bind_scheduler(lambda request_id: made.asked_again.release())
    yield made
    made._store.goes_on.set()
    made.close()


def request(name):
    size = LAYOUT.groups[0].spec.block_size
    return SimpleNamespace(request_id=name, num_tokens=2 * size + 1, num_cached=-1, block_hashes=[b"1" * 32, b"2" * 32])


def test_a_request_that_waits_too_long_for_its_lookup_does_not_close_the_store(connector):
    several = [request(str(i)) for i in range(LOOKUP_THREADS + 2)]
    assert [connector.get_num_new_matched_tokens(one, 0) for one in several] == [(None, True)] * len(several)
    for _ in range(LOOKUP_THREADS):
        assert connector._store.begun.acquire(timeout=60)
    connector._deadlines.waits[-1]()
    assert connector.get_num_new_matched_tokens(several[-1], 0) == (0, True)
    assert connector.stats().errors["lookup"] == 1 and not connector._breaker.is_open
    connector._store.goes_on.set()
    for _ in several:
        assert connector.asked_again.acquire(timeout=60)
    tokens = several[0].num_tokens - 1
    assert [connector.get_num_new_matched_tokens(one, 0) for one in several[:-1]] == [(tokens, True)] * 3


def test_a_call_that_takes_too_long_does(connector):
    connector.get_num_new_matched_tokens(request("0"), 0)
    assert connector._store.begun.acquire(timeout=60)
    connector._deadlines.seconds = 0
    connector._deadlines.waits[0]()
    assert connector._breaker.is_open
    assert connector.get_num_new_matched_tokens(request("1"), 0) == (0, False)  # not even asked
