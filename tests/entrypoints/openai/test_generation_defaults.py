"""The model's sampling defaults over HTTP: they apply to fields that a request does not give."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire.bench.internal.stub_engine import StubEngine, cycle
from quire.config import EngineConfig
from quire.messages.sampling_params import SamplingParams
from tests.entrypoints.stub_server import StubServer, stub_server

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


class Recording(StubEngine):
    def __init__(self) -> None:
        overrides = DEFAULTS | {"max_new_tokens": 3}
        super().__init__(cycle([5]), config=EngineConfig.from_kwargs(override_generation_config=overrides))
        self.seen: list[SamplingParams] = []

    def generate(self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(sampling_params)
        return super().generate(prompt, sampling_params, *args, **kwargs)


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(Recording()) as one:
        yield one


def params_of(server: StubServer, path: str, body: dict[str, Any]) -> SamplingParams:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    assert isinstance(server.engine, Recording)
    return server.engine.seen[-1]


REQUESTS = pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)


@REQUESTS
def test_a_request_without_parameters_gets_them(server: StubServer, path: str, body: dict[str, Any]) -> None:
    params = params_of(server, path, body)
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    assert params.max_tokens == 3


@REQUESTS
def test_request_parameters_override_them(server: StubServer, path: str, body: dict[str, Any]) -> None:
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 5}
    params = params_of(server, path, body | given)
    assert {name: getattr(params, name) for name in given} == given
    assert params_of(server, path, body | {"top_p": 0.5}).temperature == DEFAULTS["temperature"]


@REQUESTS
def test_a_beam_search_is_as_long(server: StubServer, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, body | {"use_beam_search": True, "n": 1, "ignore_eos": True})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 3
