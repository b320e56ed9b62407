from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire import LLM
from quire.config.flags import engine_kwargs
from quire.entrypoints.cli import serve
from tests.tiny_models import save_tiny

Start = Callable[..., LLM]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("compat") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    save_tiny("llama", folder, vocab_size=len(alphabet))
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def start(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """An engine from words of vLLM's command line."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    started: list[LLM] = []

    def start(*words: str) -> LLM:
        started.append(LLM(**arguments(str(tiny), "--device", "cpu", "--num-gpu-blocks-override", "64", *words)))
        return started[-1]

    yield start
    for llm in started:
        llm.shutdown()


def arguments(*words: str) -> dict[str, Any]:
    """The engine arguments of a command line."""
    return engine_kwargs(serve.parser().parse(list(words)))
