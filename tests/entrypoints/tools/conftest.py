from collections.abc import Iterator

import pytest

from tests.entrypoints.server_process import ServerProcess, server_process


@pytest.fixture(scope="package")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server process with the embedded model, under the name tiny."""
    flags = ("--served-model-name", "tiny", "--num-gpu-blocks-override", "1024", "--max-model-len", "2048")
    auto = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with server_process(tmp_path_factory.mktemp("smollm"), *flags, *auto) as server:
        yield server
