"""`quire serve` with ranks in every layout and family answers as one process does: `make tp-matrix`. Each server gets
requests of many kinds at once: chunked prompts, shared prefixes, n, logprobs, grammars, stops, streams."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from tests.entrypoints.server_process import ServerProcess, server_process
from tests.executor.rank_matrix import LAYOUTS, RUN_ALL, RankModels, by_turns, quantization
from tests.spec_decode.test_matrix import FORM

FLAGS = ("--served-model-name", "tiny", "--dtype", "float32", "--block-size", "8", "--cpu-threads", "1")
FLAGS += ("--max-model-len", "144", "--max-num-seqs", "16")
FLAGS += ("--structured-outputs-compile-seconds", "100")  # on a busy machine
MANY = ("--num-gpu-blocks-override", "800")
FEW = "few blocks"  # by family
CHUNKED = ("--max-num-batched-tokens", "48")
SETTINGS: list[tuple[str, ...]] = [
    (*MANY, *CHUNKED),
    (*MANY, *CHUNKED, "--no-async-scheduling"),
    (FEW, "--no-enable-prefix-caching"),
    (*MANY, "--no-async-scheduling"),
]
DRAFTS = {"": (), "ngram": ("--spec-method", "ngram", "--spec-tokens", "3", "--no-spec-adaptive")}
# First those with drafts by turns, then the others.
TURNS = by_turns(SETTINGS)
ALL = [(*run, [*DRAFTS][(place // 2 + place // 8 + half) % 2]) for half in (0, 1) for place, run in enumerate(TURNS)]
PART = [run for run in ALL if run[:2] == ("tp 2 x pp 2", "fp8") and run[3] == "ngram"]

LONG = [40 + i * i % 90 for i in range(120)]  # chunked, and the prefix of another
REQUESTS: list[dict[str, Any]] = [
    {"prompt": LONG, "max_tokens": 24, "logprobs": 2},
    {"prompt": [*LONG[:100], 7, 8, 9], "max_tokens": 24, "stream": True},
    {"prompt": [40, 50, 60], "max_tokens": 40, "logprobs": 1, "presence_penalty": 0.5, "frequency_penalty": 1.2},
    {"prompt": [45, 46, 47] * 9, "max_tokens": 40, "stop": ["7", "e1", "-a"]},
    {"prompt": [*range(40, 70)], "max_tokens": 16, "n": 3, "temperature": 0.9, "seed": 5, "top_p": 0.9},
    {"prompt": [*range(40, 70)], "max_tokens": 40, "structured_outputs": {"json": FORM}},
    {"prompt": [41, 42], "max_tokens": 40, "structured_outputs": {"regex": "([a-f]{2}-){2,6}[0-9]+"}, "stream": True},
    {"prompt": [99] * 64, "max_tokens": 30, "min_tokens": 20, "logit_bias": {"60": 3.0}},
]
EXTENSIONS = ("structured_outputs", "min_tokens", "return_token_ids")


def few_blocks(family: str) -> tuple[str, str]:
    """Enough for one request and not for all, which needs blocks of every group of layers."""
    return "--num-gpu-blocks-override", "72" if family == "gemma3" else "40"


Choice = tuple[str, list[int], str | None, list[float]]


def ask(client: Any, request: dict[str, Any]) -> list[Choice]:
    """Of each completion: text, token ids, why it ended, logprobs."""
    request = {"model": "tiny", "temperature": 0, "return_token_ids": True} | request
    given = {name: value for name, value in request.items() if name not in EXTENSIONS}
    body = {name: value for name, value in request.items() if name in EXTENSIONS}
    response = client.completions.create(**given, extra_body=body)
    parts = [chunk.choices for chunk in response] if request.get("stream") else [response.choices]
    found: dict[int, Choice] = {}
    for choice in (choice for choices in parts for choice in choices):
        text, ids, reason, logprobs = found.get(choice.index, ("", [], None, []))
        mine = choice.logprobs.token_logprobs if choice.logprobs else []
        more = choice.token_ids or []
        found[choice.index] = (text + choice.text, ids + more, choice.finish_reason or reason, logprobs + mine)
    return [found[index] for index in sorted(found)]


def params(request: dict[str, Any]) -> SamplingParams:
    given = {"temperature": 0} | {name: value for name, value in request.items() if name not in ("prompt", "stream")}
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    return SamplingParams(**given)


def choice(one: Any) -> Choice:
    ids = list(one.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(one.logprobs or [], ids, strict=False)]
    return one.text, ids, one.finish_reason, logprobs


def answers(server: ServerProcess) -> list[list[Choice]]:
    """All at once; then the first again, whose prefix may be cached by now."""
    client = server.client()
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        found = list(pool.map(lambda request: ask(client, request), REQUESTS))
    return [*found, ask(client, REQUESTS[0])]


def metric(server: ServerProcess, name: str) -> float:
    found = re.search(rf"^{name}(?:_total)?(?:{{.*}})? (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> RankModels:
    return RankModels(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def serve(models: RankModels, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def start(family: str, method: str | None, *flags: str) -> Any:
        quantized = ("--quantization", method) if method else ()
        folder = tmp_path_factory.mktemp("server")
        return server_process(folder, *FLAGS, "--model", models.target(family), *quantized, *flags)

    return start


@pytest.fixture(scope="module")
def singles(models: RankModels) -> Callable[[str, str | None], list[list[Choice]]]:
    """What one process writes, offline."""

    def generate(family: str, method: str | None) -> list[list[Choice]]:
        sizes = {"max_model_len": 144, "num_gpu_blocks_override": 800, "block_size": 8, "cpu_threads": 1}
        with LLM(models.target(family), dtype="float32", quantization=method, use_tqdm_on_load=False, **sizes) as llm:
            prompts = [{"prompt_token_ids": request["prompt"]} for request in REQUESTS]
            found = llm.generate(prompts, [params(request) for request in REQUESTS], use_tqdm=False)
        choices = [[choice(one) for one in each.outputs] for each in found]
        return [*choices, choices[0]]

    return cache(generate)


@pytest.mark.parametrize(("layout", "family", "number", "drafts"), ALL if RUN_ALL else PART)
def test_servers_answer_as_one_process(
    serve: Callable[..., Any], singles: Callable[..., Any], layout: str, family: str, number: int, drafts: str
) -> None:
    tensor, stages = map(str, LAYOUTS[layout])
    method, preempts = quantization(family, layout), FEW in SETTINGS[number]
    settings = [flag for flag in SETTINGS[number] if flag != FEW] + [*few_blocks(family)] * preempts
    wanted = singles(family, method)
    with serve(family, method, "-tp", tensor, "-pp", stages, *settings, *DRAFTS[drafts]) as server:
        for _ in range(10):  # which requests run together depends on when each arrives
            found = answers(server)
            preempted = metric(server, "quire:num_preemptions")
            if preempted or not preempts:
                break
        server.process.terminate()
        assert server.wait() == 0
    assert (preempted > 0) == preempts
    for request, ours, theirs in zip([*REQUESTS, REQUESTS[0]], found, wanted, strict=True):
        for (text, ids, reason, logprobs), single in zip(ours, theirs, strict=True):
            assert (text, ids, reason) == single[:3], request
            assert logprobs == pytest.approx(single[3], abs=2e-3), request
