import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main
from quire.models.registry import ARCHITECTURES
from tests.models import out_of_tree


def folder(path: Path, **config: object) -> str:
    (path / "config.json").write_text(json.dumps({"vocab_size": 9, **config}))
    return str(path)


def test_the_list_has_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["architecture", "family", "kind", "GGUF", "notes"]
    assert [line.split()[0] for line in lines[1 : len(ARCHITECTURES) + 1]] == list(ARCHITECTURES)
    assert "transformers" in lines[-2] + lines[-1]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in facts["built_in"]] == list(ARCHITECTURES)
    assert facts["built_in"][0] | {"note": ""} == {
        "architecture": "LlamaForCausalLM",
        "family": ARCHITECTURES["LlamaForCausalLM"].family,
        "kind": "dense",
        "gguf": "llama",
        "note": "",
    }


@pytest.mark.parametrize(
    ("config", "flags", "code", "said"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, [], 0, "served: Qwen3ForCausalLM is Qwen3, a built-in family"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, [], 0, "served through transformers: Bloom"),
        ({"architectures": ["BloomForCausalLM"]}, ["--model-impl", "quire"], 1, "not served: architecture not support"),
        (
            {"architectures": ["Nope"]},
            ["--hf-overrides", '{"architectures": ["LlamaForCausalLM"]}'],
            0,
            "served: Llama",
        ),
    ],
)
def test_how_a_model_would_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: dict, flags: list[str], code: int, said: str
) -> None:
    assert main(["models", folder(tmp_path, **config), *flags]) == code
    assert capsys.readouterr().out.startswith(said)


def test_a_models_facts_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert main(["models", model, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts | {"why": ""} == {"model": model, "architectures": ["Qwen2ForCausalLM"], "impl": "quire", "why": ""}


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "/nowhere"]) == 2
    assert "No model at '/nowhere'" in capsys.readouterr().err


def test_it_runs_without_torch_and_lists_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(out_of_tree.install(tmp_path)))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("QUIRE_PLUGINS", out_of_tree.PLUGIN)
    script = "import sys; from quire.entrypoints.cli.main import main; main(['models']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "False", done.stderr
    assert any(line.startswith(out_of_tree.ARCHITECTURE) and "out_of_tree_model.model" in line for line in lines)
