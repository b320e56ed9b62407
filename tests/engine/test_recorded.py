"""Decode steps that are replayed give what the model gives, and what cannot be replayed is not."""

import subprocess
import sys

import pytest
import torch

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.kernels.native.replay import Recording
from quire.worker import recorded
from tests.tiny_models import CORE, prompts, save_tiny

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

KINDS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8", "attention_backend": "native"},
}


# LayerNorm, biases, MLPs without a gate; one has learned positions, the other attention and MLP side by side.
OTHERS = ("gpt2", "gpt-neox")


@pytest.fixture(scope="module", params=CORE + OTHERS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return str(folder)


def answers(model, **arguments):
    """Of requests that end one after the other, so that steps of all sizes occur."""
    lengths = [SamplingParams(temperature=0, max_tokens=8 + 7 * i, ignore_eos=True, logprobs=2) for i in range(5)]
    settings = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 176, **arguments}
    with LLM(model, skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate(prompts()[:5], lengths, use_tqdm=False)
        steps = llm.llm_engine.client.core.executor.worker.runner.recorded
        found = [(o.outputs[0].token_ids, [sorted(p.items()) for p in o.outputs[0].logprobs]) for o in outputs]
        return found, sorted(steps._steps)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_give_the_same(model, kind, monkeypatch):
    replayed, sizes = answers(model, **KINDS[kind])
    assert sizes == [1, 2, 3, 4, 5]
    monkeypatch.setattr(recorded, "MAX_ROWS", 0)
    plain, sizes = answers(model, **KINDS[kind])
    assert sizes == []
    assert replayed == plain


def test_among_preemptions(model, monkeypatch):
    few = {"num_gpu_blocks_override": 30, "async_depth": 2, **KINDS["bf16"]}
    replayed, sizes = answers(model, **few)
    assert sizes
    monkeypatch.setattr(recorded, "MAX_ROWS", 0)
    assert [ids for ids, _ in replayed] == [ids for ids, _ in answers(model, **few)[0]]


def test_what_torch_computes_is_not_replayed(model):
    _, sizes = answers(model, dtype="float32")  # torch multiplies
    assert sizes == []


def test_any_work_outside_the_kernels_is_noticed():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with Recording() as recording:
        native.rms_norm(x, None, weight, 1e-5)
    assert recording.faithful
    with Recording() as recording:
        native.rms_norm(x, None, weight, 1e-5) + 1
    assert not recording.faithful
    with Recording() as recording:
        native.argmax(x)  # a kernel, but not one of those
    assert not recording.faithful


def test_replaying_reads_what_the_inputs_hold_by_then():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with Recording() as recording:
        out = native.rms_norm(x, None, weight, 1e-5)
    again = recording.replayed()
    x.copy_(torch.randn(2, 8))
    again()
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, (8,), weight, 1e-5))


def test_recording_does_not_bring_in_a_compiler():
    lines = (
        "import sys, torch",
        "from quire.kernels import native",
        "from quire.kernels.native.replay import Recording",
        "with Recording(): native.rms_norm(torch.ones(2, 8), None, torch.ones(8), 1e-5)",
        "assert 'torch._dynamo' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
