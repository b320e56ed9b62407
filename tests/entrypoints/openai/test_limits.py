"""Requests that are too much: refused by a limit that is named, before anything expensive is done for them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.engine.input_processor import InputProcessor
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError
from quire.messages.requests import SchedulerStats
from quire.tokenizer.tokenizer import Tokenizer
from tests.entrypoints.openai.running import Running, running, stub_engine


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def chat(server: Running, messages: Any, **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})


def nothing_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was tokenized")

    for name in ("encode", "encode_batch"):
        monkeypatch.setattr(Tokenizer, name, refuse)


# A chat template in a request is never a path


@pytest.mark.parametrize("path", ["/chat/completions", "/tokenize"])
def test_a_template_of_a_request_names_no_file(tmp_path: Path, path: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": str(secret), "return_token_ids": True}
    with running(stub_engine(), ServerConfig(trust_request_chat_template=True)) as server:
        answer = server.post(path if path == "/tokenize" else "/v1" + path, body | {"max_tokens": 1})
        shape = answer.json()
        ids = shape.get("tokens") or shape["prompt_token_ids"]
        assert server.engine.tokenizer is not None
        assert server.engine.tokenizer.decode(ids) == str(secret)  # a text without any braces: as it is


# Texts


def test_a_prompt_is_refused_by_its_characters(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_tokenized(monkeypatch)
    text = "word " * 200_000
    for body in ({"prompt": text}, {"prompt": ["a", text]}):
        message = refusal(server.post("/v1/completions", body))
        assert "1000000 characters" in message and "--max-prompt-chars" in message
    assert "--max-prompt-chars" in refusal(server.post("/tokenize", {"prompt": text}))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "word " * 200_000},
        {"role": "word " * 200_000, "content": "x"},
        {"role": "user", "content": "x", "name": "word " * 200_000},
        {"role": "user", "content": [{"type": "text", "text": "word " * 100_000}] * 2},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "word " * 200_000}}]},
        {"role": "user", "content": "x", "word " * 200_000: 1},
    ],
)
def test_every_part_of_a_message_counts(
    server: Running, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    nothing_is_tokenized(monkeypatch)
    assert "--max-prompt-chars" in refusal(chat(server, [message]))


def test_tools_and_template_arguments_count(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_tokenized(monkeypatch)
    messages = [{"role": "user", "content": "x"}]
    for more in ({"chat_template_kwargs": {"x": "word " * 200_000}}, {"documents": [{"text": "word " * 200_000}]}):
        assert "--max-prompt-chars" in refusal(chat(server, messages, **more))


def test_the_limit_of_characters_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(stub_engine(), ServerConfig(max_prompt_chars=40)) as server:
        assert server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 1}).status_code == 200
        assert "41 characters; at most 40" in refusal(server.post("/v1/completions", {"prompt": "a" * 41}))
        assert "--max-prompt-chars" in refusal(chat(server, [{"role": "a" * 41, "content": ""}]))


def test_a_text_that_fits_is_not_refused(server: Running) -> None:
    """As many characters as a model's longest tokens hold."""
    assert server.engine.tokenizer is not None
    longest = max(server.engine.tokenizer.backend.get_vocab(), key=len)
    body = {"prompt": longest.replace("Ċ", "\n").replace("Ġ", " ") * 1000, "max_tokens": 1}
    assert len(body["prompt"]) > 20_000
    assert server.post("/v1/completions", body).status_code == 200


