"""Failures on a GPU: of one step, of a capture, or of the device itself."""

import itertools
import subprocess
import sys

import pytest
import torch

from tests.gpu.test_engine import engine, greedy, prompts, tokens
from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARED = 640  # tokens of a prefix long enough to be attended to once for all rows

LOSE_DEVICE = """
import sys, torch
from quire import LLM, SamplingParams
from quire.messages.plan import DeviceLostError

llm = LLM(sys.argv[1], device="cuda", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=128,
          kv_cache_memory_bytes=1 << 26, enforce_eager=True)
model = llm.llm_engine.client.core.executor.worker.runner.model
compute = model.compute_logits
model.compute_logits = lambda hidden: compute(hidden)[torch.full((len(hidden),), 1 << 20, device="cuda")]
try:
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=4), use_tqdm=False)
except DeviceLostError as error:
    print("lost:", error, flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", folder, max_position_embeddings=2048)
    return str(folder)


def test_a_lost_device_ends_the_engine(model):
    done = subprocess.run([sys.executable, "-c", LOSE_DEVICE, model], capture_output=True, text=True, timeout=300)
    assert "lost: the device no longer computes" in done.stdout, done.stderr[-3000:]


def test_a_failed_capture_leaves_its_steps_eager_and_right(model, monkeypatch, caplog):
    asked = prompts(16, 4, 40, SHARED)
    with engine(model, device="cuda") as llm:
        wanted = tokens(llm.generate(asked, greedy(), use_tqdm=False))
    with engine(model, device="cuda") as llm:
        graphs = llm.llm_engine.client.core.executor.worker.runner.graphs
        compute = graphs.compute

        def failing(key, buffers):
            logits = compute(key, buffers)
            if torch.cuda.is_current_stream_capturing():
                raise torch.OutOfMemoryError("no memory for this graph")
            return logits

        monkeypatch.setattr(graphs, "compute", failing)
        assert tokens(llm.generate(asked, greedy(), use_tqdm=False)) == wanted
        assert "no memory for this graph" in caplog.text
        monkeypatch.setattr(graphs, "compute", compute)
        assert tokens(llm.generate(prompts(4, 5, 30), greedy(), use_tqdm=False))


def test_a_step_that_fails_between_experts_kernels_leaves_no_counts():
    from quire.kernels.moe import ExpertWeights, moe_triton
    from quire.kernels.moe_routing import Routing
    from quire.kernels.triton.moe_route import route
    from quire.kernels.workspace import reset_shared_workspaces

    device = torch.device("cuda", 0)
    x, logits = torch.randn(200, 64, device=device).bfloat16(), torch.randn(200, 8, device=device)
    gate_up, down = (torch.randn(8, *shape, device=device).bfloat16() * 0.1 for shape in ((64, 64), (64, 32)))
    w, routing = ExpertWeights(gate_up, down), Routing(2)
    wanted = moe_triton(x, logits, w, routing)
    route(logits, routing, count=True)  # and no kernel that resets the counts
    reset_shared_workspaces()
    assert torch.equal(moe_triton(x, logits, w, routing), wanted)


def test_the_logits_of_all_graphs_share_memory(model):
    with engine(model, device="cuda", max_num_seqs=256) as llm:
        captured = llm.llm_engine.client.core.executor.worker.runner.graphs._captured.values()
        spans = sorted((step.logits.data_ptr(), step.logits.nbytes) for step in captured)
    assert any(at + size > after for (at, size), (after, _) in itertools.pairwise(spans))
