"""Graphs of an engine that only pools, with a stand-in that computes where a device would replay."""

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.worker.graphs import GraphKey, StepBuffers, StepGraphs, graph_sizes
from tests.pooling.references import ARGUMENTS, PoolingReference, assert_close, make_pooling_reference

CPU = torch.device("cpu")


class ComputedGraphs:
    """Mixed steps of up to 384 tokens. All results are in one tensor, as those of replays, with padding behind."""

    def __init__(self, runner) -> None:
        self.runner, self.replayed = runner, []

    def run_mixed(self, rows, num_tokens, adapters=False):
        total, backends = int(num_tokens.sum()), self.runner.backends
        at = next((size for size in (32, 128, 384) if total <= size), None)
        if at is None:
            return None
        self.replayed.append(total)
        buffers = StepBuffers(len(rows), total, backends.max_query_blocks(total, len(rows)), CPU)
        buffers.fill(rows, num_tokens, backends.plan_queries(num_tokens))
        # Kernels of a CPU have no padding.
        buffers.query_start = buffers.query_start[: len(rows) + 1]
        hidden = self.runner._captured_step(GraphKey(total, len(rows), decode_only=False), buffers)
        if not hasattr(self, "result"):
            self.result = torch.empty(384, hidden.shape[1])
        self.result.fill_(torch.nan)
        self.result[:total] = hidden
        return buffers.rows, self.result[:at]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> PoolingReference:
    return make_pooling_reference("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 24}, {"async_scheduling": False}])
@pytest.mark.parametrize("pooling_type", ["LAST", "MEAN", "CLS"])
def test_vectors_of_replayed_steps(reference, pooling_type, settings):
    params = PoolingParams(pooling_type=pooling_type)
    with LLM(reference.path, runner="pooling", **ARGUMENTS, **settings) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        assert runner.pools_only
        runner.graphs = graphs = ComputedGraphs(runner)
        for _ in range(2):  # the second time from the cache, where that may be
            outputs = llm.encode(reference.prompts, params, use_tqdm=False)
            assert_close(outputs, reference.vectors(pooling_type))
        alone = [llm.encode([prompt], params, use_tqdm=False)[0] for prompt in reference.prompts]
        assert_close(alone, reference.vectors(pooling_type))
        assert 1 in graphs.replayed and max(graphs.replayed) > 20  # a text of one token among them
        runner.graphs = None
        assert_close(llm.encode(reference.prompts * 2, params, use_tqdm=False), reference.vectors(pooling_type) * 2)


def test_vectors_of_every_token(reference):
    params = PoolingParams(task="token_embed", use_activation=False)
    with LLM(reference.path, runner="pooling", **ARGUMENTS, max_num_batched_tokens=64) as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        runner.graphs = ComputedGraphs(runner)
        outputs = llm.encode(reference.prompts, params, use_tqdm=False)
    for output, hidden in zip(outputs, reference.hidden, strict=True):
        assert np.abs(output.outputs.data - hidden.numpy()).max() < 1e-4


def test_only_mixed_steps_are_captured(reference, monkeypatch):
    captured = []
    monkeypatch.setattr(StepGraphs, "__init__", lambda self, *arguments: captured.append(arguments[-1]))
    monkeypatch.setattr(StepGraphs, "capture_at_start", lambda self, largest_only: None)
    for runner, decode in (("pooling", []), ("generate", graph_sizes(8, 512)[0])):
        with LLM(reference.path, runner=runner, **ARGUMENTS) as llm:
            worker = llm.llm_engine.client.core.executor.worker.runner
            monkeypatch.setattr(worker, "use_graphs", True)
            monkeypatch.setattr(worker, "compile_kernels", lambda max_tokens: None)
            worker.capture_graphs(512, largest_only=True)
            worker.graphs = None
        assert captured.pop() == (decode, graph_sizes(8, 512)[1])
