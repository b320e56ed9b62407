from collections.abc import Iterator

import openai
import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.stub_server import StubServer, stub_engine, stub_server


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with stub_server(stub_engine()) as one:
        yield one


@pytest.fixture
def slow() -> Iterator[StubServer]:
    """A slow engine, for events in the middle of a stream."""
    with stub_server(stub_engine(step_seconds=0.02), ServerConfig(enable_admin=True)) as one:
        yield one


@pytest.fixture
def client(server: StubServer) -> openai.OpenAI:
    return server.client()
