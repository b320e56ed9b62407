"""/score, /rerank and /classify of a cross-encoder, and many requests at once."""

import threading

import numpy as np
import pytest

from quire.config.pooling import PoolingSetup
from quire.entrypoints.pooling import scoring
from quire.entrypoints.pooling.embeddings import PoolEndpoint
from tests.entrypoints.stub_server import refusal, stub_engine, stub_server
from tests.pooling.models import text

QUERY = text(6, 1)
DOCUMENTS = [text(length, 2) for length in (3, 40, 9, 20)]


@pytest.mark.parametrize(
    "names", [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")]
)
def test_scores(cross_encoder, names):
    expected = [cross_encoder.score(QUERY, one) for one in DOCUMENTS]
    for path in ("/score", "/v1/score"):
        found = cross_encoder.server.post(path, dict(zip(names, (QUERY, DOCUMENTS), strict=True))).json()
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-4)
    pairs = dict(zip(names, (DOCUMENTS, DOCUMENTS[::-1]), strict=True))
    found = cross_encoder.server.post("/score", pairs).json()["data"]
    expected = [cross_encoder.score(*pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [one["score"] for one in found] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank(cross_encoder, path):
    expected = [cross_encoder.score(QUERY, one) for one in DOCUMENTS]
    found = cross_encoder.server.post(path, {"query": QUERY, "documents": DOCUMENTS}).json()
    assert [one["index"] for one in found["results"]] == np.argsort(expected)[::-1].tolist()
    for one in found["results"]:
        assert one["document"]["text"] == DOCUMENTS[one["index"]]
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-4)
    lengths = [len(cross_encoder.tokenizer(QUERY, one)["input_ids"]) for one in DOCUMENTS]
    assert found["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    best = {"query": {"text": QUERY}, "documents": [{"text": one} for one in DOCUMENTS], "top_n": 1}
    (first,) = cross_encoder.server.post(path, best | {"return_documents": False}).json()["results"]
    assert first == {key: found["results"][0][key] for key in ("index", "relevance_score")}


def test_classes_of_texts(cross_encoder):
    found = cross_encoder.server.post("/classify", {"input": DOCUMENTS}).json()["data"]
    assert [one["label"] for one in found] == ["fits"] * 4 and all(one["num_classes"] == 1 for one in found)
    assert all(0 < one["probs"][0] < 1 for one in found)


def test_limits_on_tokens(cross_encoder):
    body = {"query": QUERY, "documents": [text(300)]}
    assert "Please reduce the length of the input prompt" in refusal(cross_encoder.server.post("/rerank", body))
    shorter = cross_encoder.server.post("/rerank", body | {"max_tokens_per_doc": 5, "max_tokens_per_query": 2}).json()
    kept = cross_encoder.score(" ".join(QUERY.split()[:2]), " ".join(text(300).split()[:5]))
    assert shorter["results"][0]["relevance_score"] == pytest.approx(kept, abs=1e-4)
    cut = cross_encoder.server.post("/rerank", body | {"truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 128
    wrong = refusal(cross_encoder.server.post("/rerank", body | {"max_tokens_per_doc": 128}))
    assert "max_tokens_per_doc is 128; it must be from 0 to less than max_model_len 128" in wrong


def test_limits_on_characters(cross_encoder):
    """A query is tokenized with every document: a body of some kilobytes must not become gigabytes."""
    long = {"query": "w4 " * 10_000, "documents": ["w4"]}
    assert "has 30000 characters; at most" in refusal(cross_encoder.server.post("/rerank", long))
    many = {"query": "w4 " * 6000, "documents": ["w4"] * 2048, "truncate_prompt_tokens": -1}
    message = refusal(cross_encoder.server.post("/rerank", many))
    assert "the pairs have 36868096 characters, the query's with each document; at most 33554432" in message
    assert cross_encoder.server.post("/rerank", many | {"max_tokens_per_query": 3}).status_code == 200


def test_many_tokens_are_compared_in_parts(monkeypatch):
    query, document = (np.random.default_rng(i).standard_normal((length, 8)) for i, length in enumerate((7, 5)))
    whole = scoring._max_sim(query, document)
    monkeypatch.setattr(scoring, "MAX_PRODUCTS", 12)
    assert scoring._max_sim(query, document) == pytest.approx(whole) == (query @ document.T).max(axis=1).sum()


def test_vectors_of_all_tokens_are_limited(monkeypatch):
    engine = stub_engine()
    engine.config.pooling.setup = PoolingSetup("embed", ("embed", "token_embed"))
    monkeypatch.setattr(PoolEndpoint, "max_numbers", 576 * 100)  # of SmolLM2-135M's width
    with stub_server(engine) as server:
        for task, count, status in (("token_embed", 100, 200), ("token_embed", 101, 400), ("embed", 101, 200)):
            response = server.post("/pooling", {"input": [1] * count, "task": task})
            assert response.status_code == status, response.text


def test_what_the_model_cannot_do(cross_encoder):
    message = refusal(cross_encoder.server.post("/v1/embeddings", {"input": "w4"}))
    assert message == "this model cannot embed; it can: classify (/classify), token_classify (/pooling)"


def test_short_and_long_texts_wait_for_each_other_in_turn(embedder):
    """By counts: while 64 short texts are asked for again and again, long ones are answered, and the reverse."""
    done: list[str] = []
    stop = threading.Event()
    long, short = text(120, 3), [text(2, i) for i in range(64)]

    def ask(name: str, body: object, times: int | None) -> None:
        client = embedder.server.client()
        while len([one for one in done if one == name]) < times if times is not None else not stop.is_set():
            client.embeddings.create(model="", input=body)
            done.append(name)

    def run(background: tuple[str, object], foreground: tuple[str, object]) -> list[str]:
        done.clear()
        stop.clear()
        others = [threading.Thread(target=ask, args=(*background, None)) for _ in range(4)]
        for thread in others:
            thread.start()
        ask(*foreground, 6)
        stop.set()
        for thread in others:
            thread.join(60)
        return list(done)

    for background, foreground in ((("short", short), ("long", long)), (("long", [long] * 4), ("short", short[0]))):
        order = run(background, foreground)
        places = [place for place, name in enumerate(order) if name == foreground[0]]
        assert len(places) == 6
        # Four clients in the background: in a fair server few of their answers lie between two of the other's.
        gaps = np.diff(places)
        assert gaps.max() <= 16, order
        assert order.count(background[0]) >= 1
