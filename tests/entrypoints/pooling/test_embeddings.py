"""/v1/embeddings, /pooling and /v2/embed, through real clients."""

import asyncio
import base64
import json
import re

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.entrypoints.stub_server import refusal
from tests.pooling.models import text

TEXTS = [text(length) for length in (1, 5, 16, 60, 100)]


def assert_close(found, expected, tolerance: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.abs(np.asarray(one) - other.numpy()).max() < tolerance


def test_vectors_through_the_openai_client(embedder):
    client, expected = embedder.server.client(), [embedder.embedding(one) for one in TEXTS]
    (model,) = client.models.list().data
    for format in ("float", openai.omit):  # the client's own default is base64
        found = client.embeddings.create(model=model.id, input=TEXTS, encoding_format=format)
        assert [one.index for one in found.data] == list(range(len(TEXTS)))
        assert_close([one.embedding for one in found.data], expected)
    ids = [embedder.tokenizer(one)["input_ids"] for one in TEXTS]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    by_ids = client.embeddings.create(model=model.id, input=ids)
    assert_close([one.embedding for one in by_ids.data], expected)
    (one,) = client.embeddings.create(model=model.id, input=ids[3]).data
    (same,) = client.embeddings.create(model=model.id, input=TEXTS[3]).data
    assert_close([one.embedding, same.embedding], [expected[3]] * 2)
    (short,) = client.embeddings.create(model=model.id, input=TEXTS[3], dimensions=16).data
    assert_close([short.embedding], [embedder.embedding(TEXTS[3], dimensions=16)])


def test_two_thousand_texts_in_one_call(embedder):
    texts = [text(1 + i % 7, i) for i in range(2048)]
    found = embedder.server.client().embeddings.create(model="", input=texts)
    assert [one.index for one in found.data] == list(range(2048))
    places = range(0, 2048, 311)
    assert_close([found.data[i].embedding for i in places], [embedder.embedding(texts[i]) for i in places])


@pytest.mark.parametrize(("many", "one"), [([text(1)], [text(100)] * 16), ([text(100)] * 16, [text(1)])])
def test_neither_tiny_texts_nor_long_ones_hold_the_others_up(embedder, many, one):
    """Beside clients of which each sends its next request at once, another's is answered in its turn."""
    clients, turns = 8, 20
    answered = 0

    async def post(client: httpx.AsyncClient, texts: list[str]) -> None:
        (await client.post("/v1/embeddings", json={"input": texts})).raise_for_status()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        nonlocal answered
        for _ in range(turns):
            await post(client, many)
            answered += 1

    async def main() -> int:
        async with httpx.AsyncClient(base_url=embedder.server.url, timeout=60) as client:
            flood = [asyncio.ensure_future(keep_asking(client)) for _ in range(clients)]
            while answered < clients:
                await asyncio.wait(flood, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)
            before = answered
            await post(client, one)
            waited = answered - before
            await asyncio.gather(*flood)
            return waited

    assert asyncio.run(main()) <= 4 * clients


def test_conversations_and_prompts(embedder):
    post = embedder.server.post
    words = ["w8 w9", "w10"]
    messages = [{"role": "user", "content": word} for word in words]
    plain = {"input": "w8 w9 w10 ", "add_special_tokens": False}
    (expected,) = post("/v1/embeddings", plain).json()["data"]
    for body in ({"messages": messages}, {"input": messages}, {"messages": [messages]}):
        (found,) = post("/v1/embeddings", body).json()["data"]
        assert found["embedding"] == pytest.approx(expected["embedding"], abs=1e-5)
    both = post("/v1/embeddings", {"messages": [messages, messages[:1]]}).json()["data"]
    assert both[0]["embedding"] == pytest.approx(expected["embedding"], abs=1e-5) and len(both) == 2
    named = post("/v1/embeddings", {"input": TEXTS[0], "prompt_name": "query"}).json()["data"]
    assert_close([named[0]["embedding"]], [embedder.embedding("w5 w6 " + TEXTS[0])])
    cohere = post("/v2/embed", {"texts": TEXTS[:2], "input_type": "query"}).json()
    assert_close(cohere["embeddings"]["float"], [embedder.embedding("w5 w6 " + one) for one in TEXTS[:2]])


def test_cohere_s_shape(embedder):
    body = {"texts": TEXTS[:3], "embedding_types": ["float", "base64", "binary", "ubinary"], "output_dimension": 32}
    found = embedder.server.post("/v2/embed", body).json()
    assert found["response_type"] == "embeddings_by_type" and found["texts"] == TEXTS[:3]
    expected = [embedder.embedding(one, dimensions=32) for one in TEXTS[:3]]
    by_type = found["embeddings"]
    assert_close(by_type["float"], expected)
    assert_close([np.frombuffer(base64.b64decode(one), "<f4") for one in by_type["base64"]], expected)
    bits = np.packbits(np.asarray(by_type["float"]) >= 0, axis=1)
    assert by_type["ubinary"] == bits.tolist()
    assert by_type["binary"] == (bits.astype(int) - 128).tolist()
    inputs = [{"content": [{"type": "text", "text": TEXTS[0]}]}]
    (one,) = embedder.server.post("/v2/embed", {"inputs": inputs}).json()["embeddings"]["float"]
    assert_close([one], [embedder.embedding(TEXTS[0])])


def test_encodings(embedder):
    post, expected = embedder.server.post, [embedder.embedding(one) for one in TEXTS]
    decoded = {
        "float32": lambda data, order: np.frombuffer(data, order + "f4"),
        "float16": lambda data, order: np.frombuffer(data, order + "f2"),
        "bfloat16": lambda data, order: (np.frombuffer(data, order + "u2").astype("u4") << 16).view("f4"),
        "fp8_e4m3": lambda data, order: torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn).float().numpy(),
        "fp8_e5m2": lambda data, order: torch.frombuffer(bytearray(data), dtype=torch.float8_e5m2).float().numpy(),
    }
    for dtype, read in decoded.items():
        for endianness, order in (("native", "="), ("little", "<"), ("big", ">")):
            asked = {"input": TEXTS, "embed_dtype": dtype, "endianness": endianness}
            tolerance = {"float32": 1e-4, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06}.get(dtype, 5e-3)
            found = post("/v1/embeddings", asked | {"encoding_format": "base64"}).json()["data"]
            assert_close([read(base64.b64decode(one["embedding"]), order) for one in found], expected, tolerance)
        response = post("/v1/embeddings", asked | {"encoding_format": "bytes"})
        items = json.loads(response.headers["metadata"])["data"]
        parts = [read(response.content[item["start"] : item["end"]], order) for item in items]
        assert_close(parts, expected, tolerance)
        alone = post("/v1/embeddings", asked | {"encoding_format": "bytes_only"})
        assert alone.content == response.content and "metadata" not in alone.headers


