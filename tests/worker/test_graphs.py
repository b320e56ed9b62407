"""Captured steps without a device: recovery from a capture that fails."""

import contextlib
import logging

import numpy as np
import pytest
import torch

from quire.attention.base import CacheBackend
from quire.attention.group_backends import GroupBackends
from quire.kernels.workspace import Workspace
from quire.worker.graphs import StepGraphs

CPU = torch.device("cpu")
ROWS = np.arange(2, dtype=np.int32)
PREFIX = 512  # steps with a shared prefix are not captured at start-up


class FakeStream:
    def __init__(self, device=None):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class FakeGraph:
    capturing = False

    def capture_begin(self, **_):
        FakeGraph.capturing = True

    def capture_end(self):
        FakeGraph.capturing = False

    def replay(self): ...


class FakeBackend(CacheBackend):
    name = "fake"

    def max_query_blocks(self, num_tokens, num_rows):
        return num_tokens + num_rows


@pytest.fixture
def main_stream(monkeypatch):
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return stream


def test_a_capture_that_fails_is_not_tried_again(main_stream, caplog):
    workspace, tried = Workspace(CPU), []
    counters = workspace.new_counters(2)

    def compute(key, buffers):
        if key.shared_prefix and FakeGraph.capturing:
            tried.append(key)
            counters[0] = 1
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(key.num_rows, 8)

    graphs = StepGraphs(compute, GroupBackends([FakeBackend()]), 4, 0, CPU, workspace.reset)
    graphs.capture_at_start()
    assert graphs.run_decode(ROWS, 0) is not None
    side = graphs._stream
    with caplog.at_level(logging.WARNING, "quire"):
        assert [graphs.run_decode(ROWS, PREFIX) for _ in range(5)] == [None] * 5
    assert len(tried) == 1 and len(caplog.records) == 1 and "no memory" in caplog.text
    assert main_stream.waited_for[-1] is side and not FakeGraph.capturing and not counters.any()
    assert graphs.run_decode(ROWS, 0) is not None  # other graphs still work


def test_a_failed_capture_reports_the_first_error(main_stream, caplog, monkeypatch):
    def capture_end(self):
        FakeGraph.capturing = False
        raise RuntimeError("the capture was invalidated")

    def compute(key, buffers):
        if FakeGraph.capturing:
            raise RuntimeError("an operation that cannot be captured")
        return torch.zeros(key.num_rows, 8)

    graphs = StepGraphs(compute, GroupBackends([FakeBackend()]), 4, 0, CPU, lambda: None)
    monkeypatch.setattr(FakeGraph, "capture_end", capture_end)
    with caplog.at_level(logging.WARNING, "quire"):
        assert [graphs.run_decode(ROWS, PREFIX) for _ in range(3)] == [None] * 3
    assert "cannot be captured" in caplog.text


def test_steps_with_adapters_have_graphs_of_their_own_if_there_may_be_any(main_stream):
    def compute(key, buffers):
        return torch.full((key.num_rows, 8), float(key.adapters))

    def captured(adapters):
        backends = GroupBackends([FakeBackend()])
        graphs = StepGraphs(compute, backends, 4, 64, CPU, lambda: None, adapters=adapters)
        graphs.capture_at_start()
        return graphs, {key.adapters for key in graphs._captured}

    assert captured(False)[1] == {False}
    graphs, ways = captured(True)
    assert ways == {False, True}
    for adapters in (False, True):
        _, logits = graphs.run_decode(ROWS, 0, adapters=adapters)
        _, mixed = graphs.run_mixed(ROWS, ROWS + 1, adapters)
        assert logits.unique().tolist() == mixed.unique().tolist() == [float(adapters)]
