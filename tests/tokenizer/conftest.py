from pathlib import Path

import pytest

from quire.checkpoint import resolve_model
from quire.checkpoint.resolve import Checkpoint
from quire.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.vocabularies import save_byte_level, sentencepiece


@pytest.fixture(scope="session")
def smollm() -> Tokenizer:
    return load_tokenizer(resolve_model(None))


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder) -> Tokenizer:
    return load_tokenizer(Checkpoint("tiny", "dummy", byte_level_folder, ()))


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return sentencepiece()
