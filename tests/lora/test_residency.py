"""Which adapters have slots, without an engine: workers that only note what they are told."""

import random

import pytest

from quire.lora.residency import Residency
from quire.messages.lora import AdapterNews, LoRARequest


def lora(number, path=None):
    return LoRARequest(f"a{number}", number, path or f"/a{number}")


class Workers:
    """Each task is done when `work` is called."""

    def __init__(self):
        self.tasks, self.slots, self.host = [], {}, set()

    def load_adapter(self, request):
        self.tasks.append(("load", request.lora_int_id, request.lora_path))

    def place_adapter(self, lora_id, slot):
        assert lora_id in self.host
        self.slots.pop(slot, None)
        self.tasks.append(("place", lora_id, slot))

    def use_adapter(self, lora_id, slot):
        assert slot not in self.slots
        self.slots[slot] = lora_id

    def drop_adapter(self, lora_id):
        self.host.discard(lora_id)
        self.slots = {slot: one for slot, one in self.slots.items() if one != lora_id}

    @property
    def num_host(self):
        """In host memory, or on their way there."""
        return len(self.host) + sum(kind == "load" for kind, *_ in self.tasks)

    def work(self, count=None):
        self.done, self.tasks = self.tasks[:count], self.tasks[count:] if count is not None else []

    def adapter_news(self):
        done, self.done = getattr(self, "done", []), []
        news = []
        for kind, lora_id, where in done:
            if kind == "place":
                news.append(AdapterNews(lora_id, slot=where))
            elif where == "/wrong":
                news.append(AdapterNews(lora_id, error="it is wrong"))
            else:
                self.host.add(lora_id)
                news.append(AdapterNews(lora_id, content=b"%d" % lora_id))
        return news


def settled(residency, workers):
    """Requests that have become ready, once all tasks are done."""
    ready = []
    while residency.pending:
        workers.work()
        ready += [request_id for request_id, _ in residency.poll().ready]
    return ready


def test_a_request_waits_for_its_adapter_and_the_next_does_not():
    workers = Workers()
    residency = Residency(workers, 2, 4)
    assert residency.hold("x", lora(1)) is None
    assert settled(residency, workers) == ["x"]
    assert residency.hold("y", lora(1)) == b"1" and residency.hold("z", lora(2)) is None
    assert settled(residency, workers) == ["z"]


def test_the_least_recently_used_makes_room():
    workers = Workers()
    residency = Residency(workers, 2, 4)
    for number in (1, 2):
        residency.hold(f"x{number}", lora(number))
        settled(residency, workers)
        residency.release(f"x{number}")
    assert residency.hold("again", lora(1)) == b"1"
    residency.release("again")
    residency.hold("x3", lora(3))
    assert settled(residency, workers) == ["x3"]
    assert set(workers.slots.values()) == {1, 3} and residency.loaded() == [1, 2, 3]


def test_steady_traffic_for_one_adapter_does_not_keep_out_another():
    workers = Workers()
    residency = Residency(workers, 1, 4)
    residency.hold("a0", lora(1))
    settled(residency, workers)
    assert residency.hold("b", lora(2)) is None
    settled(residency, workers)
    assert residency.hold("a1", lora(1)) is None  # it has to make room
    residency.release("a0")
    assert settled(residency, workers) == ["b"]
    residency.release("b")
    assert settled(residency, workers) == ["a1"]


def test_no_one_makes_room_for_a_request_that_has_gone():
    workers = Workers()
    residency = Residency(workers, 1, 4)
    residency.hold("a0", lora(1))
    settled(residency, workers)
    residency.hold("b", lora(2))
    settled(residency, workers)
    assert residency.hold("a1", lora(1)) is None
    residency.release("b")
    assert settled(residency, workers) == ["a1"]


