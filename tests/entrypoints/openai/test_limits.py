"""Requests beyond a limit: refused before any expensive work, with the limit's flag in the message."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.server import ServerConfig
from quire.tokenizer.tokenizer import Tokenizer
from tests.entrypoints.stub_server import StubServer, refusal, stub_engine, stub_server


def chat(server: StubServer, messages: Any, **more: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **more})


def nothing_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it was tokenized")

    for name in ("encode", "encode_batch"):
        monkeypatch.setattr(Tokenizer, name, refuse)


# A chat template in a request is never a path


@pytest.mark.parametrize("path", ["/chat/completions", "/tokenize"])
def test_a_chat_template_in_a_request_is_not_a_path(tmp_path: Path, path: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": str(secret), "return_token_ids": True}
    with stub_server(stub_engine(), ServerConfig(trust_request_chat_template=True)) as server:
        response = server.post(path if path == "/tokenize" else "/v1" + path, body | {"max_tokens": 1})
        shape = response.json()
        ids = shape.get("tokens") or shape["prompt_token_ids"]
        assert server.engine.tokenizer is not None
        assert server.engine.tokenizer.decode(ids) == str(secret)  # rendered as literal text


# Texts


def test_a_prompt_is_refused_by_its_characters(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
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
    server: StubServer, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    nothing_is_tokenized(monkeypatch)
    assert "--max-prompt-chars" in refusal(chat(server, [message]))


def test_tools_and_template_arguments_count(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_tokenized(monkeypatch)
    messages = [{"role": "user", "content": "x"}]
    for more in ({"chat_template_kwargs": {"x": "word " * 200_000}}, {"documents": [{"text": "word " * 200_000}]}):
        assert "--max-prompt-chars" in refusal(chat(server, messages, **more))


def test_the_limit_of_characters_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with stub_server(stub_engine(), ServerConfig(max_prompt_chars=40)) as server:
        assert server.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 1}).status_code == 200
        assert "41 characters; at most 40" in refusal(server.post("/v1/completions", {"prompt": "a" * 41}))
        assert "--max-prompt-chars" in refusal(chat(server, [{"role": "a" * 41, "content": ""}]))


def test_a_text_that_fits_is_not_refused(server: StubServer) -> None:
    """As many characters as a model's longest tokens hold."""
    assert server.engine.tokenizer is not None
    longest = max(server.engine.tokenizer.backend.get_vocab(), key=len)
    body = {"prompt": longest.replace("Ċ", "\n").replace("Ġ", " ") * 1000, "max_tokens": 1}
    assert len(body["prompt"]) > 20_000
    assert server.post("/v1/completions", body).status_code == 200


def test_tokenizing_stops_at_the_first_prompt_that_is_too_long(
    server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    before = Tokenizer.encode_batch

    def counting(self: Tokenizer, texts: list[str], *args: Any) -> Any:
        done.append(len(texts))
        return before(self, texts, *args)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    message = refusal(server.post("/v1/completions", {"prompt": ["w " * 150_000] * 40}))
    assert message.startswith("prompt[0] has ") and sum(done) < 8


# Counts


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
def test_counts_are_limited_by_a_flag(server: StubServer, path: str, body: dict[str, Any], flag: str) -> None:
    assert flag in refusal(server.post(path, body))


def test_small_bodies_are_counted_too() -> None:
    config = ServerConfig(max_request_values=100, max_request_objects=5, max_request_fields=4)
    with stub_server(stub_engine(), config) as server:
        for body, flag in (
            ({"prompt": [1] * 20_000}, "--max-request-values"),
            ({"prompt": [1], "metadata": [[]] * 6}, "--max-request-objects"),
            ({"prompt": [1], "max_tokens": 1, "n": 1, "seed": 1, "top_k": 1}, "--max-request-fields"),
        ):
            assert flag in refusal(server.post("/v1/completions", body))
        punctuation = {"prompt": ",[{" * 200, "max_tokens": 1}  # inside a string it does not count
        assert server.post("/v1/completions", punctuation).status_code == 200


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
def test_whole_numbers_are_bounded(server: StubServer, path: str, body: dict[str, Any]) -> None:
    refusal(server.post(path, body))
    assert not server.server.context.jobs and not server.engine.streams


def test_the_value_of_a_field_without_effect_is_ignored(server: StubServer) -> None:
    body = {"prompt": [1], "max_tokens": 1, "metadata": {"a": list(range(10_000))}, "kv_transfer_params": 2**70}
    assert server.post("/v1/completions", body).status_code == 200


def test_prompts_per_request_are_limited() -> None:
    with stub_server(stub_engine(), ServerConfig(max_prompts=2)) as server:
        assert server.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 1}).status_code == 200
        message = refusal(server.post("/v1/completions", {"prompt": [[1], [2], [3]], "max_tokens": 1}))
        assert "prompt holds 3 prompts; at most 2 are allowed (--max-prompts)" in message


# Responses


def test_parameters_are_not_rendered_beyond_the_size_of_a_body() -> None:
    with stub_server(stub_engine(), ServerConfig(max_request_bytes=100_000)) as server:
        for many in ({"allowed_token_ids": list(range(5000))}, {"cache_salt": "x" * 20_000}):
            body = {"prompt": [[1]] * 10, **many}
            assert "--max-request-bytes" in refusal(server.post("/v1/completions/render", body))
            assert len(server.post("/v1/completions/render", body | {"prompt": [[1], [2]]}).json()) == 2
        assert "request_id" in refusal(server.post("/v1/completions/render", {"prompt": [1], "request_id": "x" * 200}))


def test_renderings_are_admitted_as_requests_are() -> None:
    with stub_server(stub_engine()) as server:
        server.server.context.draining = True
        assert "shutting down" in refusal(server.post("/v1/completions/render", {"prompt": [1]}), 503)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 4000, "max_tokens": 1, "echo": True, "logprobs": 20, "n": 128},
        {"prompt": [1] * 4000, "max_tokens": 1, "prompt_logprobs": 20, "n": 128},
        {"prompt": [[1] * 4000] * 16, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": [1], "max_tokens": 1000, "logprobs": 20, "n": 64},
        {"prompt": [[1]] * 64, "max_tokens": 1000, "logprobs": 0, "logprob_token_ids": list(range(128))},
    ],
)
def test_logprobs_per_response_are_limited(server: StubServer, body: dict[str, Any]) -> None:
    assert "--max-logprob-entries" in refusal(server.post("/v1/completions", body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1], "logprob_token_ids": [5]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprob_token_ids": [5]}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprob_token_ids": [5]}}),
    ],
)
def test_named_tokens_need_logprobs(server: StubServer, path: str, body: dict[str, Any]) -> None:
    assert "logprob_token_ids needs logprobs" in refusal(server.post(path, body))


def test_large_responses_are_complete(server: StubServer) -> None:
    """Responses encoded off the event loop equal the others."""
    body = {"prompt": [[1], [2, 3]], "n": 2, "max_tokens": 300, "ignore_eos": True, "seed": 1, "temperature": 1}
    small = server.post("/v1/completions", body).json()
    large = server.post("/v1/completions", body | {"logprobs": 20}).json()
    for choice in large["choices"]:
        assert len(choice.pop("logprobs")["top_logprobs"]) == 300
    assert [choice | {"logprobs": None} for choice in large["choices"]] == small["choices"]
    assert large.keys() == small.keys() and large["usage"] == small["usage"]
