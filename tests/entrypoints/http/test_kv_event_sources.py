"""A server that publishes events of its KV cache says where."""

import httpx

from tests.core.test_kv_events import Subscriber
from tests.entrypoints.server_process import server_process

EVENTS = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"}'


def test_subscribers_find_their_way(tmp_path):
    with server_process(tmp_path, "--kv-events-config", EVENTS, "--disable-page") as server:
        (source,) = httpx.get(f"{server.url}/kv_event_sources").json().values()
        assert source["publisher"] == "zmq" and source["topic"] == "kv"
        subscriber = Subscriber(source)
        body = {"prompt": "The quick brown fox " * 10, "max_tokens": 2}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        (_, (_, (stored, *_), rank)), *_ = subscriber.replay(0)
        assert rank == 0 and stored["type"] == "BlockStored" and stored["block_size"] == 16
        assert len(stored["token_ids"]) == 16 * len(stored["block_hashes"]) > 0
        subscriber.close()