def test_a_vector_for_each_token(embedder):
    found = embedder.server.post("/pooling", {"input": TEXTS[:3], "task": "token_embed"}).json()["data"]
    assert [np.asarray(one["data"]).shape for one in found] == [(3, 64), (7, 64), (18, 64)]
    (whole,) = embedder.server.post("/pooling", {"input": TEXTS[0], "use_activation": False}).json()["data"]
    assert_close([whole["data"]], [embedder.embedding(TEXTS[0], normalize=False)])


def test_truncation(embedder):
    client, long = embedder.server.client(), text(300)
    ids = embedder.tokenizer(long)["input_ids"]
    for keep, length in ((10, 10), (-1, 128)):
        found = client.embeddings.create(model="", input=long, extra_body={"truncate_prompt_tokens": keep})
        assert found.usage.prompt_tokens == length
        words = " ".join(long.split()[: length - 2])  # the tokens around a text stay
        assert_close([found.data[0].embedding], [embedder.embedding(words)])
    for side, kept in (("left", ids[-10:]), ("right", ids[:10])):
        by_ids = {"truncate_prompt_tokens": 10, "truncation_side": side}
        found = client.embeddings.create(model="", input=ids, extra_body=by_ids)
        same = client.embeddings.create(model="", input=kept)
        assert found.data[0].embedding == pytest.approx(same.data[0].embedding, abs=1e-5)
    for truncate, count in (("START", 128), ("END", 128)):
        found = embedder.server.post("/v2/embed", {"texts": [long], "truncate": truncate}).json()
        assert found["meta"]["billed_units"]["input_tokens"] == count


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": []}, "input is an empty list; give at least one text"),
        ("/v1/embeddings", {"input": [[]]}, "is empty; it must have at least one token"),
        ("/v1/embeddings", {}, "give either input or messages"),
        ("/v1/embeddings", {"input": ["w4", 5]}, "mixes texts, token ids and messages"),
        ("/v1/embeddings", {"input": text(300)}, "has 302 tokens; at most 128 are allowed"),
        ("/v1/embeddings", {"input": ["w4", text(300)]}, r"input\[1\] has 302 tokens"),
        ("/v1/embeddings", {"input": "w4", "dimensions": 20}, "the model's Matryoshka dimensions are 16, 32"),
        ("/v1/embeddings", {"input": "w4", "dimensions": -1}, "dimensions is -1; it must be"),
        ("/v1/embeddings", {"input": "w4", "encoding_format": "hex"}, "encoding_format is 'hex'; allowed: float"),
        ("/v1/embeddings", {"input": "w4", "embed_dtype": "int4"}, "embed_dtype is 'int4'; allowed: float32"),
        ("/v1/embeddings", {"input": [-1]}, "out of vocabulary"),
        ("/v1/embeddings", {"input": [211]}, "out of vocabulary"),
        ("/v1/embeddings", {"input": "w4", "truncate_prompt_tokens": 129}, "tokens is 129; it must be -1, or"),
        ("/v1/embeddings", {"input": "w4", "truncation_side": "up"}, "truncation_side is 'up'; allowed: left, right"),
        ("/v1/embeddings", {"input": "w4", "prompt_name": "title"}, "the model's are: 'query', 'document'"),
        ("/v1/embeddings", {"input": ["w4"] * 2049}, "at most 2048 are allowed .--max-inputs"),
        ("/v1/embeddings", {"input": "w4", "priority": 1}, "a priority needs scheduling_policy"),
        ("/classify", {"input": "w4"}, "this model cannot classify; it can: embed ./v1/embeddings., token_embed"),
        ("/pooling", {"input": "w4", "task": "classify"}, "'classify'. This model has: embed, token_embed"),
        ("/pooling", {"input": "w4", "task": "score"}, "task 'score' is now classify"),
        ("/v2/embed", {"texts": []}, "texts is an empty list"),
        ("/v2/embed", {"texts": ["w4"], "inputs": []}, "give exactly one of texts and inputs"),
        ("/v2/embed", {"texts": ["w4"], "embedding_types": ["int8"]}, "embedding_types has 'int8'; allowed: float"),
        ("/v2/embed", {"texts": [text(300)], "truncate": "NONE"}, "a text has 302 tokens; at most 128 are allowed"),
        ("/v2/embed", {"images": ["data:"]}, "embeddings of images is not available yet"),
        ("/v1/completions", {"prompt": "w4"}, "this model does not generate text; it can: embed, token_embed"),
        ("/v1/chat/completions", {"messages": []}, "this model does not generate text"),
        ("/v1/responses", {"input": "w4", "background": True}, "this model does not generate text"),
        ("/v1/responses/input_tokens", {"input": "w4"}, "this model does not generate text"),
        ("/v1/messages", {"max_tokens": 1, "messages": []}, "this model does not generate text"),
        ("/v2/embed", {"texts": ["w4 " * 10_000]}, "texts has 30000 characters; at most"),
        ("/rerank", {"query": "w4", "documents": []}, "documents is empty"),
        ("/score", {"queries": ["w4", "w5"], "documents": ["w4", "w5", "w6"]}, "must be either 1:1, 1:N or N:N"),
    ],
)  # fmt: skip
def test_wrong_requests(embedder, path, body, message):
    assert re.search(message, refusal(embedder.server.post(path, body)))