def test_host_memory_is_bounded():
    workers = Workers()
    residency = Residency(workers, 1, 2)
    for number in range(1, 6):
        residency.hold(str(number), lora(number))
        settled(residency, workers)
        residency.release(str(number))
        residency.poll()
    assert residency.loaded() == [4, 5] and workers.host == {4, 5}


def test_requests_for_more_adapters_than_host_memory_has_room_for():
    """They are read one by one, as others have ended."""
    workers = Workers()
    residency = Residency(workers, 1, 3)
    for number in range(1, 9):
        assert residency.hold(str(number), lora(number)) is None
    assert [task[1] for task in workers.tasks] == [1, 2, 3]
    for number in range(1, 9):
        assert settled(residency, workers) == [str(number)]
        assert workers.num_host <= 4
        residency.release(str(number))
    residency.poll()
    assert workers.num_host == 3


def test_one_slot_that_is_all_host_memory():
    """Steady traffic for its adapter does not keep out another, which has to be read first."""
    workers = Workers()
    residency = Residency(workers, 1, 1)
    residency.hold("a0", lora(1))
    settled(residency, workers)
    for number in (2, 3):
        residency.hold(f"b{number}", lora(number))
    settled(residency, workers)
    assert workers.num_host == 2 and residency.hold("a1", lora(1)) is None
    for ended, begun in (("a0", "b2"), ("b2", "b3"), ("b3", "a1")):
        residency.release(ended)
        assert settled(residency, workers) == [begun]


@pytest.mark.parametrize("host", [1, 2])
def test_adapters_in_host_memory_do_not_take_turns_without_those_on_disk(host):
    workers = Workers()
    residency = Residency(workers, 1, host)
    for number in range(1, 6):
        residency.hold(str(number), lora(number))
    served = set()
    for _ in range(10):
        (done,) = settled(residency, workers)
        served.add(int(done[0]))
        assert residency.hold(done + "'", lora(int(done[0]))) is None  # there is always more for each
        residency.release(done)
    assert served == {1, 2, 3, 4, 5}


def test_what_no_request_waits_for_any_more_is_not_read():
    workers = Workers()
    residency = Residency(workers, 1, 1)
    for number in range(1, 5):
        residency.hold(str(number), lora(number))
    for gone in ("2", "3"):
        residency.release(gone)
    assert settled(residency, workers) == ["1"]
    residency.release("1")
    assert settled(residency, workers) == ["4"]
    assert residency.stats().num_loads == 2


def test_one_that_is_asked_for_ahead_of_requests_is_read_at_once():
    workers = Workers()
    residency = Residency(workers, 1, 1)
    for number in (1, 2, 3):
        residency.hold(str(number), lora(number))
    residency.add(lora(3))
    assert [task[1] for task in workers.tasks] == [1, 3]


def test_one_that_cannot_be_loaded_fails_its_requests_alone():
    workers = Workers()
    residency = Residency(workers, 1, 2)
    residency.hold("x", lora(1, "/wrong"))
    residency.hold("y", lora(2))
    workers.work()
    assert residency.poll().failed == [("x", "it is wrong")]
    assert settled(residency, workers) == ["y"]
    with pytest.raises(ValueError, match="it is wrong"):
        residency.is_loaded(1)
    residency.hold("z", lora(1))
    residency.release("y")
    assert settled(residency, workers) == ["z"]


def test_a_number_stands_for_one_adapter():
    residency = Residency(Workers(), 1, 2)
    residency.hold("x", lora(1))
    with pytest.raises(ValueError, match="lora_int_id 1 is adapter 'a1' at '/a1'; give 'b' another number"):
        residency.hold("y", LoRARequest("b", 1, "/b"))


def test_pinned_adapters_keep_their_slots():
    workers = Workers()
    residency = Residency(workers, 2, 4)
    residency.add(lora(1))
    residency.pin(1)
    settled(residency, workers)
    for number in (2, 3, 4):
        residency.hold(str(number), lora(number))
        assert settled(residency, workers) == [str(number)]
        assert 1 in workers.slots.values()
        residency.release(str(number))


