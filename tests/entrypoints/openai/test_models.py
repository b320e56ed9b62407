"""/v1/models, /tokenize, /detokenize and /openapi.json."""

import openai

from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server


def test_models(client: openai.OpenAI, server: StubServer) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == server.engine.max_model_len


def test_several_names() -> None:
    with stub_server(stub_engine(), ServerConfig(served_model_name=("a", "org/b"))) as server:
        client = server.client()
        assert [card.id for card in client.models.list().data] == ["a", "org/b"]
        assert client.models.retrieve("org/b").id == "org/b"
        assert client.completions.create(model="org/b", prompt="x", max_tokens=1).model == "org/b"
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json()["model"] == "a"


def test_tokenize_and_detokenize(server: StubServer) -> None:
    response = server.post("/tokenize", {"prompt": "Hello world", "return_token_strs": True}).json()
    assert response["count"] == len(response["tokens"]) == len(response["token_strs"])
    assert response["max_model_len"] == server.engine.max_model_len
    assert server.post("/detokenize", {"tokens": response["tokens"]}).json() == {"prompt": "Hello world"}


def test_tokenized_chats_equal_the_prompt_of_a_completion(client: openai.OpenAI, server: StubServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    count = server.post("/tokenize", {"messages": messages}).json()["count"]
    response = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)  # type: ignore[arg-type]
    assert response.usage is not None and response.usage.prompt_tokens == count
    assert server.post("/tokenize", {"prompt": "a", "messages": messages}).status_code == 400
    assert server.post("/detokenize", {"tokens": [-1]}).status_code == 400


def test_the_openapi_document_lists_every_path_and_field(server: StubServer) -> None:
    document = server.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health", "/v1/models/{name}"} <= set(
        document["paths"]
    )
    assert "/abort_requests" not in document["paths"]  # administration is off
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"] and "cache_salt" in chat["properties"]
