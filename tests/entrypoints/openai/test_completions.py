"""/v1/completions as the official client uses it."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.entrypoints.stub_server import MODEL, TEXT, StubServer

WORDS = TEXT.split()


def expected(num_prompt_tokens: int, count: int) -> str:
    """The stub cycles through the words, one token each, starting at the prompt's length."""
    return "".join(f" {WORDS[(num_prompt_tokens + i) % len(WORDS)]}" for i in range(count))


def complete(client: openai.OpenAI, prompt: Any, **kwargs: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, **kwargs)


def test_a_text(client: openai.OpenAI) -> None:
    response = complete(client, [7, 8, 9], max_tokens=5)
    assert response.id.startswith("cmpl-") and response.object == "text_completion" and response.model == MODEL
    assert response.choices[0].text == expected(3, 5)
    assert response.choices[0].finish_reason == "length"
    assert (
        response.usage.prompt_tokens == 3 and response.usage.completion_tokens == 5 and response.usage.total_tokens == 8
    )
    assert response.usage.prompt_tokens_details is None  # --enable-prompt-tokens-details
    assert response.system_fingerprint.startswith("fp_")


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    assert complete(client, "hello").usage.completion_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI, stream: bool) -> None:
    prompts = [[5], [5, 6], [5, 6, 7]]
    texts = [""] * 6
    response = complete(client, prompts, n=2, max_tokens=7, stream=stream)
    for part in response if stream else [response]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [expected(length, 7) for length in (1, 1, 2, 2, 3, 3)]


def test_several_texts(client: openai.OpenAI, server: StubServer) -> None:
    response = complete(client, ["a b c", "a"], max_tokens=2)
    assert server.engine.tokenizer is not None
    lengths = [len(server.engine.tokenizer.encode(text)) for text in ("a b c", "a")]
    assert [choice.text for choice in response.choices] == [expected(length, 2) for length in lengths]
    assert response.usage.prompt_tokens == sum(lengths)


def test_a_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(complete(client, [1, 2], max_tokens=30, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected(2, 30)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("everywhere", [False, True])
def test_usage_of_a_stream(client: openai.OpenAI, everywhere: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": everywhere}
    chunks = list(complete(client, [1, 2], max_tokens=4, stream=True, stream_options=options))
    last = chunks[-1]
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (2, 4)
    counts = [chunk.usage.completion_tokens if chunk.usage else None for chunk in chunks[:-1]]
    assert counts == sorted(counts) and counts[-1] == 4 if everywhere else set(counts) == {None}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text(client: openai.OpenAI, stream: bool) -> None:
    response = complete(client, [1], max_tokens=50, stop=["five"], stream=stream)
    parts = list(response) if stream else [response]
    text = "".join(part.choices[0].text for part in parts)
    assert text == " two three four " and parts[-1].choices[0].finish_reason == "stop"
    assert parts[-1].choices[0].stop_reason == "five"


def test_the_stop_string_can_be_included(client: openai.OpenAI) -> None:
    response = complete(client, [1], max_tokens=50, stop="five", extra_body={"include_stop_str_in_output": True})
    assert response.choices[0].text == " two three four five"


def test_echo(client: openai.OpenAI) -> None:
    assert complete(client, "Hello", echo=True, max_tokens=2).choices[0].text.startswith("Hello ")
    streamed = list(complete(client, "Hello", echo=True, max_tokens=2, stream=True))
    assert streamed[0].choices[0].text == "Hello"


def test_scoring_a_prompt_generates_nothing(client: openai.OpenAI) -> None:
    response = complete(client, "Hello", echo=True, max_tokens=0)
    assert response.choices[0].text == "Hello" and response.usage.completion_tokens == 0


def test_logprobs(client: openai.OpenAI) -> None:
    logprobs = complete(client, [1, 2], max_tokens=3, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == [" three", " four", " five"]
    assert logprobs.token_logprobs == [-1.0, -1.0, -1.0]
    assert logprobs.text_offset == [0, 6, 11]
    assert [len(top) for top in logprobs.top_logprobs] == [3, 3, 3]
    assert logprobs.top_logprobs[0][" three"] == -1.0


def test_logprobs_of_a_stream_add_up(client: openai.OpenAI) -> None:
    whole = complete(client, [1, 2], max_tokens=9, logprobs=1).choices[0].logprobs
    chunks = list(complete(client, [1, 2], max_tokens=9, logprobs=1, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)


def test_token_ids_on_request(client: openai.OpenAI, server: StubServer) -> None:
    assert server.engine.tokenizer is not None
    ids = server.engine.tokenizer.encode(" two three", add_special_tokens=False)
    extra = {"return_token_ids": True}
    choice = complete(client, [1], max_tokens=2, extra_body=extra).choices[0]
    assert choice.token_ids == ids and choice.prompt_token_ids == [1]
    chunks = list(complete(client, [1], max_tokens=2, stream=True, extra_body=extra))
    assert chunks[0].choices[0].prompt_token_ids == [1]
    assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == ids


def test_text_with_any_character_survives_the_stream(server: StubServer) -> None:
    """Quotes, control characters, emoji: events are assembled from bytes, so text must be escaped."""
    engine = server.engine
    assert engine.tokenizer is not None
    text = 'a "quoted" \\ line\nbreak\ttab 😀 é </script> \u2028 end'
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    before, engine.rule = engine.rule, lambda request, count: ids[count]
    try:
        stream = complete(server.client(), [1], max_tokens=len(ids), stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    finally:
        engine.rule = before


def test_the_bytes_of_a_stream(server: StubServer) -> None:
    response = server.post("/v1/completions", {"model": MODEL, "prompt": [1], "max_tokens": 2, "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        shape = json.loads(event.removeprefix("data: "))
        assert list(shape) == ["id", "object", "created", "model", "system_fingerprint", "choices"]


def test_many_streams_at_once_do_not_mix(server: StubServer) -> None:
    async def one(client: openai.AsyncOpenAI, length: int) -> str:
        prompt = list(range(1, length + 1))
        stream = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def everyone() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as client:
            return await asyncio.gather(*(one(client, length) for length in range(1, 65)))

    assert asyncio.run(everyone()) == [expected(length, 40) for length in range(1, 65)]
    server.wait_until(lambda: not server.server.context.jobs and not server.engine.streams)