def full(residency, workers):
    """Of one slot: adapter 1 has it, "a1" runs; "b" waits for adapter 2, so that "a2" has to wait too."""
    residency.hold("a1", lora(1))
    assert settled(residency, workers) == ["a1"]
    assert residency.hold("b", lora(2)) is None
    settled(residency, workers)
    assert residency.hold("a2", lora(1)) is None


def test_a_request_that_goes_before_it_could_run_is_not_told():
    workers = Workers()
    residency = Residency(workers, 1, 4)
    full(residency, workers)
    residency.release("b")  # adapter 1 need not make room, so that "a2" may run
    residency.release("a2")
    assert residency.poll().ready == []


def test_one_slot_is_never_pinned():
    residency = Residency(Workers(), 1, 4)
    residency.add(lora(1))
    with pytest.raises(ValueError, match="one slot must stay free"):
        residency.pin(1)


def test_requests_of_an_adapter_that_is_pinned_while_it_makes_room():
    workers = Workers()
    residency = Residency(workers, 2, 4)
    for number in (1, 2):
        residency.hold(f"x{number}", lora(number))
        settled(residency, workers)
    residency.hold("x3", lora(3))
    settled(residency, workers)
    assert residency.hold("again", lora(1)) is None  # it has had its slot longest
    residency.pin(1)
    assert settled(residency, workers) == ["again"]
    residency.release("x2")
    assert settled(residency, workers) == ["x3"]


def test_the_slot_of_a_pinned_adapter_that_is_removed():
    workers = Workers()
    residency = Residency(workers, 2, 4)
    residency.add(lora(1))
    residency.pin(1)
    residency.hold("x2", lora(2))
    assert settled(residency, workers) == ["x2"]
    residency.hold("x3", lora(3))
    settled(residency, workers)
    assert residency.remove(1)
    assert settled(residency, workers) == ["x3"]


def test_an_adapter_in_use_is_not_loaded_anew():
    workers = Workers()
    residency = Residency(workers, 1, 4)
    anew = LoRARequest("a1", 1, "/a1", load_inplace=True)
    residency.hold("x", anew)
    with pytest.raises(ValueError, match="'a1' is in use, pinned or being loaded"):
        residency.add(anew)
    assert residency.hold("y", anew) is None  # one of a batch gets what the others have
    assert settled(residency, workers) == ["x", "y"]
    residency.release("x")
    residency.release("y")
    residency.add(anew)
    assert ("load", 1, "/a1") in workers.tasks


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic(seed):
    """A request runs only while its adapter is in a slot; every request gets its turn."""
    chance = random.Random(seed)
    workers = Workers()
    slots = chance.randint(1, 3)
    host = slots + chance.randint(0, 3)
    residency = Residency(workers, slots, host)
    waiting, running = {}, {}
    for i in range(300):
        action = chance.random()
        if action < 0.4:
            number = chance.randint(1, 8)
            now = residency.hold(str(i), lora(number))
            (waiting if now is None else running)[str(i)] = number
        elif action < 0.7 and (running or waiting):
            held = running if running and (not waiting or chance.random() < 0.8) else waiting
            request_id = chance.choice(list(held))
            held.pop(request_id)
            residency.release(request_id)
        else:
            workers.work(chance.randint(1, 3))
        for request_id, content in residency.poll().ready:
            running[request_id] = waiting.pop(request_id)
            assert content == b"%d" % running[request_id]
        assert set(running.values()) <= set(workers.slots.values())
        assert workers.num_host <= host + 1
    for _ in range(1000):
        if not waiting and not running:
            break
        for request_id in list(running):
            running.pop(request_id)
            residency.release(request_id)
        workers.work()
        for request_id, _ in residency.poll().ready:
            running[request_id] = waiting.pop(request_id)
    assert not waiting and not running
    assert len(residency.loaded()) <= host
