"""What connectors' answers mean for requests and their blocks."""

import numpy as np
import pytest

from quire.core.kv_transfers import NO_MATCH, Ended, KVTransfers, Match
from quire.distributed.kv_connector import KVConnector
from quire.messages.kv_transfer import FailedMetadata, FinishedTransfers
from quire.messages.plan import BlockAppends, ModelRunnerOutput, SchedulerOutput
from quire.messages.requests import ErrorKind, RequestError
from tests.core.fake_engine import FakeEngine, expected_tokens, request


class Connector(KVConnector):
    recomputes_failed_loads = False

    def __init__(self, num_tokens=0, loads_async=True, keeps=False):
        self.num_tokens, self.loads_async, self.keeps = num_tokens, loads_async, keeps
        self.preempted, self.evicted, self.resets = [], [], 0

    def get_num_new_matched_tokens(self, request, num_computed):
        return self.num_tokens, self.loads_async

    def update_state_after_alloc(self, request, block_ids, num_external):
        self.allocated = num_external

    def request_finished(self, request, block_ids):
        return self.keeps

    def request_preempted(self, request, block_ids):
        self.preempted.append((request.request_id, request.num_computed, len(block_ids[0])))

    def block_evicted(self, block_id, block_hash, group):
        self.evicted.append((block_id, block_hash, group))

    def reset_cache(self):
        self.resets += 1


class Broken(Connector):
    def get_num_new_matched_tokens(self, *_):
        raise OSError("no route")

    update_state_after_alloc = build_connector_meta = request_finished = get_num_new_matched_tokens


def report(*finished):
    nothing = np.empty(0, np.int32)
    return ModelRunnerOutput(nothing[:, None], nothing, transfers=finished)


def plan():
    return SchedulerOutput(1, np.empty(0, np.int32), np.empty(0, np.int32), [], [], BlockAppends(), [], ())


def test_without_a_connector_nothing_is_loaded_or_kept():
    transfers, a = KVTransfers(), request("a")
    assert transfers.match(a, 0) is NO_MATCH
    assert transfers.start(a, NO_MATCH)
    assert not transfers.finish(a, failed=False) and not transfers.pending


@pytest.mark.parametrize(
    ("offered", "loads_async", "expected"),
    [(99, True, Match(9, True)), (99, False, Match(9, False)), (4, True, Match(4, True)), (0, True, NO_MATCH)],
)
def test_the_last_token_is_never_loaded_and_nobody_waits_for_nothing(offered, loads_async, expected):
    transfers = KVTransfers([Connector(offered, loads_async)])
    assert transfers.match(request("a", prompt=range(12)), 2) == expected


def test_of_several_connectors_the_first_of_those_with_most_tokens_loads():
    connectors = [Connector(2), Connector(5), Connector(5, loads_async=False), Broken()]
    transfers, a = KVTransfers(connectors), request("a", prompt=range(12))
    match = transfers.match(a, 2)
    assert match == Match(5, True, 1)
    assert transfers.start(a, match)
    assert [connector.allocated for connector in connectors[:3]] == [0, 5, 0]
    assert transfers.update(report(FinishedTransfers(received=("a",)))) == Ended()
    assert transfers.update(report(FinishedTransfers(), FinishedTransfers(received=("a",)))) == Ended(loaded=[a])


def test_a_request_is_loading_until_the_worker_reports_it():
    transfers, a = KVTransfers([Connector()]), request("a")
    transfers.start(a, Match(3, True))
    assert transfers.pending and transfers.connectors[0].allocated == 3
    assert transfers.update(report(FinishedTransfers(received=("other",)))) == Ended()
    assert transfers.update(report(FinishedTransfers(received=("a",)))) == Ended(loaded=[a])
    assert not transfers.pending


def test_blocks_are_kept_until_every_connector_has_sent_them_unless_the_request_failed():
    transfers = KVTransfers([Connector(keeps=True), Connector(keeps=True), Connector()])
    a, b = request("a"), request("b")
    assert transfers.finish(a, failed=False) and not transfers.finish(b, failed=True)
    assert transfers.update(report(FinishedTransfers(sent=("a", "b")))) == Ended()
    assert transfers.update(report(FinishedTransfers(), FinishedTransfers(sent=("a",)))) == Ended(released=[a])
    assert not transfers.pending


