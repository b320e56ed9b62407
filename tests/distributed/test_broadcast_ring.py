"""One writer, several readers in processes of their own: all get every message, in order."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import zmq

from quire.distributed.broadcast_ring import Ring, RingReader, RingWriter

SLOTS, SLOT_BYTES = 4, 1024


class ReaderDiedError(Exception):
    pass


@contextmanager
def ring(readers):
    """A writer and readers of this process."""
    context = zmq.Context()
    sending = [context.socket(zmq.PUSH) for _ in range(readers)]
    receiving = [context.socket(zmq.PULL) for _ in range(readers)]
    for number, (one, other) in enumerate(zip(sending, receiving, strict=True)):
        one.bind(f"inproc://reader-{number}")
        other.connect(f"inproc://reader-{number}")
    memory = Ring(readers, SLOTS, SLOT_BYTES)

    def check() -> None:
        raise ReaderDiedError

    writer = RingWriter(memory, sending, check)
    again = [Ring(readers, SLOTS, SLOT_BYTES, fd=memory.fd) for _ in range(readers)]
    yield writer, [RingReader(one, number, receiving[number]) for number, one in enumerate(again)]
    context.destroy(linger=0)
    os.close(memory.fd)


def message(number):
    return [f"message {number}".encode(), bytes([number % 256]) * (number * 37 % 900)]


def test_every_reader_gets_every_message_in_order():
    """Many times around the ring."""
    with ring(3) as (writer, readers):
        for number in range(10 * SLOTS + 1):
            writer.write(message(number))
            for reader in readers:
                assert reader.read(1) == message(number)


def test_a_large_message_to_a_reader_that_is_gone():
    """By socket, which would wait for another reader: the writer looks whether it lives instead."""
    with ring(2) as (writer, readers):
        writer.write([bytes(SLOT_BYTES)])
        assert [reader.read(1) for reader in readers] == [[bytes(SLOT_BYTES)]] * 2
        readers[1]._overflow.close(linger=0)
        while writer._overflow[1].poll(0, zmq.POLLOUT):
            pass  # until the socket knows
        with pytest.raises(ReaderDiedError):
            writer.write([bytes(SLOT_BYTES)])


def test_messages_wait_in_slots():
    with ring(2) as (writer, readers):
        for number in range(SLOTS):
            writer.write(message(number))
        for reader in readers:
            assert [reader.read(1) for _ in range(SLOTS)] == [message(number) for number in range(SLOTS)]


def test_large_messages_take_another_way_and_keep_their_order():
    large = [b"large", os.urandom(3 * SLOT_BYTES), os.urandom(1 << 20)]
    with ring(2) as (writer, readers):
        for one in (message(1), large, message(2)):
            writer.write(one)
        for reader in readers:
            assert [reader.read(1) for _ in range(3)] == [message(1), large, message(2)]


def test_messages_that_just_fit():
    with ring(1) as (writer, (reader,)):
        for size in range(SLOT_BYTES - 16, SLOT_BYTES + 1):
            writer.write([b"x" * size])
            assert reader.read(1) == [b"x" * size]


def test_nothing_comes():
    with ring(1) as (_, (reader,)):
        assert reader.read(0) is None
        assert reader.read(0.01) is None


def test_frames_can_be_written_to():
    with ring(1) as (writer, (reader,)):
        writer.write([b"first"])
        (frame,) = reader.read(1)
        writer.write([b"other"])
        frame[0] = ord("F")
        assert frame == b"First"


def test_the_writer_waits_for_a_slow_reader():
    with ring(2) as (writer, (fast, slow)):
        writer._check = lambda: None
        count = 3 * SLOTS
        thread = threading.Thread(target=lambda: [writer.write(message(number)) for number in range(count)])
        thread.start()
        assert [fast.read(10) for _ in range(SLOTS)] == [message(number) for number in range(SLOTS)]
        assert fast.read(0.05) is None  # the slot after these is not read by all
        for number in range(count):
            assert slow.read(10) == message(number)
            if number >= SLOTS:
                assert fast.read(10) == message(number)
        thread.join()


def test_the_writer_does_not_wait_for_a_reader_that_is_gone():
    with ring(2) as (writer, (alive, _)):
        for number in range(SLOTS):
            writer.write(message(number))
            alive.read(1)
        with pytest.raises(ReaderDiedError):
            writer.write(message(0))


READER = """
import sys, zmq
from quire.distributed.broadcast_ring import Ring, RingReader
from tests.distributed.test_broadcast_ring import SLOT_BYTES, SLOTS, message

fd, reader, count, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
overflow = zmq.Context().socket(zmq.PULL)
overflow.connect(f"ipc://{folder}/{reader}")
ring = RingReader(Ring(2, SLOTS, SLOT_BYTES, fd=fd), reader, overflow)
for number in range(count):
    assert ring.read(60) == message(7 * number)
print("all read", flush=True)
sys.stdin.read()
"""


@contextmanager
def reader_processes(folder, count):
    context = zmq.Context()
    sockets = [context.socket(zmq.PUSH) for _ in range(2)]
    for number, socket in enumerate(sockets):
        socket.bind(f"ipc://{folder}/{number}")
    memory = Ring(2, SLOTS, SLOT_BYTES)
    command = [sys.executable, "-c", READER, str(memory.fd)]
    processes = [
        subprocess.Popen(
            [*command, str(number), str(count), str(folder)],
            pass_fds=[memory.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(2)
    ]

    def check() -> None:
        if any(process.poll() is not None for process in processes):
            raise ReaderDiedError

    yield RingWriter(memory, sockets, check), processes
    for process in processes:
        process.kill()
        process.communicate()
    context.destroy(linger=0)
    os.close(memory.fd)


def test_readers_in_processes_of_their_own(tmp_path):
    with reader_processes(tmp_path, 300) as (writer, processes):
        for number in range(300):
            writer.write(message(7 * number))
        for process in processes:
            assert process.stdout.readline() == b"all read\n"


def test_a_reader_that_is_killed(tmp_path):
    with reader_processes(tmp_path, 1_000_000) as (writer, processes):
        for number in range(20):
            writer.write(message(7 * number))
        processes[1].kill()
        with pytest.raises(ReaderDiedError):
            for number in range(20, 21 + 2 * SLOTS):
                writer.write(message(7 * number))
