"""What a connector's answers mean for requests and their blocks."""

import numpy as np
import pytest

from quire.core.kv_transfers import KVTransfers
from quire.messages.plan import ModelRunnerOutput
from tests.core.fake_engine import request


class Connector:
    def __init__(self, num_tokens=0, loads_async=True, keeps=False):
        self.num_tokens, self.loads_async, self.keeps = num_tokens, loads_async, keeps

    def get_num_new_matched_tokens(self, request, num_computed):
        return self.num_tokens, self.loads_async

    def update_state_after_alloc(self, request, block_ids, num_external):
        self.allocated = num_external

    def request_finished(self, request, block_ids):
        return self.keeps


def report(sent=(), received=()):
    nothing = np.empty(0, np.int32)
    return ModelRunnerOutput(nothing[:, None], nothing, finished_sending=sent, finished_recving=received)


def test_without_a_connector_nothing_is_loaded_or_kept():
    transfers, a = KVTransfers(), request("a")
    assert transfers.match(a, 0) == (0, False)
    transfers.start(a, 0, False)
    assert not transfers.finish(a, failed=False) and not transfers.pending


@pytest.mark.parametrize(
    ("offered", "loads_async", "expected"),
    [(99, True, (9, True)), (99, False, (9, False)), (4, True, (4, True)), (0, True, (0, False))],
)
def test_the_last_token_is_never_loaded_and_nobody_waits_for_nothing(offered, loads_async, expected):
    transfers = KVTransfers(Connector(offered, loads_async))
    assert transfers.match(request("a", prompt=range(12)), 2) == expected


def test_a_request_is_loading_until_the_worker_reports_it():
    transfers, a = KVTransfers(Connector()), request("a")
    transfers.start(a, 3, True)
    assert transfers.pending and transfers.connector.allocated == 3
    assert transfers.update(report(received=("other",))) == ([], [])
    assert transfers.update(report(received=("a",))) == ([a], [])
    assert not transfers.pending


def test_blocks_are_kept_until_they_are_sent_unless_the_request_failed():
    transfers, a, b = KVTransfers(Connector(keeps=True)), request("a"), request("b")
    assert transfers.finish(a, failed=False) and not transfers.finish(b, failed=True)
    assert transfers.update(report(sent=("a", "b"))) == ([], [a])
    assert not transfers.pending


def test_blocks_of_an_aborted_load_are_kept_until_it_ends():
    transfers, a = KVTransfers(Connector(keeps=False)), request("a")
    transfers.start(a, 3, True)
    assert transfers.finish(a, failed=False)
    assert transfers.update(report(received=("a",))) == ([], [a])
