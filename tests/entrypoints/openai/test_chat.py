"""/v1/chat/completions as the official client uses it."""

from typing import Any

import openai
import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

HELLO: Any = [{"role": "user", "content": "Hello"}]


def chat(client: openai.OpenAI, messages: Any = HELLO, **kwargs: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **kwargs)


def test_a_response(client: openai.OpenAI) -> None:
    response = chat(client, max_completion_tokens=4)
    assert response.id.startswith("chatcmpl-") and response.object == "chat.completion"
    choice = response.choices[0]
    assert choice.message.role == "assistant" and len(choice.message.content.split()) == 4
    assert choice.finish_reason == "length" and response.usage.completion_tokens == 4


def test_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=20).choices[0].message.content
    chunks = list(chat(client, max_tokens=20, stream=True))
    first, last = chunks[0].choices[0], chunks[-1].choices[0]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert last.delta.content and last.finish_reason == "length"  # in the last token's chunk
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=50, stop="five") as stream:
        final = stream.get_final_completion()
    assert (final.choices[0].message.content or "").endswith("three four ")


def test_choices(client: openai.OpenAI) -> None:
    response = chat(client, n=3, max_tokens=3)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    chunks = list(chat(client, n=3, max_tokens=3, stream=True))
    ends = {chunk.choices[0].index for chunk in chunks if chunk.choices[0].finish_reason}
    assert ends == {0, 1, 2}
    roles = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role]
    assert sorted(roles) == [0, 1, 2]


def test_max_completion_tokens_goes_before_max_tokens(client: openai.OpenAI) -> None:
    assert chat(client, max_tokens=9, max_completion_tokens=2).usage.completion_tokens == 2


def test_without_a_limit_the_models_length_is_one(client: openai.OpenAI, server: StubServer) -> None:
    assert chat(client).usage.total_tokens == server.engine.max_model_len


def test_logprobs(client: openai.OpenAI) -> None:
    content = chat(client, max_tokens=2, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 2
    assert bytes(content[0].bytes).decode() == content[0].token and content[0].logprob == -1.0
    assert len(content[0].top_logprobs) == 3
    assert chat(client, max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    chunks = list(chat(client, max_tokens=2, logprobs=True, stream=True))
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 2


def test_content_parts_and_roles(client: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Go on."},
    ]
    texts: Any = [parts[0], {"role": "user", "content": "Hello"}, *parts[2:]]
    assert (
        chat(client, parts, max_tokens=1).usage.prompt_tokens == chat(client, texts, max_tokens=1).usage.prompt_tokens
    )


def test_continuing_the_final_message(client: openai.OpenAI) -> None:
    messages: Any = [*HELLO, {"role": "assistant", "content": "Once upon"}]
    extra = {"continue_final_message": True, "return_token_ids": True, "echo": True}
    response = chat(client, messages, max_tokens=1, extra_body=extra)
    assert response.choices[0].message.content.startswith("Once upon ")
    assert len(response.prompt_token_ids) == response.usage.prompt_tokens


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
    ],
)
def test_unavailable_features_are_refused(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="not available yet") as error:
        chat(client, extra_body={field: value})
    assert error.value.param == field


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    ],
)
def test_messages_are_checked(client: openai.OpenAI, messages: Any) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages)
    assert error.value.param == "messages"


def test_a_chat_template_in_a_request_needs_trust(client: openai.OpenAI) -> None:
    extra = {"chat_template": "{{ messages[0].content }}{{ more }}", "chat_template_kwargs": {"more": " there"}}
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        chat(client, extra_body=extra)
    engine = stub_engine()
    assert engine.tokenizer is not None
    with stub_server(engine, ServerConfig(trust_request_chat_template=True)) as trusting:
        response = chat(trusting.client(), max_tokens=1, extra_body={**extra, "return_token_ids": True})
        assert response.prompt_token_ids == engine.tokenizer.encode("Hello there", add_special_tokens=False)
