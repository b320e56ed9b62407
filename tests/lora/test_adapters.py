"""Requests with different adapters and with none in one batch, against models whose weights have them merged."""

import pytest

from quire import SamplingParams
from quire.config.lora import LoRAConfig
from quire.kernels import native
from quire.messages.lora import LoRARequest
from quire.worker import recorded
from tests.lora.random_adapters import (
    COUNT,
    GREEDY,
    LORA_IDS,
    PROMPTS,
    Case,
    complete,
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
        assert texts(case.complete(engine, PROMPTS, LORA_IDS, GREEDY)) == case.texts
        if settings == "preempted":
            assert engine.stats.num_preemptions > 0
    assert len({tuple(text) for text in case.texts}) == len(PROMPTS)


@pytest.mark.parametrize("case", ["llama", "experts"])
def test_two_ranks(case, request):
    case = request.getfixturevalue(case)
    with case.engine(distributed_executor_backend=THREADS, fully_sharded_loras=True) as engine:
        assert texts(case.complete(engine, PROMPTS, LORA_IDS, GREEDY)) == case.texts


def test_the_adapter_matters(llama):
    plain = [greedy(llama.models[0], prompt, COUNT)[0] for prompt in PROMPTS]
    same = [text == base for text, base in zip(llama.texts, plain, strict=True)]
    assert same == [lora_id == 0 for lora_id in LORA_IDS]


def test_blocks_are_shared_only_with_the_same_adapter(llama, tmp_path):
    """By its content: what a number stands for may change, and one adapter may have several."""
    prompt = PROMPTS[4]
    with llama.engine(max_loras=2) as engine:
        cached = []
        for number in (1, 1, 2, 0, 2, 0, 3, 1):
            (output,) = llama.complete(engine, [prompt], [number], GREEDY)
            assert texts([output])[0] == greedy(llama.models[number], prompt, COUNT)[0]
            assert output.lora_request == llama.lora(number)
            cached.append(output.num_cached_tokens)
        assert cached == [0, 96, 0, 0, 96, 96, 0, 96]
        copied = llama.adapters[0].save(tmp_path / "copy")
        (output,) = complete(engine, [prompt], [LoRARequest("copy", 7, str(copied))], GREEDY)
        assert output.num_cached_tokens == 96
        llama.adapters[1].save(copied)
        engine.remove_lora(7)
        (output,) = complete(engine, [prompt], [LoRARequest("copy", 7, str(copied))], GREEDY)
        assert texts([output])[0] == greedy(llama.models[2], prompt, COUNT)[0] and output.num_cached_tokens == 96


def test_completions_of_one_prompt_share_its_adapter(llama):
    params = SamplingParams(top_k=1, max_tokens=8, ignore_eos=True, n=3)
    with llama.engine() as engine:
        (output,) = llama.complete(engine, [PROMPTS[4]], [2], params)
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
        llama.complete(engine, PROMPTS[:1], [1], GREEDY)  # from here on it has its slot
        runner(engine).graphs = NoGraphs()
        llama.complete(engine, PROMPTS[:2], [0, 0], GREEDY)
        assert asked == {("mixed", False), ("decode", False)}
        asked.clear()
        llama.complete(engine, PROMPTS[:2], [0, 1], GREEDY)
        assert asked == {("mixed", True), ("decode", True)}


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False}, {"max_num_batched_tokens": 33}])
def test_more_adapters_than_slots(llama, settings):
    """Requests wait for a slot, in order, and get their own adapter's text."""
    with llama.engine(max_loras=1, max_cpu_loras=2, **settings) as engine:
        for _ in range(2):
            assert texts(llama.complete(engine, PROMPTS, LORA_IDS, GREEDY)) == llama.texts
        stats = engine.stats.adapters
        assert stats.num_evicted >= 4 and stats.num_loads > 3 and stats.waiting == ()


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

    def answers(numbers, **more):
        with llama.engine(**settings, **more) as engine:
            for number in set(numbers) - {0}:
                engine.add_lora(llama.lora(number))
            found = llama.complete(engine, PROMPTS, numbers, params)
            steps = runner(engine).recorded
            made = {adapted for adapted, _ in steps._recorded}
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found], steps.replays, made

    replayed, count, made = answers(LORA_IDS)
    assert count > COUNT and made == {False, True}
    base, _, made = answers([0] * len(PROMPTS), enable_lora=False)
    assert made == {False}
    assert [replayed[i] == base[i] for i in range(len(PROMPTS))] == [lora_id == 0 for lora_id in LORA_IDS]
    monkeypatch.setattr(recorded, "MAX_TOKENS", 0)
    assert answers(LORA_IDS) == (replayed, 0, set())