def test_a_bi_encoder_scores_by_the_angle(embedder):
    query, documents = TEXTS[1], TEXTS[2:]
    found = embedder.server.post("/score", {"queries": query, "documents": documents}).json()
    vector = embedder.embedding(PROMPT + query)
    expected = [float(vector @ embedder.embedding(one)) for one in documents]
    assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-4)
    ranked = embedder.server.post("/v2/rerank", {"query": query, "documents": documents, "top_n": 2}).json()["results"]
    assert [one["index"] for one in ranked] == np.argsort(expected)[::-1][:2].tolist()


PROMPT = "w5 w6 "  # the model's for queries


def test_the_page_shows_the_engine(embedder):
    assert embedder.server.get("/view/info").json()["pools"] is True
    with httpx.stream("GET", f"{embedder.server.url}/view/stream", timeout=20) as stream:
        sample = json.loads(next(line for line in stream.iter_lines() if line).removeprefix("data: "))
    assert sample["running"] == [] and sample["blocks"]["total"] == sample["blocks"]["free"]


def test_invocations(embedder):
    body = {"input": TEXTS[0], "encoding_format": "float"}
    assert (
        embedder.server.post("/invocations", body).json()["data"]
        == embedder.server.post("/v1/embeddings", body).json()["data"]
    )


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank"])
def test_a_model_that_generates(server, path):
    body = {"input": "a", "texts": ["a"], "query": "a", "queries": "a", "documents": ["b"]}
    assert "this model generates text; start the server with a model that embeds" in refusal(server.post(path, body))