def test_tokenizing_stops_at_the_first_prompt_that_is_too_long(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    before = Tokenizer.encode_batch

    def counting(self: Tokenizer, texts: list[str], *args: Any) -> Any:
        done.append(len(texts))
        return before(self, texts, *args)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    message = refusal(server.post("/v1/completions", {"prompt": ["w " * 150_000] * 40}))
    assert message.startswith("prompt[0] has ") and sum(done) < 8


# Numbers of things


@pytest.mark.parametrize(
    ("path", "body", "flag"),
    [
        ("/v1/completions", {"prompt": [[1]] * 70_000}, "--max-request-objects"),
        ("/v1/completions", {"prompt": [1] * (1 << 20)}, "--max-request-values"),
        ("/v1/completions", {"prompt": [1], "allowed_token_ids": [5] * (1 << 20)}, "--max-request-values"),
        ("/v1/completions", {"prompt": [1], "allowed_token_ids": [5] * 60_000}, "vocabulary has 49152"),
        ("/v1/completions", {"prompt": [1], "metadata": [[]] * 70_000}, "--max-request-objects"),
        ("/v1/completions", {"prompt": [1], **{f"x{i}": 1 for i in range(600)}}, "--max-request-fields"),
        ("/v1/completions", {"prompt": [1], **{f"x{i}": 1 for i in range(60_000)}}, "--max-request-fields"),
        ("/v1/completions", {"prompt": [[1]] * 1025}, "--max-prompts"),
        ("/v1/completions", {"prompt": [[1]] * 1024, "n": 2}, "--max-sequences"),
        ("/v1/completions", {"prompt": [[1]] * 16, "n": 128}, "--max-sequences"),
        ("/v1/completions", {"prompt": [[1]] * 16, "n": 128, "use_beam_search": True}, "--max-sequences"),
        ("/v1/completions", {"prompt": [1], "n": 129}, "--max-n"),
        ("/v1/chat/completions", {"messages": [{}] * 70_000}, "--max-request-objects"),
        ("/v1/chat/completions", {"messages": [{}] * 9000}, "--max-messages"),
        ("/tokenize", {"messages": [{}] * 9000}, "--max-messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}], "tools": [{}] * 129}, "--max-tools"),
        ("/detokenize", {"tokens": [1] * 9000}, "--max-model-len"),
    ],
)
def test_a_number_has_a_limit_and_the_limit_a_flag(server: Running, path: str, body: dict[str, Any], flag: str) -> None:
    assert flag in refusal(server.post(path, body))


def test_unknown_names_are_compared_with_known_ones_for_a_few_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": [1], "max_tokens": 1, **{f"temperatur{i}": 1 for i in range(400)}}
    with running(stub_engine()) as server:
        assert server.post("/v1/completions", body).status_code == 200
    assert 0 < caplog.text.count("did you mean 'temperature'") < 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [2**70]}),
        ("/v1/completions", {"prompt": [[1], [2**63]]}),
        ("/v1/completions", {"prompt": [1], "repetition_detection": {"max_pattern_size": 4, "min_count": 2**70}}),
        ("/v1/completions", {"prompt": [1], "seed": 2**64}),
        ("/v1/completions", {"prompt": [1], "logprobs": 2**65}),
        ("/v1/completions", {"prompt": [1], "priority": -(2**65)}),
        ("/v1/completions", {"prompt": [1], "logit_bias": {str(2**70): 1}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2**70}),
        ("/detokenize", {"tokens": [2**70]}),
    ],
)
def test_whole_numbers_are_bounded(server: Running, path: str, body: dict[str, Any]) -> None:
    refusal(server.post(path, body))
    assert not server.server.context.jobs and not server.engine.streams


def test_a_value_of_a_field_without_effect_is_not_looked_at(server: Running) -> None:
    body = {"prompt": [1], "max_tokens": 1, "metadata": {"a": list(range(10_000))}, "kv_transfer_params": 2**70}
    assert server.post("/v1/completions", body).status_code == 200


def test_bodies_that_arrive_have_a_limit_in_all() -> None:
    with running(stub_engine(), ServerConfig(max_request_bytes_in_all=50_000)) as server:
        assert server.post("/v1/completions", {"prompt": [1], "user": "x" * 40_000, "max_tokens": 1}).status_code == 200
        answer = server.post("/v1/completions", {"prompt": "x" * 60_000})
        assert "--max-request-bytes-in-all" in refusal(answer, 503) and "retry-after" in answer.headers
        assert server.post("/v1/completions", {"prompt": [1], "user": "x" * 40_000, "max_tokens": 1}).status_code == 200


# Sequences in admission and rate limits


def test_sequences_count_in_admission() -> None:
    engine = stub_engine(0.01)
    engine.max_num_seqs = 4
    many = {"prompt": [[1]] * 3, "n": 2, "max_tokens": 1}
    with running(engine, ServerConfig(max_waiting_requests=2)) as server:
        assert server.post("/v1/completions", many).status_code == 200  # 4 run, 2 wait
        message = refusal(server.post("/v1/completions", many | {"n": 3}))
        assert "9 sequences; 4 can run and 2 may wait (--max-num-seqs, --max-waiting-requests)" in message
        long = {"prompt": [1], "n": 3, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=20):
            assert "--max-waiting-requests" in refusal(server.post("/v1/completions", many), 503)
            assert server.post("/v1/completions", many | {"prompt": [1]}).status_code == 200


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_exactly_as_many_wait_as_may(limit: int) -> None:
    engine = stub_engine()
    engine.max_num_seqs = 3
    context = ServerContext(engine, ServerConfig(max_waiting_requests=limit), engine.config)
    with ExitStack() as jobs:
        for _ in range(3 + limit):
            context.admit()
            jobs.enter_context(context.job("cmpl-", None, 1, 1))
        with pytest.raises(ApiError, match=f"{limit} requests are waiting already"):
            context.admit()
    context.admit(3 + limit)
    with pytest.raises(ApiError, match="3 can run"):
        context.admit(4 + limit)


