"""Events of the KV cache: what is published, and that subscribers written for vLLM 0.32 read it."""

import threading

import msgspec
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.config.kv_events import EventsConfig
from quire.distributed.kv_event_recorder import KVEventRecorder
from quire.distributed.kv_events import END_OF_REPLAY, ZmqEventPublisher
from quire.messages.kv_cache import FullAttentionSpec, KVCacheGroup
from quire.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from tests.core.fake_engine import FakeEngine
from tests.tiny_models import make_reference

ONE = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
GROUPS = (KVCacheGroup((0,), FullAttentionSpec(4, 1, 8, "float32")),)


class Subscriber:
    """As vLLM's example subscribes, asks for what it missed and decodes, with untyped messages."""

    def __init__(self, source):
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.connect(source["endpoint"].replace("0.0.0.0", "127.0.0.1"))
        self.events.setsockopt_string(zmq.SUBSCRIBE, source["topic"])
        self.requests = self.context.socket(zmq.DEALER)
        if source["replay_endpoint"]:
            self.requests.connect(source["replay_endpoint"].replace("0.0.0.0", "127.0.0.1"))

    def next(self):
        assert self.events.poll(60_000), "nothing is published"
        topic, number, payload = self.events.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def replay(self, start):
        self.requests.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while True:
            assert self.requests.poll(60_000), "no replay"
            _, _, number, payload = self.requests.recv_multipart()
            if number == END_OF_REPLAY:
                return found
            found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))

    def close(self):
        self.context.destroy(linger=0)


