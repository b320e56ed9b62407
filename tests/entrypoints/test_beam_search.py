"""Beam search against transformers' own, on tiny random models in float32."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

from quire import LLM
from quire.config import EngineConfig
from quire.config.server import ServerConfig
from quire.engine.async_llm import AsyncLLM
from quire.sampling_params import BeamSearchParams
from tests.entrypoints.stub_server import stub_engine, stub_server
from tests.tiny_models import prompts, save_tiny

ENDS = list(range(3, 211, 8))
PROMPTS = prompts((5, 17, 40))


class Tiny:
    """A checkpoint and transformers' view of it. EOS is made likely, so that beams end at different lengths."""

    def __init__(self, family: str, folder, **overrides) -> None:
        self.path = str(folder)
        self.model = save_tiny(family, folder, **overrides)

    @torch.no_grad()
    def search(self, prompt: list[int], params: BeamSearchParams, **more) -> tuple[list[list[int]], list[float]]:
        """Sequences without their padding, and their scores."""
        found = self.model.generate(
            torch.tensor([prompt]),
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            **more,
        )
        sequences = []
        for row in found.sequences.tolist():
            made = row[len(prompt) :]
            ends = [i for i, token in enumerate(made) if token in (self.model.generation_config.eos_token_id or [])]
            sequences.append(prompt + (made[: ends[0] + 1] if ends else made))
        return sequences, found.sequences_scores.tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beams")
    # A flat distribution over few tokens: the end comes up among the best every few steps.
    return Tiny("llama", folder, vocab_size=211, initializer_range=0.06, eos_token_id=ENDS)


ARGUMENTS = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 24, "skip_tokenizer_init": True, "max_logprobs": 64}


def start(tiny: Tiny, **arguments) -> LLM:
    return LLM(tiny.path, **{**ARGUMENTS, **arguments})


@pytest.fixture(scope="module")
def llm(tiny):
    with start(tiny) as llm:
        yield llm


def same(output, expected: tuple[list[list[int]], list[float]]) -> None:
    sequences, scores = expected
    assert [one.tokens for one in output.sequences] == sequences
    assert [one.score for one in output.sequences] == pytest.approx(scores, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_equals_transformers(tiny, llm, early_stopping, length_penalty):
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=20,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        include_stop_str_in_output=True,
    )
    outputs = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        same(output, tiny.search(prompt, params))
    reasons = {one.finish_reason for output in outputs for one in output.sequences}
    assert reasons <= {"stop", "length"}
    assert "stop" in reasons or length_penalty >= 1  # which is for long ones


def test_early_stopping_and_length_penalty_matter(llm):
    def tokens(**params) -> list[list[list[int]]]:
        outputs = llm.beam_search(PROMPTS, BeamSearchParams(4, 20, **params))
        return [[one.tokens for one in output.sequences] for output in outputs]

    assert tokens(early_stopping=True) != tokens(early_stopping="never")
    assert tokens(length_penalty=0.0) != tokens(length_penalty=2.0)


def test_beams_share_blocks(llm, monkeypatch):
    """Every beam's request hits the prefix cache for all full blocks."""
    steps: list = []
    step = llm.llm_engine.step
    monkeypatch.setattr(llm.llm_engine, "step", lambda: [steps.append(one) or one for one in step()])
    prompt = prompts((70,))[0]
    llm.reset_prefix_cache()
    llm.beam_search(prompt, BeamSearchParams(4, 30, ignore_eos=True))
    assert len(steps) == 1 + 29 * 4 and steps[0].num_cached_tokens == 0
    for output in steps[1:]:
        size = len(output.prompt_token_ids)
        assert output.num_cached_tokens == (size - 1) // 16 * 16
    assert not llm.llm_engine.has_unfinished_requests()


