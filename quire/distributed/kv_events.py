"""Publishes events about the KV cache over ZMQ, with a replay of the last ones."""

import logging
import threading
import time
from collections import deque
from dataclasses import replace

import msgspec
import zmq

from quire.config.kv_events import KVEventsOptions
from quire.messages.kv_events import KVEventBatch

logger = logging.getLogger("quire")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
REPLAY_POLL = 0.05  # seconds; how long a request for a replay may wait
MAX_REPLAYS = 16  # at a time: whoever asks without end must not keep events from others
MAX_RECEIVED = 1 << 12  # bytes of a message; whoever sends more is disconnected, as anybody may who reaches the port
LAST_SECONDS = 1.0  # in which what is queued is sent at the end


class ZmqEventPublisher:
    """A message is (topic, sequence number, batch). `publish` never waits: where the queue is full its oldest batch is
    dropped and counted, which subscribers see by a gap in the numbers."""

    def __init__(self, options: KVEventsOptions, data_parallel_rank: int = 0) -> None:
        """A ValueError says which address cannot be had. An address with a wildcard is bound, another connected to."""
        self.rank = data_parallel_rank
        self.num_dropped = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = options.topic.encode()
        self._queue: deque[tuple[int, KVEventBatch]] = deque()
        self._max_queued = options.max_queue_size
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=options.buffer_steps)
        self._ready = threading.Condition()
        self._closed = False
        self._context = zmq.Context()
        options = options.of_rank(data_parallel_rank)
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(options.hwm)
        self._publisher.maxmsgsize = MAX_RECEIVED
        self._replays = self._context.socket(zmq.ROUTER) if options.replay_endpoint else None
        if self._replays is not None:
            self._replays.maxmsgsize = MAX_RECEIVED
            self._replays.sndhwm = (
                options.buffer_steps + 1
            )  # a whole replay: what is too much would be dropped silently
        try:
            endpoint = _open(self._publisher, options.endpoint)
            replay = (
                _open(self._replays, options.replay_endpoint) if self._replays and options.replay_endpoint else None
            )
        except ValueError:
            self._context.destroy(linger=0)
            raise
        self.source = replace(options, publisher="zmq", endpoint=endpoint, replay_endpoint=replay)  # as it came to be
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        batch.data_parallel_rank = self.rank
        with self._ready:
            if len(self._queue) >= self._max_queued:
                self._queue.popleft()
                self.num_dropped += 1
            self._queue.append((self._sequence, batch))
            self._sequence += 1
            self._ready.notify()

    def close(self) -> None:
        """What is queued is still sent, if that takes no time."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(2 * LAST_SECONDS)
        self._context.destroy(linger=int(LAST_SECONDS * 1000))

    def _run(self) -> None:
        deadline: float | None = None
        while True:
            with self._ready:
                if not self._queue and not self._closed:
                    self._ready.wait(REPLAY_POLL if self._replays else None)
                queued = list(self._queue)
                self._queue.clear()
                closed = self._closed
            if closed and deadline is None:
                deadline = time.monotonic() + LAST_SECONDS
            for sequence, batch in queued:
                self._send(sequence, batch)
                if deadline is not None and time.monotonic() > deadline:
                    return
            if closed and not queued:
                return
            try:
                for _ in range(MAX_REPLAYS):
                    if self._replays is None or not self._replays.poll(0):
                        break
                    self._replay(self._replays)
            except (zmq.ZMQError, ValueError) as error:
                logger.warning("a replay of KV-cache events failed: %s", error)

    def _send(self, sequence: int, batch: KVEventBatch) -> None:
        try:
            payload = self._encoder.encode(batch)
            self._publisher.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.DONTWAIT)
            self._sent.append((sequence, payload))
        except (zmq.ZMQError, TypeError) as error:
            self.num_dropped += 1
            logger.warning("events of the KV cache could not be published: %s", error)

    def _replay(self, socket: "zmq.Socket[bytes]") -> None:
        """All batches from a number on, then an end mark; a subscriber that does not read loses them."""
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("a request for KV-cache events must be an empty frame and a number of 8 bytes")
            return
        client, _, first = frames
        start = int.from_bytes(first, "big")
        for sequence, payload in self._sent:
            if sequence >= start:
                socket.send_multipart((client, b"", self._topic, sequence.to_bytes(8, "big"), payload), zmq.DONTWAIT)
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""), zmq.DONTWAIT)


def _open(socket: "zmq.Socket[bytes]", endpoint: str) -> str:
    """The address as it came to be: of port 0, the port that was free."""
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    binds = binds or endpoint.endswith(":0")  # which nobody could connect to
    try:
        if socket.type == zmq.ROUTER or binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"KV-cache events cannot be published at {endpoint}: {error}") from error
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound if endpoint.endswith((":0", ":*")) else endpoint
