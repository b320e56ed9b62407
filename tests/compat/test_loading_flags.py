"""Flags of loading: which files are read, from where, and how."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.resolve_config import resolve_config
from quire.tokenizer.load import tokenizer_of
from quire.tokenizer.tokenizer import Tokenizer
from tests.compat.conftest import Start, arguments


@pytest.fixture
def hub(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The downloads that were asked for; each gets the tiny model."""
    asked: list[dict[str, Any]] = []
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    named = json.loads((other / "tokenizer.json").read_text()) | {"added_tokens": []}
    named["model"]["vocab"]["extra"] = len(named["model"]["vocab"])
    (other / "tokenizer.json").write_text(json.dumps(named))

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo, "token": os.environ.get("HF_TOKEN"), **options})
        return str(other if options["revision"] == "other" else tiny)

    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    yield asked
    os.environ.pop("HF_TOKEN", None)


def tokenizer(*words: str) -> Tokenizer:
    config, checkpoint = resolve_config(EngineConfig.from_kwargs(**arguments(*words)))
    return tokenizer_of(checkpoint, config.model)


def test_the_tokenizer_of_another_revision(hub: list[dict[str, Any]]) -> None:
    plain = tokenizer("org/model")
    other = tokenizer("org/model", "--tokenizer-revision", "other")
    assert other.vocab_size == plain.vocab_size + 1
    assert hub[-1]["repo"] == "org/model" and hub[-1]["revision"] == "other"
    named = tokenizer("org/model", "--tokenizer", "org/tokenizer", "--tokenizer-revision", "other")
    assert hub[-1]["repo"] == "org/tokenizer" and named.vocab_size == other.vocab_size


def test_a_slow_tokenizer(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shutil.copytree(tiny, tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    fast, hf, slow = (tokenizer(str(tmp_path / "model"), "--tokenizer-mode", mode) for mode in ("auto", "hf", "slow"))
    assert fast.encode("ab") == hf.encode("ab") != slow.encode("ab")
    with pytest.raises(ValueError, match="tokenizer_mode is 'mistral'; allowed: auto, hf, slow"):
        EngineConfig.from_kwargs(tokenizer_mode="mistral")


def test_a_token_for_the_hub(hub: list[dict[str, Any]]) -> None:
    config, _ = resolve_config(EngineConfig.from_kwargs(**arguments("org/model", "--hf-token", "secret")))
    assert hub[-1]["token"] == "secret" and "secret" not in repr(config)
    os.environ.pop("HF_TOKEN")
    resolve_config(EngineConfig.from_kwargs(**arguments("org/model", "--hf-token")))  # the stored one
    assert hub[-1]["token"] is None


def test_files_that_are_not_downloaded(hub: list[dict[str, Any]]) -> None:
    resolve_config(EngineConfig.from_kwargs(**arguments("org/model")))
    assert hub[-1]["ignore_patterns"] == ["original/**/*"]
    words = ("--ignore-patterns", "consolidated*", "*.pth")
    resolve_config(EngineConfig.from_kwargs(**arguments("org/model", *words)))
    assert hub[-1]["ignore_patterns"] == ["consolidated*", "*.pth"]
    assert EngineConfig.from_kwargs(ignore_patterns="*.pth").load.ignore_patterns == ("*.pth",)


def test_a_config_from_elsewhere(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, _ = resolve_config(EngineConfig.from_kwargs(**arguments(str(tiny))))
    other, _ = resolve_config(EngineConfig.from_kwargs(**arguments(str(tiny), "--hf-config-path", str(tmp_path))))
    assert (plain.model.derived_max_model_len, other.model.derived_max_model_len) == (512, 96)
    with pytest.raises(ValueError, match="--hf-config-path"):
        resolve_config(EngineConfig.from_kwargs(model=str(tiny), hf_config_path="nowhere"))


def test_formats_of_configs(tiny: Path) -> None:
    assert EngineConfig.from_kwargs(**arguments("--config-format", "hf")).model.config_format == "hf"
    with pytest.raises(ValueError, match="config_format is 'mistral'; allowed: auto, hf"):
        EngineConfig.from_kwargs(config_format="mistral")


def test_how_files_are_read(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: asked.append(given[-1]))
    counts = []
    for words in ((), ("prefetch",), ("eager",), ("lazy",)):
        asked.clear()
        start(*(["--safetensors-load-strategy", *words] if words else []))
        counts.append(len(asked))
    assert counts == [1, 1, 0, 0]
