"""Which completions wait for which, and whose prompt they share."""

from quire.core.forks import ForkTable
from tests.core.fake_engine import request


def test_children_wait_until_a_plan_completes_the_prompt():
    forks, parent, child = ForkTable(), request("p", prompt=range(10)), request("c", prompt=range(10))
    assert forks.add(child, parent)
    forks.note_planned([parent], [9])
    assert forks.pop_ready() == [] and forks.parent(child) is None
    forks.note_planned([parent], [10])
    assert forks.pop_ready() == [child] and forks.parent(child) is parent
    assert forks.pop_ready() == []


def test_a_late_child_does_not_wait():
    forks, parent = ForkTable(), request("p")
    forks.add(request("early"), parent)
    forks.note_planned([parent], [4])
    late = request("late")
    assert not forks.add(late, parent)
    assert forks.parent(late) is parent


def test_a_child_with_tokens_of_its_own_does_not_fork_again():
    forks, parent, child = ForkTable(), request("p"), request("c")
    forks.add(child, parent)
    forks.note_planned([parent], [4])
    child.token_ids = child.token_ids.repeat(2)
    assert forks.parent(child) is None


def test_children_of_an_ended_parent_are_returned_once():
    forks, parent, child = ForkTable(), request("p"), request("c")
    forks.add(child, parent)
    assert forks.remove(parent) == [child] and forks.parent(child) is None
    assert forks.remove(parent) == [] and forks.remove(child) == []