def test_errors(tiny, llm):
    params = BeamSearchParams(4, 8)
    for wrong, message in [
        (lambda: BeamSearchParams(0, 8), "beam_width is 0"),
        (lambda: BeamSearchParams(2, 0), "max_tokens is 0"),
        (lambda: BeamSearchParams(2, 8, early_stopping="always"), "early_stopping is 'always'"),
        (lambda: BeamSearchParams(2, 8, early_stopping=1), "early_stopping is 1"),
        (lambda: BeamSearchParams(2, 8, length_penalty=float("nan")), "length_penalty"),
        (lambda: llm.beam_search(PROMPTS, params, concurrency_limit=0), "concurrency_limit is 0"),
        (lambda: llm.beam_search([[1, 2], [211]], params), "token id 211"),
        (lambda: llm.beam_search([[1, 2], [1] * 600], params), "has 600 tokens"),
        (lambda: llm.beam_search([[1, 2], []], params), "empty"),
        (lambda: llm.beam_search(PROMPTS, BeamSearchParams(60, 8)), "max-logprobs"),
        (lambda: llm.beam_search(PROMPTS, params, lora_request=object()), "LoRARequest"),
    ]:
        with pytest.raises(ValueError, match=message):
            wrong()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.beam_search([], params) == []
    # The model's limit ends a search as max_tokens does.
    output = llm.beam_search([1] * 509, BeamSearchParams(2, 100, ignore_eos=True))[0]
    assert [len(one.tokens) for one in output.sequences] == [512, 512]
    with start(tiny, logprobs_mode="raw_logits") as other, pytest.raises(ValueError, match="logprobs-mode"):
        other.beam_search(PROMPTS, params)


@pytest.mark.parametrize("width", [1, 2, 7, 14])
def test_widths(tiny, llm, width):
    params = BeamSearchParams(width, 12, include_stop_str_in_output=True)
    if width == 1:  # transformers would not search at all
        assert len(llm.beam_search(PROMPTS[0], params)[0].sequences) == 1
        return
    same(llm.beam_search(PROMPTS[1], params)[0], tiny.search(PROMPTS[1], params))


def test_eos_is_dropped_or_ignored(llm):
    params = BeamSearchParams(4, 24, include_stop_str_in_output=True)
    with_ends = llm.beam_search(PROMPTS, params)
    without = llm.beam_search(PROMPTS, BeamSearchParams(4, 24))
    for prompt, a, b in zip(PROMPTS, with_ends, without, strict=True):
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert x.tokens[: len(x.tokens) - (x.finish_reason == "stop")] == y.tokens
            assert x.cum_logprob == y.cum_logprob and x.score == y.score
            assert len(y.logprobs) == len(y.tokens) - len(prompt)
    ignoring = BeamSearchParams(4, 24, ignore_eos=True)
    output = llm.beam_search(PROMPTS[0], ignoring)[0]
    assert {one.finish_reason for one in output.sequences} == {"length"}


@pytest.mark.parametrize("family", ["qwen2-mixed", "mistral"])
def test_windows(tmp_path, family):
    tiny = Tiny(family, tmp_path)
    params = BeamSearchParams(3, 40)
    with start(tiny) as llm:
        for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
            same(output, tiny.search(prompt, params))


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False},
        {"async_depth": 2},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3, "max_num_batched_tokens": 32},
        {"num_gpu_blocks_override": 14},
    ],
)
def test_whatever_the_schedule(tiny, llm, arguments):
    params = BeamSearchParams(4, 20, include_stop_str_in_output=True)
    expected = [[one.tokens for one in output.sequences] for output in llm.beam_search(PROMPTS, params)]
    with start(tiny, **arguments) as other:
        for limit in (None, 1, 2):
            outputs = other.beam_search(PROMPTS, params, concurrency_limit=limit)
            assert [[one.tokens for one in output.sequences] for output in outputs] == expected


