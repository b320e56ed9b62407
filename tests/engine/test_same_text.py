"""On a CPU a request has the same tokens and logprobs, to the bit, whatever is computed beside it: random schedules of
arrivals, lengths, chunks, cached prefixes, preemptions. `make same-text` has 500 of them."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels import native
from tests.gguf_models import write_random_llama
from tests.tiny_models import save_tiny

SCHEDULES = int(os.environ.get("QUIRE_SCHEDULES", "6"))
# Heads of 64 are computed as those of real models are.
WIDE = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2, "max_position_embeddings": 4096}
MODELS = ["llama", "gemma3", "mixtral", "q4_1", "int8_per_channel"]
SIZES = {"max_model_len": 1600, "block_size": 16, "max_num_seqs": 12, "use_tqdm_on_load": False}
PREFIX = [7 + i * i % 180 for i in range(1100)]

pytestmark = pytest.mark.skipif(
    native.library() is None or native.has_amx(),
    reason="there is no compiler, or AMX, whose products with quantized weights depend on their number of rows",
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options of an engine."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    options: dict[str, Any] = {"model": str(folder), "dtype": "bfloat16", "skip_tokenizer_init": True, **SIZES}
    if request.param == "q4_1":
        file = write_random_llama(folder / "llama.gguf", lambda name: "F32" if "norm" in name else "Q4_1", context=4096)
        return options | {"model": str(file)}
    quantized = request.param == "int8_per_channel"
    save_tiny("llama" if quantized else request.param, folder, **WIDE)
    return options | {"quantization": request.param} if quantized else options


def requests(chance: random.Random) -> Iterator[tuple[dict[str, Any], SamplingParams]]:
    for _ in range(chance.randrange(6, 14)):
        own = [chance.randrange(5, 200) for _ in range(chance.choice([1, 5, 30, 200]))]
        shared = PREFIX[: chance.choice([0, 0, 40, 300, 1100])]
        drawn = {"temperature": 0.8, "seed": chance.randrange(1000)} if chance.random() < 0.3 else {"temperature": 0}
        yield (
            {"prompt_token_ids": shared + own},
            SamplingParams(max_tokens=chance.randrange(1, 40), ignore_eos=True, logprobs=2, **drawn),
        )


def answers(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        (one.outputs[0].token_ids, [{i: p.logprob for i, p in each.items()} for each in one.outputs[0].logprobs])
        for one in outputs
    ]


def test_random_schedules(model: dict[str, Any]) -> None:
    chance = random.Random(0)
    with LLM(**model, num_gpu_blocks_override=400, enable_prefix_caching=False) as alone:
        for number in range(0, SCHEDULES, 3):
            chunk, blocks = chance.choice([48, 100, 700, 4096]), chance.choice([150, 230, 1000])
            options = {"max_num_batched_tokens": chunk, "num_gpu_blocks_override": blocks}
            options |= {"async_scheduling": chance.random() < 0.5, "enable_prefix_caching": chance.random() < 0.7}
            with LLM(**model, **options) as llm:
                for _ in range(min(3, SCHEDULES - number)):
                    prompts, params = map(list, zip(*requests(chance), strict=True))
                    wanted = [answers(alone, [each], [how])[0] for each, how in zip(prompts, params, strict=True)]
                    assert answers(llm, prompts, params) == wanted, options


def test_samples_scored_again_as_prompts(model: dict[str, Any]) -> None:
    """For training on samples: what a token's logprob was when drawn, its prompt logprob is."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0, temperature=1.0, seed=3)
    again = SamplingParams(max_tokens=1, prompt_logprobs=0)
    prompts = [PREFIX[:length] for length in (3, 40, 1015)]
    with LLM(**model, num_gpu_blocks_override=400) as llm:
        drawn = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        texts = [p + list(one.outputs[0].token_ids) for p, one in zip(prompts, drawn, strict=True)]
        scored = llm.generate([{"prompt_token_ids": text} for text in texts], again, use_tqdm=False)
    for prompt, text, first, second in zip(prompts, texts, drawn, scored, strict=True):
        before = [each[t].logprob for t, each in zip(text[len(prompt) :], first.outputs[0].logprobs, strict=True)]
        after = [second.prompt_logprobs[i][text[i]].logprob for i in range(len(prompt), len(text))]
        assert after == before
