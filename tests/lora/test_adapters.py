"""Requests with different adapters and with none in one batch, against models whose weights have them merged."""

import pytest

from quire import SamplingParams
from quire.config.lora import LoRAConfig
from quire.kernels import native
from quire.worker import recorded
from tests.lora.random_adapters import (
    COUNT,
    GREEDY,
    LORA_IDS,
    PROMPTS,
    Case,
    complete,
    engine_with,
    executor,
    finish,
    runner,
    start,
    texts,
)
from tests.tiny_models import greedy

THREADS = "tests.executor.threads:ThreadsExecutor"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Case("llama", tmp_path_factory.mktemp("llama"), attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return Case("qwen3-moe", tmp_path_factory.mktemp("experts"), experts=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Weights as large as real ones: those above are larger, and so are their rounding errors."""
    return Case("llama", tmp_path_factory.mktemp("small"), initializer_range=0.02)


@pytest.fixture(scope="module")
def small_experts(tmp_path_factory):
    return Case("qwen3-moe", tmp_path_factory.mktemp("small_experts"), experts=True, initializer_range=0.02)


SETTINGS = {
    "batched": {},
    "chunked prompts": {"max_num_batched_tokens": 33},
    "one at a time": {"max_num_seqs": 1},
    "preempted": {"num_gpu_blocks_override": 22, "async_depth": 2},
    "synchronous": {"async_scheduling": False},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", ["llama", "experts"])
def test_each_request_gets_the_text_of_its_merged_model(case, settings, request):
    case = request.getfixturevalue(case)
    with case.engine(**SETTINGS[settings]) as engine:
        assert texts(complete(engine, PROMPTS, LORA_IDS, GREEDY)) == case.texts
        if settings == "preempted":
            assert engine.stats.num_preemptions > 0
    assert len({tuple(text) for text in case.texts}) == len(PROMPTS)


@pytest.mark.parametrize("case", ["llama", "experts"])
def test_two_ranks(case, request):
    case = request.getfixturevalue(case)
    with case.engine(distributed_executor_backend=THREADS) as engine:
        assert texts(complete(engine, PROMPTS, LORA_IDS, GREEDY)) == case.texts


def test_the_adapter_matters(llama):
    plain = [greedy(llama.models[0], prompt, COUNT)[0] for prompt in PROMPTS]
    same = [text == base for text, base in zip(llama.texts, plain, strict=True)]
    assert same == [lora_id == 0 for lora_id in LORA_IDS]


def test_blocks_are_shared_only_with_the_same_adapter(llama):
    prompt = PROMPTS[4]
    with llama.engine() as engine:
        cached = []
        for lora_id in (1, 1, 2, 0, 2, 0):
            (output,) = complete(engine, [prompt], [lora_id], GREEDY)
            assert texts([output])[0] == greedy(llama.models[lora_id], prompt, COUNT)[0]
            cached.append(output.num_cached_tokens)
    assert cached == [0, 96, 0, 0, 96, 96]


def test_completions_of_one_prompt_share_its_adapter(llama):
    params = SamplingParams(top_k=1, max_tokens=8, ignore_eos=True, n=3)
    with llama.engine() as engine:
        (output,) = complete(engine, [PROMPTS[4]], [2], params)
    wanted = greedy(llama.models[2], PROMPTS[4], 8)[0]
    assert [list(one.token_ids) for one in output.outputs] == [wanted] * 3


def test_only_steps_with_adapters_ask_for_graphs_with_them(llama):
    asked = set()

    class NoGraphs:
        def run_decode(self, rows, prefix_len, adapters):
            asked.add(("decode", adapters))

        def run_mixed(self, rows, num_tokens, adapters):
            asked.add(("mixed", adapters))

    with llama.engine() as engine:
        runner(engine).graphs = NoGraphs()
        complete(engine, PROMPTS[:2], [0, 0], GREEDY)
        assert asked == {("mixed", False), ("decode", False)}
        asked.clear()
        complete(engine, PROMPTS[:2], [0, 1], GREEDY)
        assert asked == {("mixed", True), ("decode", True)}


def test_a_slot_is_used_again(llama):
    prompt = PROMPTS[1]
    with engine_with(llama.path, llama.adapters[:2]) as engine:
        complete(engine, [prompt], [1], GREEDY)
        executor(engine).remove_adapter(1)
        executor(engine).set_adapter(7, llama.adapters[2].ours)
        found = complete(engine, [prompt] * 3, [7, 2, 0], GREEDY)
    assert texts(found) == [greedy(llama.models[i], prompt, COUNT)[0] for i in (3, 2, 0)]


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8", "attention_backend": "native"}])
@pytest.mark.parametrize("chunk", [256, 33])
def test_replayed_steps_give_the_same(llama, settings, chunk, monkeypatch):
    """With adapters and without; and rows without one get the bits that they have in an engine without adapters."""
    settings = settings | {"max_num_batched_tokens": chunk, "enable_prefix_caching": False}
    # Requests end one after the other: the last steps have rows without adapters only.
    params = [
        SamplingParams(temperature=0, max_tokens=COUNT + (8 if lora_id == 0 else -i), ignore_eos=True, logprobs=2)
        for i, lora_id in enumerate(LORA_IDS)
    ]

    def answers(adapters):
        with engine_with(llama.path, adapters, **settings) as engine:
            found = complete(engine, PROMPTS, LORA_IDS if adapters else [0] * len(PROMPTS), params)
            steps = runner(engine).recorded
            made = set(steps._recorded)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found], steps.replays, made

    replayed, count, made = answers(llama.adapters)
    assert count > COUNT and made == {False, True}
    base, _, made = answers([])
    assert made == {False}
    assert [replayed[i] == base[i] for i in range(len(PROMPTS))] == [lora_id == 0 for lora_id in LORA_IDS]
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert answers(llama.adapters) == (replayed, 0, set())


SCORED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
@pytest.mark.parametrize("experts", [False, True])
def test_packed_weights_are_close_to_the_merged_model(small, small_experts, experts, settings):
    """Terms are added to what packed and quantized weights give. Steps with adapters of experts multiply one expert at
    a time and are not replayed; others are."""
    case = small_experts if experts else small
    with case.engine(max_num_batched_tokens=128, **settings) as engine:
        found = complete(engine, PROMPTS, LORA_IDS, SCORED)
        assert case.worst_error(found, PROMPTS, LORA_IDS) < 0.01
        assert case.worst_error(found, PROMPTS, LORA_IDS[::-1]) > 0.05
        if settings.get("dtype") == "bfloat16":
            steps = runner(engine).recorded
            assert bool(steps.replays) != experts
            complete(engine, PROMPTS[:2], [0, 0], SCORED)
            assert steps.replays


def test_an_unknown_adapter_fails_its_step_and_the_engine_goes_on(llama):
    with llama.engine() as engine:
        start(engine, "wrong", PROMPTS[0], 9, GREEDY)
        failed = finish(engine)["wrong"]
        assert failed.outputs[0].finish_reason == "error"
        assert texts(complete(engine, PROMPTS, LORA_IDS, GREEDY)) == llama.texts


def test_what_is_wrong_with_an_adapter_is_said(llama):
    ours = llama.adapters[0].ours
    key = ("layers.0.self_attn.qkv_proj", "q")
    a, b = ours[key]
    with engine_with(llama.path, llama.adapters[:1], max_loras=2) as engine:
        workers = executor(engine)
        for lora_id, weights, message in (
            (0, ours, "at least 1"),
            (1, ours, "already loaded"),
            (2, {("layers.9.mlp.down_proj", None): (a, b)}, "layers.9.mlp.down_proj .* takes no adapter"),
            (2, {key: (a[:, 1:], b)}, r"A is \[6, 63\] .* must be \[rank, 64\] and \[64, rank\]"),
            (2, {key: (a.repeat(2, 1), b.repeat(1, 2))}, "its rank is 12; at most 8"),
        ):
            with pytest.raises(ValueError, match=message):
                workers.set_adapter(lora_id, weights)
        workers.set_adapter(2, ours)
        with pytest.raises(ValueError, match=r"2 adapters are loaded \(max_loras\): \[1, 2\]"):
            workers.set_adapter(3, ours)
        with pytest.raises(ValueError, match="adapter 5 is not loaded; loaded"):
            workers.remove_adapter(5)


def test_a_request_fails_if_its_adapter_is_removed(llama):
    with llama.engine() as engine:
        for i, lora_id in enumerate(LORA_IDS):
            start(engine, str(i), PROMPTS[i], lora_id, GREEDY)
        engine.step()
        executor(engine).remove_adapter(1)
        done = finish(engine)
        assert [done[str(i)].outputs[0].finish_reason for i in (0, 4)] == ["error"] * 2
        with pytest.raises(ValueError, match="lora_id 1 was an adapter that has been removed"):
            executor(engine).set_adapter(1, llama.adapters[0].ours)
        executor(engine).set_adapter(9, llama.adapters[0].ours)
        ids = [9 if lora_id == 1 else lora_id for lora_id in LORA_IDS]
        assert texts(complete(engine, PROMPTS, ids, GREEDY)) == llama.texts


def test_an_engine_without_capacity_says_so(llama):
    with engine_with(llama.path, []) as engine, pytest.raises(ValueError, match="without capacity for adapters"):
        executor(engine).set_adapter(1, llama.adapters[0].ours)


def test_models_without_layers_of_ours_are_refused(llama):
    with (
        pytest.raises(ValueError, match="LoRA is not available yet for TransformersModel; leave out enable_lora"),
        llama.engine(model_impl="transformers"),
    ):
        pass


@pytest.mark.parametrize(("name", "value"), [("max_loras", 0), ("max_lora_rank", 1000), ("max_lora_rank", "8")])
def test_capacity_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be between 1 and "):
        LoRAConfig(**{name: value})