def test_online_equals_offline(tiny, llm):
    """The real engine in its process; prompts and outputs as token ids."""
    params = BeamSearchParams(4, 12, length_penalty=0.5, early_stopping="never", include_stop_str_in_output=True)
    expected = llm.beam_search(PROMPTS, params)
    engine = AsyncLLM(EngineConfig.from_kwargs(model=tiny.path, **ARGUMENTS))
    beams = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "max_tokens": 12}
    body = {"prompt": PROMPTS, "n": 4, "logprobs": 1, "return_token_ids": True, **beams}
    try:
        with stub_server(engine) as server:
            response = server.post("/v1/completions", body)
            assert response.status_code == 200, response.text
            best = server.post("/v1/completions", body | {"n": 2, "best_of": 4, "prompt": PROMPTS[0]}).json()
            wrong = server.post("/v1/completions", body | {"prompt": [[1], [999]]})
    finally:
        engine.shutdown()
    choices, usage = response.json()["choices"], response.json()["usage"]
    made = [
        (one.tokens[len(prompt) :], one)
        for prompt, output in zip(PROMPTS, expected, strict=True)
        for one in output.sequences
    ]
    assert [choice["index"] for choice in choices] == list(range(12))
    assert [choice["token_ids"] for choice in choices] == [ids for ids, _ in made]
    assert [choice["finish_reason"] for choice in choices] == [one.finish_reason for _, one in made]
    for choice, (_, one) in zip(choices, made, strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(one.cum_logprob, abs=1e-3)
        assert all(1 <= len(top) <= 2 for top in choice["logprobs"]["top_logprobs"])
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == sum(len(ids) for ids, _ in made)
    assert [choice["token_ids"] for choice in best["choices"]] == [ids for ids, _ in made[:2]]
    assert wrong.status_code == 400 and "prompt[1]" in wrong.text and "999" in wrong.text


def test_online_texts_and_refusals():
    engine = stub_engine()
    body = {"model": "stub", "prompt": "one", "use_beam_search": True, "n": 2, "max_tokens": 3}
    with stub_server(engine) as server:
        plain = server.post("/v1/completions", body | {"use_beam_search": False, "n": 1}).json()
        beams = server.post("/v1/completions", body | {"length_penalty": 0.0}).json()
        assert beams["choices"][0]["text"] == plain["choices"][0]["text"]
        assert beams["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert beams["usage"]["completion_tokens"] == 6
        echoed = server.post("/v1/completions", body | {"echo": True}).json()
        assert echoed["choices"][0]["text"] == "one" + plain["choices"][0]["text"]
        chat = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True, "n": 3, "max_tokens": 4}
        response = server.client().chat.completions.create(
            model="stub", messages=chat["messages"], n=3, max_tokens=4, extra_body={"use_beam_search": True}
        )
        assert len(response.choices) == 3 and all(choice.message.content for choice in response.choices)
        for more, field in [
            ({"stream": True}, "stream"),
            ({"n": 0}, "n"),
            ({"n": 4000}, "n"),
            ({"best_of": 1}, "n"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"stop": ["x"]}, "stop"),
            ({"repetition_penalty": 1.2}, "repetition_penalty"),
            ({"min_tokens": 2}, "min_tokens"),
            ({"guided_regex": "a+"}, "guided_regex"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"early_stopping": "soon"}, "early_stopping"),
            ({"length_penalty": 1e9}, "length_penalty"),
            ({"temperature": -1}, "temperature"),
            ({"logprobs": -1}, "logprobs"),
        ]:
            refused = server.post("/v1/completions", body | more)
            assert refused.status_code == 400, (more, refused.text)
            assert field in refused.json()["error"]["message"], refused.text
        accepted = {"stop": [], "temperature": 0.7, "top_p": 0.9, "seed": 1, "repetition_penalty": 1, "stream": False}
        assert server.post("/v1/completions", body | accepted).status_code == 200
        wide = server.post("/v1/completions", body | {"n": 40})
        assert wide.status_code == 400 and "max-logprobs" in wide.text


def test_aborting_the_request_aborts_all_its_beams():
    engine = stub_engine(step_seconds=0.02)
    body = {"prompt": "one", "use_beam_search": True, "n": 4, "max_tokens": 1000, "ignore_eos": True}
    with stub_server(engine, ServerConfig(enable_admin=True)) as server, ThreadPoolExecutor() as pool:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=2)
        server.wait_until(lambda: not server.server.context.jobs)
        assert not engine.running and not engine.streams
        assert all(" beam " in one for one in engine.aborted)  # none, if the client left between two steps
        response = pool.submit(server.post, "/v1/completions", body | {"request_id": "mine"})
        server.wait_until(lambda: len(engine.running) == 4)
        assert server.post("/abort_requests", {"request_ids": ["cmpl-mine"]}).json() == {"aborted": ["cmpl-mine"]}
        assert response.result(20).status_code == 503
        assert not engine.running and not engine.streams and engine.get_num_unfinished_requests() == 0