def test_blocks_of_an_aborted_load_are_kept_until_it_ends():
    transfers, a = KVTransfers([Connector(keeps=False)]), request("a")
    transfers.start(a, Match(3, True))
    assert transfers.finish(a, failed=False)
    assert transfers.update(report(FinishedTransfers(received=("a",)))) == Ended(released=[a])


def test_a_plan_is_needed_to_start_a_transfer_and_once_one_has_ended():
    transfers, a = KVTransfers([Connector()]), request("a")
    assert not transfers.needs_plan
    transfers.start(a, Match(3, True))
    assert transfers.needs_plan
    transfers.add_meta(plan())
    assert transfers.pending and not transfers.needs_plan
    transfers.notify()
    assert transfers.needs_plan
    transfers.wait(0)
    assert transfers.needs_plan, "waiting ends at once, and the report is still to be read"


def test_an_error_of_a_connector_is_that_of_its_requests():
    transfers = KVTransfers([Connector(keeps=True), Broken()])
    a, b, c = request("a"), request("b"), request("c")
    assert not transfers.start(a, Match(3, True, 1))
    ((failed, error),) = transfers.failed
    assert failed is a and "no route" in error.message
    assert transfers.start(b, Match(3, True, 0))
    assert transfers.finish(c, failed=False)
    made = plan()
    transfers.add_meta(made)
    assert made.connector_meta == (None, FailedMetadata("OSError: no route"))
    assert transfers.connector_failed(1, error) == Ended()
    cause = RequestError(ErrorKind.INTERNAL, "it is gone")
    assert transfers.connector_failed(0, cause) == Ended(failed=[(b, cause)], released=[c])
    assert not transfers.pending


def test_a_failed_load_names_its_cause():
    transfers, a = KVTransfers([Connector()]), request("a")
    transfers.start(a, Match(3, True))
    ended = transfers.update(report(FinishedTransfers(failed={"a": "timed out"})))
    assert ended == Ended(failed=[(a, RequestError(ErrorKind.INTERNAL, "timed out"))])


def test_connectors_hear_of_preemption_and_eviction_before_content_is_lost():
    connector = Connector()
    engine = FakeEngine(num_blocks=8, connector=connector)
    engine.add("a", range(12), max_tokens=12)
    engine.add("b", range(20, 32), max_tokens=12)
    engine.run()
    assert [entry[0] for entry in connector.preempted] == ["b"]
    assert connector.preempted[0][1] >= 12 and connector.preempted[0][2] >= 3
    assert connector.evicted and all(len(key) == 32 and group == 0 for _, key, group in connector.evicted)
    assert not engine.kv.pool._cached.keys() & {(key, group) for _, key, group in connector.evicted[-1:]}
    engine.scheduler.reset_prefix_cache()
    assert connector.resets == 1


class Asked(Connector):
    """Knows what it has once it is told to."""

    def bind_scheduler(self, ask_again):
        self.ask_again, self.known, self.num_asked = ask_again, False, 0

    def get_num_new_matched_tokens(self, request, num_computed):
        self.num_asked += 1
        return (self.num_tokens if self.known else None), self.loads_async


def test_a_request_is_set_aside_until_a_connector_knows():
    connector = Asked(num_tokens=8, loads_async=False)
    engine = FakeEngine(connector=connector)
    engine.add("a", range(12), max_tokens=2)
    plan = engine.scheduler.schedule()
    assert plan is None and list(engine.scheduler.transfers.looking_up) == ["a"]
    assert engine.scheduler.has_unfinished() and engine.scheduler.schedule() is None
    assert connector.num_asked == 1, "it is not asked before it says so"
    connector.known = True
    connector.ask_again("a")
    connector.ask_again("unknown")
    plan = engine.scheduler.schedule()
    assert [new.num_computed for new in plan.new_rows] == [8]
    assert not engine.scheduler.transfers.looking_up


