from collections.abc import Iterator

import openai
import pytest

from quire.config.server import ServerConfig
from tests.entrypoints.openai.running import Running, running, stub_engine


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(stub_engine()) as one:
        yield one


@pytest.fixture
def slow() -> Iterator[Running]:
    """An engine that takes its time, for what happens in the middle of a stream."""
    with running(stub_engine(step_seconds=0.02), ServerConfig(enable_admin=True)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()
