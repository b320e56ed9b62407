"""Steps whose last layer is computed for the tokens that are read alone give what whole ones give."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from quire import LLM, SamplingParams
from quire.kernels import native
from quire.messages.lora import LoRARequest
from quire.models.base import WritesLastApart
from quire.models.llama import LlamaForCausalLM
from quire.models.options import ModelOptions
from quire.models.registry import ModelRegistry, model_class
from quire.models.stage import Stage
from quire.worker import model_runner, recorded
from tests.features import encoder_model
from tests.features.test_encoder import images_of
from tests.lora.random_adapters import random_adapter
from tests.tiny_models import CORE, prompts, save_tiny

ALWAYS, NEVER = -(10**6), 10**6  # of MIN_TOKENS_APART
FLOAT32 = {"dtype": "float32"}
NATIVE = {"dtype": "bfloat16", "attention_backend": "native"}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
THREADS, TWO_STAGES = "tests.executor.threads:ThreadsExecutor", "tests.executor.stages:TwoStages"
needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


@pytest.fixture
def steps(monkeypatch):
    """How many tokens there were in steps whose last layers were apart."""
    found, forward_last = [], model_runner.ModelRunner._forward_last

    def noting(self, batch, inputs, *more):
        found.append(len(inputs.input_ids))
        return forward_last(self, batch, inputs, *more)

    monkeypatch.setattr(model_runner.ModelRunner, "_forward_last", noting)
    monkeypatch.setattr(model_runner, "MIN_TOKENS_APART", ALWAYS)
    return found


@contextmanager
def engine(folder, **options):
    sizes = {"max_num_batched_tokens": 48, "max_model_len": 176, "kv_cache_memory_bytes": 1 << 25}
    with LLM(str(folder), **({"skip_tokenizer_init": True, "enable_prefix_caching": False} | sizes | options)) as llm:
        yield llm


def generate(llm, asked=None, params=GREEDY, **more):
    return [one.outputs[0] for one in llm.generate(asked or prompts(), params, use_tqdm=False, **more)]


def apart_and_whole(folder, steps, monkeypatch, asked=None, params=GREEDY, **options):
    """Tokens and logprobs of the same requests, either way."""
    results = []
    for least in (ALWAYS, NEVER):
        monkeypatch.setattr(model_runner, "MIN_TOKENS_APART", least)
        before = len(steps)
        with engine(folder, **options) as llm:
            found = generate(llm, asked, params)
        assert (len(steps) > before) == (least == ALWAYS)
        results.append([(one.token_ids, [{i: p.logprob for i, p in each.items()} for each in one.logprobs])
                        for one in found])  # fmt: skip
    return results


def assert_close(some, whole):
    for (ours, scores), (theirs, others) in zip(some, whole, strict=True):
        assert ours == theirs
        for one, other in zip(scores, others, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("family", [*CORE, "gpt2", "gemma2", "deepseek-v3"])
def test_the_same_as_whole(family, steps, tmp_path, monkeypatch):
    save_tiny(family, tmp_path)
    params = [GREEDY.replace_unchecked() for _ in prompts()]
    params[1].prompt_logprobs = 1  # these are read of every token
    assert_close(*apart_and_whole(tmp_path, steps, monkeypatch, params=params, **FLOAT32))


@pytest.mark.parametrize("family", ["gpt-neox", "deepseek-v32"])
def test_layers_that_are_always_whole(family, steps, tmp_path):
    """One computes attention and MLP side by side, the other selects keys by an index of the queries."""
    save_tiny(family, tmp_path)
    with engine(tmp_path, **FLOAT32) as llm:
        generate(llm)
    assert not steps


@needs_compiler
@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("family", [*CORE, "gpt2", "gemma2", "mixtral", "deepseek-v3"])
def test_the_same_to_the_bit(family, replays, steps, tmp_path, monkeypatch):
    save_tiny(family, tmp_path)
    if not replays:
        monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    backend = {"dtype": "bfloat16"} if family == "deepseek-v3" else NATIVE
    some, whole = apart_and_whole(tmp_path, steps, monkeypatch, **backend)
    assert some == whole


@needs_compiler
def test_only_larger_steps_are_apart(steps, tmp_path, monkeypatch):
    monkeypatch.setattr(model_runner, "MIN_TOKENS_APART", 64)
    save_tiny("llama", tmp_path)
    with engine(tmp_path, max_num_batched_tokens=70, **NATIVE) as llm:
        generate(llm, [{"prompt_token_ids": [5 + i % 90 for i in range(150)]}])
    assert steps == [70, 70]  # then 10 tokens, then one at a time


@needs_compiler
@pytest.mark.parametrize("kind", [FLOAT32, NATIVE], ids=["float32", "native"])
def test_two_ranks(kind, steps, tmp_path, monkeypatch):
    save_tiny("llama", tmp_path)
    ranks = {"distributed_executor_backend": THREADS}
    assert_close(*apart_and_whole(tmp_path, steps, monkeypatch, **kind, **ranks))
    assert len(steps) % 2 == 0


@needs_compiler
@pytest.mark.parametrize("kind", [FLOAT32, NATIVE], ids=["float32", "native"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_last_stage_of_one_layer(family, kind, steps, tmp_path, monkeypatch):
    save_tiny(family, tmp_path)
    stages = {"pipeline_parallel_size": 2, "pipeline_layers": [3, 1], "distributed_executor_backend": TWO_STAGES}
    assert_close(*apart_and_whole(tmp_path, steps, monkeypatch, **kind, **stages))


@needs_compiler
@pytest.mark.parametrize("kind", [FLOAT32, NATIVE], ids=["float32", "native"])
def test_prompts_with_features(kind, steps, tmp_path, monkeypatch):
    save_tiny("llama", tmp_path)
    asked = [{"prompt_token_ids": ids, "features": images_of(ids)} for ids in prompts() if len(ids) > 4]
    options = {"hf_overrides": {"architectures": [encoder_model.ARCHITECTURE]}, "enable_prompt_embeds": True}
    assert_close(*apart_and_whole(tmp_path, steps, monkeypatch, asked, **kind, **options))


@needs_compiler
@pytest.mark.parametrize("kind", [FLOAT32, NATIVE], ids=["float32", "native"])
def test_rows_without_adapters_where_others_may_have_them(kind, steps, tmp_path, monkeypatch):
    adapter = random_adapter(save_tiny("llama", tmp_path), 1)
    lora = LoRARequest("one", 1, str(adapter.save(tmp_path / "adapter")))
    capacity = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    assert_close(*apart_and_whole(tmp_path, steps, monkeypatch, **kind, **capacity))
    monkeypatch.setattr(model_runner, "MIN_TOKENS_APART", ALWAYS)
    with engine(tmp_path, **kind, **capacity) as llm:
        first = generate(llm)
        steps.clear()
        generate(llm, lora_request=lora)
        assert not steps
        assert [one.token_ids for one in generate(llm)] == [one.token_ids for one in first]
        assert steps


def hook_everywhere(model, hook):
    return register_module_forward_hook(lambda module, *call: hook(module, *call) if module is model else None)


PLACES = {
    "the model": lambda model, hook: model.register_forward_hook(hook),
    "the model's input": lambda model, hook: model.register_forward_pre_hook(hook),
    "all modules": hook_everywhere,
    "the last layer": lambda model, hook: model.layers[3].register_forward_hook(hook),
    "its input": lambda model, hook: model.layers[3].register_forward_pre_hook(hook),
    "its attention": lambda model, hook: model.layers[3].self_attn.register_forward_hook(hook),
    "its MLP": lambda model, hook: model.layers[3].mlp.register_forward_pre_hook(hook),
    "its down projection": lambda model, hook: model.layers[3].mlp.down_proj.register_forward_hook(hook),
}


@pytest.mark.parametrize("place", PLACES)
def test_hooks_see_every_token(place, steps, tmp_path):
    save_tiny("llama", tmp_path)
    seen = []
    with engine(tmp_path, **FLOAT32) as llm:
        params = SamplingParams(max_tokens=1)
        [handle] = llm.apply_model(lambda model: PLACES[place](model, lambda _, args, *out: seen.append(len(args[0]))))
        generate(llm, params=params)
        assert sum(seen) == sum(map(len, prompts())) and not steps
        handle.remove()
        generate(llm, params=params)
        assert steps
        [handle] = llm.apply_model(lambda model: model.layers[2].register_forward_hook(lambda *_: None))
        steps.clear()
        generate(llm, params=params)
        assert steps  # those before it are always whole
        handle.remove()


def recompute(module, *names):
    """A class of its own whose methods do the same."""
    kind = type(module)
    body = {name: lambda self, *args, name=name, **more: getattr(kind, name)(self, *args, **more) for name in names}
    module.__class__ = type(f"My{kind.__name__}", (kind,), body)


def assign(module, name):
    method = getattr(module, name)
    setattr(module, name, lambda *args: method(*args))


CHANGES = {
    "model": lambda model: recompute(model, "forward"),
    "layer": lambda model: recompute(model.layers[3], "forward"),
    "attention block": lambda model: recompute(model.layers[3].self_attn, "forward"),
    "attention": lambda model: recompute(model.layers[3].self_attn.attn, "forward"),
    "assigned": lambda model: assign(model.layers[3], "forward"),
    "its own block": lambda model: setattr(model.layers[3], "self_attn", nn.Identity()),
    "its own layer": lambda model: model.layers.__setattr__("3", nn.Identity()),
}


def built(family, folder, stage=None):
    hf = save_tiny(family, folder).config.to_dict()
    return model_class(hf)(hf, ModelOptions(torch.float32, torch.device("cpu"), stage=stage or Stage()))


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_whatever_computes_the_last_layer_otherwise_is_called(family, tmp_path):
    for change in CHANGES.values():
        model = built(family, tmp_path)
        assert isinstance(model, WritesLastApart) and model.writes_last_apart()
        change(model)
        assert isinstance(model, WritesLastApart) and not model.writes_last_apart()


def test_changes_that_last_layers_alone_do_not_bypass(tmp_path):
    model = built("llama", tmp_path)
    recompute(model.layers[2], "forward")
    recompute(model.layers[3].mlp, "forward")
    recompute(model.layers[3].self_attn.attn, "write", "attend")
    assert model.writes_last_apart()
    recompute(model.layers[3].self_attn, "attended")
    assert not model.writes_last_apart()
    assert [built("llama", tmp_path, Stage(i, 2)).writes_last_apart() for i in range(2)] == [False, True]


def test_a_familys_own_forward_sees_every_token(steps, tmp_path):
    seen = []

    class Mine(LlamaForCausalLM):
        def forward(self, input_ids, *args, **more):
            seen.append(len(input_ids))
            return super().forward(input_ids, *args, **more)

    ModelRegistry.register_model("WithForwardForCausalLM", Mine)
    save_tiny("llama", tmp_path)
    with engine(tmp_path, hf_overrides={"architectures": ["WithForwardForCausalLM"]}, **FLOAT32) as llm:
        seen.clear()
        generate(llm, params=SamplingParams(max_tokens=1))
    assert sum(seen) == sum(map(len, prompts())) and not steps