SCORED = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=1)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
@pytest.mark.parametrize("experts", [False, True])
def test_packed_weights_are_close_to_the_merged_model(small, small_experts, experts, settings):
    """Terms are added to what packed and quantized weights give. Steps with adapters of experts multiply one expert at
    a time and are not replayed; others are."""
    case = small_experts if experts else small
    with case.engine(max_num_batched_tokens=128, **settings) as engine:
        case.complete(engine, PROMPTS[:3], [1, 2, 3], SCORED)  # from here on all have their slots
        steps = runner(engine).recorded
        before = steps.replays if steps is not None else 0
        found = case.complete(engine, PROMPTS, LORA_IDS, SCORED)
        assert case.worst_error(found, PROMPTS, LORA_IDS) < 0.01
        assert case.worst_error(found, PROMPTS, LORA_IDS[::-1]) > 0.05
        if settings.get("dtype") == "bfloat16":
            assert (steps.replays > before) != experts
            case.complete(engine, PROMPTS[:2], [0, 0], SCORED)
            assert steps.replays


def test_adapters_ahead_of_requests(llama):
    with llama.engine(max_loras=2) as engine:
        assert engine.list_loras() == set()
        assert engine.add_lora(llama.lora(1)) and engine.add_lora(llama.lora(3)) and engine.add_lora(llama.lora(1))
        assert engine.list_loras() == {1, 3}
        assert engine.pin_lora(3)
        with pytest.raises(ValueError, match="one slot must stay free"):
            engine.pin_lora(1)
        with pytest.raises(ValueError, match="adapter 9 is not loaded"):
            engine.pin_lora(9)
        assert texts(llama.complete(engine, PROMPTS, LORA_IDS, GREEDY)) == llama.texts
        assert engine.remove_lora(1) and not engine.remove_lora(1)
        start(engine, "used", PROMPTS[0], llama.lora(2), GREEDY)
        with pytest.raises(ValueError, match="adapter 'adapter2' is in use by 1 requests"):
            engine.remove_lora(2)
        assert finish(engine)["used"].outputs[0].finish_reason == "length"


def test_an_engine_without_room_says_so(llama):
    with llama.engine(enable_lora=False) as engine:
        with pytest.raises(ValueError, match="started without room for adapters"):
            start(engine, "x", PROMPTS[0], llama.lora(1), GREEDY)
        with pytest.raises(ValueError, match="started without room for adapters"):
            engine.add_lora(llama.lora(1))


def test_options_that_do_not_fit(llama):
    with pytest.raises(ValueError, match="lora_dtype is float16; allowed: auto, or the model's, float32"):
        llama.engine(lora_dtype="float16").__enter__()
    with (
        llama.engine(lora_target_modules=("q_proj",), lora_dtype="float32", default_mm_loras={}) as engine,
        pytest.raises(ValueError, match=r"takes no adapter in this model: .*--lora-target-modules leaves it out"),
    ):
        engine.add_lora(llama.lora(1))


@pytest.mark.parametrize(("name", "value"), [("max_loras", 0), ("max_lora_rank", 1000), ("max_lora_rank", "8")])
def test_capacity_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"{name}"):
        LoRAConfig(**{name: value})
    with pytest.raises(ValueError, match="max_cpu_loras is 2, max_loras 3"):
        LoRAConfig(max_loras=3, max_cpu_loras=2)