def test_what_the_engine_says_waits_counts() -> None:
    engine = stub_engine()
    context = ServerContext(engine, ServerConfig(max_waiting_requests=2), engine.config)
    with context.job("cmpl-", None, 1, 1):
        engine.stats = SchedulerStats(num_waiting=2)
        context.admit()
        engine.stats = SchedulerStats(num_waiting=3)
        with pytest.raises(ApiError, match="3 requests are waiting already"):
            context.admit()


def test_a_request_may_hold_so_many_prompts() -> None:
    with running(stub_engine(), ServerConfig(max_prompts=2)) as server:
        assert server.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 1}).status_code == 200
        message = refusal(server.post("/v1/completions", {"prompt": [[1], [2], [3]], "max_tokens": 1}))
        assert "prompt holds 3 prompts; at most 2 are allowed (--max-prompts)" in message


def test_sequences_count_in_the_rate_limit() -> None:
    body = {"prompt": [[1]] * 2, "n": 2, "max_tokens": 1}
    with running(stub_engine(), ServerConfig(rate_limit_requests=6, rate_limit_interval=3600)) as server:
        assert server.post("/v1/completions", body).status_code == 200
        message = refusal(server.post("/v1/completions", body), 429)
        assert "the limit is 6" in message


# Who may know what


@pytest.mark.parametrize(
    ("keys", "isolation", "shared"),
    [(("a", "b"), None, False), (("a", "b"), "none", True), (("a",), None, True), (("a", "b"), "key", False)],
)
def test_prefixes_are_shared_within_a_key(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], isolation: str | None, shared: bool
) -> None:
    salts: list[str | None] = []
    before = InputProcessor.process

    def noting(self: InputProcessor, request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        salts.append(prompt.cache_salt)
        return before(self, request_id, prompt, *args, **kwargs)

    monkeypatch.setattr(InputProcessor, "process", noting)
    with running(stub_engine(), ServerConfig(prefix_cache_isolation=isolation), keys) as server:
        for key in (keys[0], keys[-1]):
            for salt in (None, "mine"):
                body = {"prompt": [1], "max_tokens": 1, "cache_salt": salt}
                answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
                assert answer.status_code == 200
    assert (salts[:2] == salts[2:]) is shared and salts[0] != salts[1]
    assert all("Bearer" not in str(salt) and key not in str(salt).split() for salt in salts for key in keys)


def test_ids_of_requests_do_not_collide() -> None:
    """`x` with two prompts and `x-0` with one are three requests of the engine."""
    with running(stub_engine(0.01)) as server:
        long = {"prompt": [[1], [2]], "max_tokens": 1000, "ignore_eos": True, "stream": True, "request_id": "x"}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=20) as stream:
            assert stream.status_code == 200
            for name in ("x-0", "x-1", "x"):
                body = {"prompt": [1], "max_tokens": 1, "request_id": name}
                assert server.post("/v1/completions", body).status_code == 200


# Answers


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 4000, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 128},
        {"prompt": [1] * 4000, "max_tokens": 1, "prompt_logprobs": 20, "n": 128},
        {"prompt": [[1] * 4000] * 16, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": [1], "max_tokens": 1000, "logprobs": 20, "n": 64},
    ],
)
def test_logprobs_of_an_answer_have_a_limit(server: Running, body: dict[str, Any]) -> None:
    assert "--max-logprob-entries" in refusal(server.post("/v1/completions", body))


def test_large_answers_are_whole(server: Running) -> None:
    """Those that are written beside the event loop are the same as others."""
    body = {"prompt": [[1], [2, 3]], "n": 2, "max_tokens": 300, "ignore_eos": True, "seed": 1, "temperature": 1}
    small = server.post("/v1/completions", body).json()
    large = server.post("/v1/completions", body | {"logprobs": 20}).json()
    for choice in large["choices"]:
        assert len(choice.pop("logprobs")["top_logprobs"]) == 300
    assert [choice | {"logprobs": None} for choice in large["choices"]] == small["choices"]
    assert large.keys() == small.keys() and large["usage"] == small["usage"]
