"""Who is admitted next, and what keeps others from it."""

from quire.core.admission_queue import AdmissionQueue
from quire.core.request import RequestState
from tests.core.fake_engine import request


def drain(queue):
    names = []
    while queue.peek() is not None:
        names.append(queue.pop().request_id)
    return names


def test_ready_requests_come_in_the_order_of_their_keys():
    queue = AdmissionQueue()
    for name, key in (("b", (0, 2)), ("a", (0, 1)), ("urgent", (-1, 3))):
        queue.push(request(name, key))
    assert len(queue) == 3
    assert drain(queue) == ["urgent", "a", "b"]


def test_a_blocked_request_is_passed_over_and_comes_back_to_its_place():
    queue = AdmissionQueue()
    first, second = request("first", (0, 1)), request("second", (0, 2))
    queue.block(first, RequestState.WAITING_REMOTE_KV)
    queue.push(second)
    assert queue.peek() is second and len(queue) == 2
    queue.unblock(first)
    assert first.state == RequestState.WAITING
    assert drain(queue) == ["first", "second"]


def test_a_removed_request_does_not_come_back():
    queue = AdmissionQueue()
    ready, blocked = request("ready", (0, 1)), request("blocked", (0, 2))
    queue.push(ready)
    queue.block(blocked, RequestState.WAITING_FORK)
    queue.remove(ready)
    queue.remove(blocked)
    queue.unblock(blocked)
    queue.fork_ready(blocked)
    assert len(queue) == 0 and queue.peek() is None


def test_a_fork_may_still_wait_for_its_grammar():
    queue, fork = AdmissionQueue(), request("fork", (0, 1))
    queue.block(fork, RequestState.WAITING_FORK)
    queue.block_until_ready(fork)
    queue.fork_ready(fork)
    assert fork.state == RequestState.WAITING_GRAMMAR and queue.peek() is None
    queue.now_ready(fork)
    assert queue.peek() is fork


def test_a_grammar_may_be_ready_before_the_fork():
    queue, fork = AdmissionQueue(), request("fork", (0, 1))
    queue.block(fork, RequestState.WAITING_FORK)
    queue.block_until_ready(fork)
    queue.now_ready(fork)
    assert queue.peek() is None
    queue.fork_ready(fork)
    assert queue.peek() is fork


def test_those_behind_a_preempted_request_wait_for_its_frames():
    queue = AdmissionQueue()
    before, preempted, behind = (request(name, (0, i)) for i, name in enumerate(("before", "preempted", "behind")))
    preempted.frames_to_discard = 2
    queue.push_preempted(preempted)
    queue.push(behind)
    assert queue.peek() is None
    queue.push(before)
    assert drain(queue) == ["before"]
    queue.discard_frame(preempted)
    assert queue.peek() is None
    queue.discard_frame(preempted)
    assert drain(queue) == ["preempted", "behind"]


def test_an_ended_request_does_not_come_back_with_its_last_frame():
    queue, preempted = AdmissionQueue(), request("preempted", (0, 1))
    preempted.frames_to_discard = 1
    queue.push_preempted(preempted)
    queue.remove(preempted)
    queue.discard_frame(preempted)
    assert len(queue) == 0 and queue.peek() is None
