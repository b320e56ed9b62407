from collections.abc import Callable
from pathlib import Path

import pytest

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import CompiledGrammar
from quire.structured_output.backends.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from tests.structured_output.model import save_model, vocabulary_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(Path(tmp_path_factory.mktemp("grammar-model")))


@pytest.fixture(scope="session")
def vocabulary(tiny: str) -> Vocabulary:
    return vocabulary_of(tiny)


@pytest.fixture(scope="session")
def compile(vocabulary: Vocabulary) -> Callable[..., CompiledGrammar]:
    registry = BackendRegistry(lambda: vocabulary)
    return lambda **wanted: registry.compile(StructuredOutputsParams(**wanted))