def test_an_aborted_request_is_not_looked_up_any_more():
    connector = Asked()
    engine = FakeEngine(connector=connector)
    engine.add("a", range(12), max_tokens=2)
    engine.scheduler.schedule()
    engine.scheduler.finish_requests(["a"])
    connector.ask_again("a")
    assert engine.scheduler.schedule() is None and not engine.scheduler.has_unfinished()


def test_what_cannot_be_loaded_is_computed_and_not_asked_for_again():
    connector = Connector(num_tokens=8)
    connector.recomputes_failed_loads = True
    engine = FakeEngine(connector=connector)
    engine.add("a", range(12), max_tokens=2)
    first = engine.scheduler.schedule()
    assert not first.new_rows and "a" in engine.scheduler.transfers.loading
    engine.scheduler.update_from_output(first, report(FinishedTransfers(failed={"a": "gone"})))
    second = engine.scheduler.schedule()
    assert [new.num_computed for new in second.new_rows] == [0] and second.num_tokens.tolist() == [12]


def test_an_idle_engine_makes_a_plan_for_a_connector_that_wants_one():
    connector = Connector()
    engine = FakeEngine(connector=connector)
    assert not engine.scheduler.has_unfinished() and engine.scheduler.schedule() is None
    connector.wants_plan = True
    assert engine.scheduler.has_unfinished()
    plan = engine.scheduler.schedule()
    assert not len(plan.rows)


def loading_after_a_failed_step():
    """Request b shares blocks that the step of a should have written, and loads others."""
    engine = FakeEngine(connector=Connector(num_tokens=4))
    scheduler = engine.scheduler
    scheduler.transfers.connectors[0].num_tokens = 0
    engine.add("a", range(9), max_tokens=2)
    first = scheduler.schedule()
    scheduler.transfers.connectors[0].num_tokens = 4
    engine.add("b", range(16), max_tokens=2)
    second = scheduler.schedule()
    assert list(scheduler.transfers.loading) == ["b"] and scheduler.requests["b"].num_computed == 12
    scheduler.fail_plan(first, RequestError(ErrorKind.INTERNAL, "lost"))
    return scheduler, second


def test_what_is_loaded_beside_blocks_of_a_failed_step_is_computed_anew():
    scheduler, second = loading_after_a_failed_step()
    scheduler.transfers.connectors[0].num_tokens = 0
    scheduler.update_from_output(second, report(FinishedTransfers(received=("b",))))
    third = scheduler.schedule()
    assert [(new.request_id, new.num_computed) for new in third.new_rows] == [("b", 0)]


def test_a_plan_asks_again_for_what_a_failed_one_would_have_reported():
    scheduler, _ = loading_after_a_failed_step()
    assert scheduler.transfers.needs_plan


def test_other_weights_drop_what_was_loaded_for_requests_that_wait():
    connector = Connector(num_tokens=4)
    engine = FakeEngine(connector=connector)
    engine.add("a", range(8), max_tokens=2)
    scheduler, waiting = engine.scheduler, engine.scheduler.requests["a"]
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, report(FinishedTransfers(received=("a",))))
    assert waiting.has_blocks
    connector.forget = lambda: connector.preempted.append("forgotten")
    scheduler.forget(b"new weights")
    assert not waiting.has_blocks and waiting.num_computed == 0 and "forgotten" in connector.preempted


def test_the_only_running_request_gets_the_blocks_of_one_that_waits_with_loaded_ones():
    """Preempted, it would be admitted again with as few blocks, for ever."""
    connector = Connector(num_tokens=8)
    engine = FakeEngine(num_blocks=5, policy="priority", connector=connector, caching=False)
    engine.add("loaded", range(9), max_tokens=2)
    scheduler = engine.scheduler
    plan = scheduler.schedule()
    scheduler.update_from_output(plan, report(FinishedTransfers(received=("loaded",))))
    assert scheduler.requests["loaded"].has_blocks
    connector.num_tokens = 0
    engine.add("first", range(20, 32), max_tokens=4, priority=-1)  # three blocks are left, and it needs a fourth
    engine.run()
    assert engine.tokens["first"] == expected_tokens(range(20, 32), 4)
    assert engine.tokens["loaded"] == expected_tokens(range(9), 2)
    assert scheduler.num_preemptions == 0 and connector.preempted == [("loaded", 8, 2)]
