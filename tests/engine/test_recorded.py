"""Replayed steps equal the model's, and steps that cannot be replayed are not."""

import subprocess
import sys

import pytest
import torch

from quire import LLM, SamplingParams
from quire.attention.group_backends import GroupBackends
from quire.kernels import native
from quire.kernels.native.replay import NotReplayableError, Recording
from quire.kernels.prepare_inputs import PreparedInputs
from quire.worker import model_runner, recorded
from tests.tiny_models import CORE, prompts, save_tiny

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

KINDS = {
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8", "attention_backend": "native"},
    "int8_per_channel": {"dtype": "float32", "quantization": "int8_per_channel", "attention_backend": "native"},
}


# LayerNorm, biases, MLPs without a gate; one has learned positions, the other attention and MLP side by side.
OTHERS = ("gpt2", "gpt-neox")


@pytest.fixture(scope="module", params=CORE + OTHERS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return str(folder)


def answers(model, count=5, **arguments):
    """Of requests that end one after the other, so that steps of all sizes occur; and how many steps were replayed."""
    lengths = [SamplingParams(temperature=0, max_tokens=8 + 7 * i, ignore_eos=True, logprobs=2) for i in range(count)]
    settings = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 176, **arguments}
    with LLM(model, skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate(prompts()[:count], lengths, use_tqdm=False)
        steps = llm.llm_engine.client.core.executor.worker.runner.recorded
        found = [(o.outputs[0].token_ids, [sorted(p.items()) for p in o.outputs[0].logprobs]) for o in outputs]
        return found, steps.replays if steps is not None else 0


@pytest.mark.parametrize("chunk", [None, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_give_the_same(model, kind, chunk, monkeypatch):
    settings = KINDS[kind] | ({"max_num_batched_tokens": chunk} if chunk else {})
    replayed, count = answers(model, **settings)
    assert count >= 8 + 7 * 4
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    plain, count = answers(model, **settings)
    assert count == 0
    assert replayed == plain


@pytest.mark.parametrize("kind", ["bf16", "int8_per_channel"])
def test_steps_of_many_tokens(model, kind, monkeypatch):
    """Of which threads take blocks through all calls between two attentions."""
    asked = [{"prompt_token_ids": [5 + (7 * i + 3 * j) % 90 for j in range(75 + i)]} for i in range(10)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)
    settings = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 176, "cpu_threads": 2, **KINDS[kind]}

    def found():
        with LLM(model, skip_tokenizer_init=True, **settings) as llm:
            outputs = [o.outputs[0] for o in llm.generate(asked, params, use_tqdm=False)]
            return [(o.token_ids, [sorted(p.items()) for p in o.logprobs]) for o in outputs]

    replayed = found()
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert replayed == found()


def test_larger_steps_are_run_among_replayed_ones(model, monkeypatch):
    monkeypatch.setattr(recorded, "MAX_TOKENS", 3)
    some, replays = answers(model, **KINDS["bf16"])
    assert 0 < replays < 8 + 7 * 4
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert some == answers(model, **KINDS["bf16"])[0]


def test_a_shared_prefix_is_replayed(model, monkeypatch):
    monkeypatch.setattr(model_runner, "MIN_SHARING_ROWS", 2)
    monkeypatch.setattr(model_runner, "MIN_SHARED_PREFIX", 16)
    shared, run = [], recorded.RecordedSteps.run

    def noting(self, rows, query_start, inputs, prefix, *more):
        shared.append(prefix)
        return run(self, rows, query_start, inputs, prefix, *more)

    monkeypatch.setattr(recorded.RecordedSteps, "run", noting)
    asked = [{"prompt_token_ids": [*range(5, 53), 60 + i]} for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"kv_cache_memory_bytes": 1 << 25, "max_model_len": 176, "async_scheduling": False, **KINDS["bf16"]}

    def texts():
        with LLM(model, skip_tokenizer_init=True, **settings) as llm:
            llm.generate(asked[:1], params, use_tqdm=False)
            layers = llm.llm_engine.client.core.executor.worker.model.cache_layers()
            windows = any(layer.features.window for layer in layers)
            return [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)], windows

    replayed, windows = texts()
    assert any(shared) != windows  # no prefix is attended to at once where some layers see a window of it
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert replayed == texts()[0]


def test_among_preemptions(model, monkeypatch):
    few = {"num_gpu_blocks_override": 30, "async_depth": 2, **KINDS["bf16"]}
    replayed, count = answers(model, **few)
    assert count
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert [ids for ids, _ in replayed] == [ids for ids, _ in answers(model, **few)[0]]


def test_what_torch_computes_is_not_replayed(model):
    assert answers(model, dtype="float32")[1] == 0  # torch multiplies


def test_any_work_outside_the_kernels_is_noticed():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with Recording(2):
        native.rms_norm(x, None, weight, 1e-5)
    with pytest.raises(NotReplayableError, match="torch computes aten"), Recording(2):
        native.rms_norm(x, None, weight, 1e-5) + 1
    with pytest.raises(NotReplayableError, match="quire_argmax"), Recording(2):
        native.argmax(x)  # a kernel, but not one of those
    part = x[:1]
    with pytest.raises(NotReplayableError, match="1 rows in a step of 2"), Recording(2):
        native.rms_norm(part, None, weight, 1e-5)  # it may be any part of the step


class Toy(torch.nn.Module):
    """Adds rows of a table, those of the ids, in one call; or in two for more than ten tokens."""

    def __init__(self, twice=False):
        super().__init__()
        self.table, self.twice = torch.arange(400.0).view(100, 4), twice

    def embed_tokens(self, ids):
        return self.table[ids] * 0

    def forward(self, ids, positions, ctx, inputs_embeds):
        x = native.add_rows(inputs_embeds, self.table, ids)
        return native.add_rows(x, self.table, ids) if self.twice and len(ids) > 10 else x


def run_toy(toy):
    ids, count = torch.tensor([7, 3, 9]), 3
    inputs = PreparedInputs(ids, torch.arange(count), [], torch.tensor([count]))
    return recorded.RecordedSteps(toy, GroupBackends([]), [], []).run(
        torch.zeros(1), torch.tensor([0, count]), inputs, 0
    )


def test_a_model_that_looks_at_ids_gets_them():
    toy = Toy()
    torch.testing.assert_close(*run_toy(toy), toy.table[[7, 3, 9]])


def test_a_model_whose_calls_depend_on_the_number_of_tokens_is_not_replayed():
    assert run_toy(Toy(twice=True)) is None


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "falcon-rw", "gemma2"])
def test_experts_sinks_alibi_and_soft_caps(family, tmp_path, monkeypatch):
    save_tiny(family, tmp_path)
    replayed, count = answers(str(tmp_path), max_num_batched_tokens=33, **KINDS["bf16"])
    assert count
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert replayed == answers(str(tmp_path), max_num_batched_tokens=33, **KINDS["bf16"])[0]


