"""The engine on a GPU: equal to the CPU's in float32 for any schedule, close in bf16, reproducible."""

import random

import numpy as np
import pytest
import torch

from tests.tiny_models import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHARED = 640  # tokens of a prefix long enough to be attended to once for all rows


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Long positions, so that contexts can be split and prefixes shared."""
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny("qwen3", folder, max_position_embeddings=2048)
    return str(folder)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    """Weights as large as real ones: those above are larger, and so are their rounding errors."""
    folder = tmp_path_factory.mktemp("plain")
    save_tiny("qwen3", folder, initializer_range=0.02)
    return str(folder)


def engine(path, **arguments):
    from quire import LLM

    settings = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 27,
    }
    return LLM(path, **(settings | arguments))


def prompts(count, low, high, shared=0, seed=0):
    rng = random.Random(seed)
    common = [rng.randrange(4, 60) for _ in range(shared)]
    return [
        {"prompt_token_ids": common + [rng.randrange(4, 60) for _ in range(rng.randint(low, high))]}
        for _ in range(count)
    ]


def tokens(outputs):
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def greedy(max_tokens=24, **more):
    from quire import SamplingParams

    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, **more)


SHAPES = {
    "mixed": (prompts(12, 2, 300), {}),
    "chunked": (prompts(6, 100, 700), {"max_num_batched_tokens": 64}),
    "preempted": (prompts(8, 60, 90), {"num_gpu_blocks_override": 64, "kv_cache_memory_bytes": None}),
    "shared prefix": (prompts(16, 4, 40, SHARED), {}),
    "one": (prompts(1, 700, 700), {}),
    "many": (prompts(96, 5, 30), {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_equal_the_cpu(model, shape):
    asked, arguments = SHAPES[shape]
    with engine(model, device="cpu", **arguments) as llm:
        wanted = tokens(llm.generate(asked, greedy(), use_tqdm=False))
    with engine(model, device="cuda", **arguments) as llm:
        assert tokens(llm.generate(asked, greedy(), use_tqdm=False)) == wanted
        # Again, with every prompt's blocks in the cache.
        assert tokens(llm.generate(asked, greedy(), use_tqdm=False)) == wanted


def test_bf16_logprobs_are_close_to_float32(plain_model):
    asked = prompts(8, 20, 200, seed=3)
    params = greedy(1, logprobs=5, prompt_logprobs=1)
    found = {}
    for dtype in ("float32", "bfloat16"):
        with engine(plain_model, device="cuda", dtype=dtype, max_model_len=512) as llm:
            found[dtype] = llm.generate(asked, params, use_tqdm=False)
    for exact, near in zip(found["float32"], found["bfloat16"], strict=True):
        for a, b in zip(exact.prompt_logprobs[1:], near.prompt_logprobs[1:], strict=True):
            token = next(iter(a))  # the prompt's own comes first
            assert abs(a[token].logprob - b[token].logprob) < 2e-2


def test_the_same_seed_gives_the_same_tokens(model):
    from quire import SamplingParams

    params = SamplingParams(temperature=0.9, top_p=0.9, seed=7, ignore_eos=True, max_tokens=40, n=2)
    asked = prompts(20, 5, 60)
    with engine(model, device="cuda", dtype="bfloat16") as llm:
        first, second = (tokens(llm.generate(asked, params, use_tqdm=False)) for _ in range(2))
    assert first == second


def test_an_fp8_cache_holds_twice_the_blocks_and_speaks_sense(model):
    counts, texts = [], []
    for kept in ("auto", "fp8"):
        with engine(model, device="cuda", dtype="bfloat16", kv_cache_dtype=kept) as llm:
            counts.append(llm.llm_engine.client.core.num_blocks)
            texts.append(tokens(llm.generate(prompts(4, 30, 60), greedy(8), use_tqdm=False)))
    assert 1.9 < counts[1] / counts[0] < 2.1
    same = sum(a == b for x, y in zip(*texts, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 16  # of 32: random weights decide by a hair


@pytest.mark.parametrize("kept", ["fp8_per_token_head", "int8_per_token_head"])
def test_a_cache_with_a_scale_per_token_and_head(model, kept):
    """Graphs, prompts in chunks and cached prefixes give the same tokens; most are those of a full cache."""
    found = {}
    for dtype, arguments in (("auto", {}), (kept, {}), (kept, {"enforce_eager": True}), (kept, {"block_size": 32})):
        with engine(model, device="cuda", dtype="bfloat16", kv_cache_dtype=dtype, **arguments) as llm:
            first, second = (tokens(llm.generate(prompts(4, 30, 60), greedy(8), use_tqdm=False)) for _ in range(2))
            found[dtype, *arguments] = first
            same = sum(a == b for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))
            assert same >= 24  # of 32: random weights decide by a hair
    for ours in found.values():
        same = sum(a == b for x, y in zip(found["auto",], ours, strict=True) for a, b in zip(x, y, strict=True))
        assert same >= 16


def test_an_fp8_cache_with_the_checkpoints_scales(model, tmp_path):
    """Scales of a power of two move no number to another, except those that are cut or too small for fp8."""
    from tests.models.test_kv_scales import with_scales

    found = []
    for scale in (1.0, 0.25, 0.0625):
        path = str(with_scales(model, tmp_path / str(scale), scale))
        with engine(path, device="cuda", dtype="bfloat16", kv_cache_dtype="fp8") as llm:
            found.append(tokens(llm.generate(prompts(4, 30, 60), greedy(8), use_tqdm=False)))
    for ours in found[1:]:
        same = sum(a == b for x, y in zip(found[0], ours, strict=True) for a, b in zip(x, y, strict=True))
        assert same >= 16


def test_ten_thousand_steps_allocate_nothing_more(model):
    with engine(model, device="cuda", dtype="bfloat16", max_model_len=512) as llm:

        def some(seed):
            llm.generate(prompts(24, 5, 40, seed=seed), greedy(400), use_tqdm=False)
            torch.cuda.synchronize()
            return torch.cuda.memory_reserved()

        some(0)
        before = some(1)
        after = [some(seed) for seed in range(2, 27)]
    assert after[-1] <= before


def test_memory_stays_within_its_share(tmp_path):
    """With long rows, a vocabulary, penalties and logprobs: everything beside weights and cache."""
    from quire import LLM

    save_tiny(
        "qwen3", tmp_path, max_position_embeddings=131_072, vocab_size=32_000, num_key_value_heads=8,
        num_attention_heads=8, head_dim=128, num_hidden_layers=4,
    )  # fmt: skip
    share = 0.1
    settings = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_num_seqs": 1024}
    with LLM(str(tmp_path), device="cuda", gpu_memory_utilization=share, **settings) as llm:
        params = greedy(16, repetition_penalty=1.1, logprobs=5)
        llm.generate(prompts(1024, 5, 60), params, use_tqdm=False)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        assert 0.7 * share * total < total - free <= share * total


def test_block_copies_do_not_wait_for_the_device(model):
    from quire.messages.plan import BlockAppends, SchedulerOutput

    with engine(model, device="cuda") as llm:
        runner = llm.llm_engine.client.core.executor.worker.runner
        for tensor in runner.kv_tensors:
            tensor[3].fill_(7)
        none = np.zeros(0, dtype=np.int32)
        plan = SchedulerOutput(0, none, none, [], [], BlockAppends(), [(3, 5), (3, 6)], ())
        runner._apply_changes(plan)  # one-time allocations are done now
        torch.cuda.set_sync_debug_mode("error")
        try:
            runner._apply_changes(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all((tensor[[5, 6]] == 7).all() for tensor in runner.kv_tensors)
