from collections.abc import Callable
from pathlib import Path

import pytest

from quire.checkpoint.resolve import resolve_model
from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.base import Compiled
from quire.structured_output.registry import BackendRegistry
from quire.structured_output.vocabulary import Vocabulary
from quire.tokenizer.load import load_tokenizer
from tests.structured_output.model import END, save_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(Path(tmp_path_factory.mktemp("grammar-model")))


@pytest.fixture(scope="session")
def vocabulary(tiny: str) -> Vocabulary:
    tokenizer = load_tokenizer(resolve_model(tiny))
    end = tokenizer.encode(END, add_special_tokens=False)[0]
    return Vocabulary(tokenizer, tokenizer.vocab_size + 13, (end,))


@pytest.fixture(scope="session")
def compile(vocabulary: Vocabulary) -> Callable[..., Compiled]:
    registry = BackendRegistry(lambda: vocabulary)
    return lambda **wanted: registry.compile(StructuredOutputsParams(**wanted))