def test_replaying_reads_what_the_inputs_hold_by_then_for_as_many_rows():
    x, weight = torch.randn(4, 2, 8), torch.ones(8)
    with Recording(4) as recording:
        out = native.rms_norm(x.view(8, 8), None, weight, 1e-5)
    again = recording.replayed()
    x.copy_(torch.randn(4, 2, 8))
    out.fill_(7)
    again(3, 3, 0)
    torch.testing.assert_close(out[:6], torch.nn.functional.rms_norm(x.view(8, 8)[:6], (8,), weight, 1e-5))
    assert (out[6:] == 7).all()


def test_buffers_are_reused_when_no_view_remains():
    x, weight = torch.randn(4, 8), torch.ones(8)
    with Recording(4) as recording:
        first = native.rms_norm(x, None, weight, 1e-5)
        view = first.view(2, 16)
        place = first.data_ptr()
        del first
        second = native.rms_norm(x, None, weight, 1e-5)
        assert second.data_ptr() != place  # the view is there
        del view
        third = native.rms_norm(second, None, weight, 1e-5)
        assert third.data_ptr() == place
    assert recording.nbytes == 2 * x.nbytes


def test_recording_does_not_bring_in_a_compiler():
    lines = (
        "import sys, torch",
        "from quire.kernels import native",
        "from quire.kernels.native.replay import Recording",
        "x, weight = torch.ones(2, 8), torch.ones(8)",
        "with Recording(2): native.rms_norm(x, None, weight, 1e-5)",
        "assert 'torch._dynamo' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_long_rows_beside_short_ones(tmp_path, monkeypatch):
    """Their keys are split among threads; the recording was made for rows of one key."""
    save_tiny("llama", tmp_path, max_position_embeddings=4096)
    long = [{"prompt_token_ids": [5 + i * 7 % 190 for i in range(count)]} for count in (2040, 3500)]
    asked = [prompts()[0], *long, prompts()[1]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)

    def answers_to(requests):
        settings = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 4000, **KINDS["bf16"]}
        with LLM(str(tmp_path), skip_tokenizer_init=True, **settings) as llm:
            outputs = llm.generate(requests, params, use_tqdm=False)
            steps = llm.llm_engine.client.core.executor.worker.runner.recorded
            return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs], steps.replays

    replayed, count = answers_to(asked)
    assert count >= 20
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert answers_to(asked) == (replayed, 0)