def options(**given):
    return EventsConfig(
        {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"} | given
    ).events


def source_of(publisher):
    return msgspec.to_builtins(publisher.source)


def batch(number):
    return KVEventBatch(float(number), [AllBlocksCleared()])


def recorded(**arguments):
    """An engine without a device, and what it publishes."""
    engine, published = FakeEngine(**arguments), []
    kv = engine.scheduler.kv
    kv.events = KVEventRecorder(GROUPS, lambda batch: published.extend(batch.events))
    kv.pool.on_evict.append(kv.events.removed)
    return engine, published


def test_blocks_are_stored_in_runs_and_removed_one_by_one():
    engine, published = recorded(num_blocks=8)
    engine.add("a", range(10, 23), max_tokens=4)
    engine.run()
    first = published[0]
    assert isinstance(first, BlockStored) and first.parent_block_hash is None
    assert first.token_ids == list(range(10, 22)) and len(first.block_hashes) == 3
    assert (first.block_size, first.medium, first.group_idx) == (4, "GPU", 0)
    assert first.kv_cache_spec_kind == "full_attention" and first.extra_keys is None
    second = published[1]
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids[0] == 22
    published.clear()
    engine.add("b", range(50, 78), max_tokens=4)  # needs all blocks
    engine.run()
    removed = {
        block_hash for event in published if isinstance(event, BlockRemoved) for block_hash in event.block_hashes
    }
    assert removed >= {*first.block_hashes, *second.block_hashes}
    engine.scheduler.reset_prefix_cache()
    assert isinstance(published[-1], AllBlocksCleared)


def test_what_is_stored_and_not_removed_is_what_the_pool_holds():
    engine, published = recorded(num_blocks=12)
    for i in range(12):
        engine.add(str(i), [*range(8), *range(100 * i, 100 * i + 5 * (i % 3) + 1)], max_tokens=5)
        engine.run()
    held = set()
    for event in published:
        if isinstance(event, BlockStored):
            assert not held & set(event.block_hashes)
            held |= set(event.block_hashes)
        else:
            held -= set(event.block_hashes)
    assert len(held) == engine.scheduler.kv.pool.num_cached > 0


def test_numbers_replay_and_topic():
    publisher = ZmqEventPublisher(options(buffer_steps=3, topic="kv"), 0)
    subscriber = Subscriber(source_of(publisher))
    seen = []
    while not seen:  # a subscription takes a while to arrive
        publisher.publish(batch(0))
        if subscriber.events.poll(20):
            seen.append(subscriber.next())
    topic, number, (_, events, rank) = seen[0]
    assert topic == b"kv" and rank == 0 and events == [{"type": "AllBlocksCleared"}]
    for i in range(5):
        publisher.publish(batch(i))
    numbers = [number]
    while subscriber.events.poll(200):
        numbers.append(subscriber.next()[1])
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    kept = subscriber.replay(0)
    assert [number for number, _ in kept] == numbers[-3:], "the last three"
    assert [number for number, _ in subscriber.replay(numbers[-1])] == numbers[-1:]
    subscriber.close()
    publisher.close()


def test_whoever_comes_late_gets_everything():
    """More than the messages that a socket queues by itself, also beside one that asks and never reads."""
    publisher = ZmqEventPublisher(options())
    count = 8_000
    for _ in range(count):
        publisher.publish(KVEventBatch(0.0, []))
    hung, late = Subscriber(source_of(publisher)), Subscriber(source_of(publisher))
    for _ in range(50):
        hung.requests.send_multipart((b"", bytes(8)))
    while not late.replay(count - 1):
        pass  # all are published
    assert [number for number, _ in late.replay(0)] == list(range(count))
    for subscriber in (hung, late):
        subscriber.close()
    publisher.close()


def test_nothing_waits_for_a_publisher_that_is_behind():
    publisher = ZmqEventPublisher(options(max_queue_size=4), 0)
    gate = threading.Event()
    publisher._send = lambda *_: gate.wait()
    for i in range(20):
        publisher.publish(batch(i))
    assert publisher.num_dropped >= 11, "one is being sent, or some of them, and four wait"
    gate.set()
    publisher.close()


@pytest.mark.parametrize("socket", ["events", "requests"])
def test_whoever_sends_too_much_is_disconnected(socket):
    publisher = ZmqEventPublisher(options(), 0)
    subscriber, source = Subscriber(source_of(publisher)), source_of(publisher)
    intruder = subscriber.context.socket({"events": zmq.XSUB, "requests": zmq.DEALER}[socket])
    disconnected = intruder.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    place = source["endpoint" if socket == "events" else "replay_endpoint"]
    intruder.connect(place.replace("0.0.0.0", "127.0.0.1"))
    intruder.send(b"\1" * (1 << 13))  # a topic to subscribe, or a number to replay from
    assert disconnected.poll(60_000)
    intruder.close(0)
    publisher.publish(KVEventBatch(1.0, [AllBlocksCleared()]))
    assert [number for number, _ in subscriber.replay(0)] == [0]
    subscriber.close()
    publisher.close()


def test_port_0_is_bound_on_any_address():
    publisher = ZmqEventPublisher(options(endpoint="tcp://127.0.0.1:0"), 0)
    subscriber = Subscriber(source_of(publisher))
    publisher.publish(KVEventBatch(1.0, [AllBlocksCleared()]))
    assert [number for number, _ in subscriber.replay(0)] == [0]
    host, _, port = publisher.source.endpoint.rpartition(":")
    assert host == "tcp://127.0.0.1" and int(port) > 0
    subscriber.close()
    publisher.close()


def test_addresses_that_cannot_be_had():
    publisher = ZmqEventPublisher(options(replay_endpoint=None), 0)
    with pytest.raises(ValueError, match="cannot be published at"):
        ZmqEventPublisher(options(endpoint=publisher.source.endpoint.replace("0.0.0.0", "*")), 0)
    publisher.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enabled": True}, "allowed: enable_kv_cache_events"),
        ({"hwm": "many"}, "hwm is 'many'; it must be a whole number"),
        ({"buffer_steps": 0}, "at least 1"),
        ({"publisher": "kafka"}, "allowed: zmq, null"),
        ({"endpoint": "5557"}, "tcp://"),
        ({"endpoint": "tcp://*:99999"}, "a port is at most 65535"),
    ],
)
def test_wrong_options(given, message):
    with pytest.raises(ValueError, match=message):
        EventsConfig(given)


def test_each_data_parallel_rank_has_ports_of_its_own():
    given = options(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/replay")
    assert given.of_rank(2).endpoint == "tcp://*:5559" and given.of_rank(2).replay_endpoint == "ipc:///tmp/replay_dp2"
    assert options().of_rank(1).endpoint == "tcp://*:0"


def test_an_engine_publishes_what_it_computes(tmp_path):
    reference = make_reference("llama", tmp_path)
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
    arguments = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 16}
    with LLM(reference.path, skip_tokenizer_init=True, kv_events_config=events, **arguments) as llm:
        core = llm.llm_engine.client.core
        (source,) = core.kv_event_sources().values()
        subscriber = Subscriber(source)
        llm.generate([list(range(40))], ONE, use_tqdm=False)
        (_, (_, (stored, *_), _)), *_ = subscriber.replay(0)
        assert stored["type"] == "BlockStored" and stored["token_ids"] == list(range(32))
        assert all(0 <= block_hash < 1 << 64 for block_hash in stored["block_hashes"])
        llm.reset_prefix_cache()
        last = []
        while not last or last[-1][1][1] != [{"type": "AllBlocksCleared"}]:
            last = subscriber.replay(0)
        subscriber.close()
