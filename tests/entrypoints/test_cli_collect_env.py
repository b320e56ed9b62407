import json
import subprocess
import sys

import pytest

import quire
from quire.config.environment import VARIABLES
from quire.entrypoints.cli import collect_env
from quire.entrypoints.cli.main import main


def test_json_and_text_in_a_subprocess() -> None:
    environment = {"PATH": "", "QUIRE_API_KEY": "hidden-1", "HF_TOKEN": "hidden-2", "OMP_NUM_THREADS": "3"}
    child = subprocess.run(
        [sys.executable, "-m", "quire", "collect-env", "--json"], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0 and child.stderr == ""
    facts = json.loads(child.stdout)
    assert facts["quire"]["version"] == quire.__version__
    assert facts["torch"]["version"] == facts["packages"]["torch"]
    assert facts["cpu"]["usable cores"] >= 1 and facts["memory"]["total"].endswith(" GiB")
    assert "nvidia-smi" in facts["gpu"]  # PATH is empty
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts["environment"]["QUIRE_API_KEY"] == facts["environment"]["HF_TOKEN"] == "set, not shown"
    assert "hidden" not in child.stdout


def test_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env, "torch_facts", lambda: {"CUDA available": False, "built for CUDA": None})
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert f"quire\n  version: {quire.__version__}\n" in text
    assert "torch\n  CUDA available: no\n  built for CUDA: none\n" in text
    assert "oneDNN limit: " in text and "attention extras\n  flash-attn: " in text


def test_whatever_fails_is_named_and_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no such luck")

    for name in ("quire.platforms.cpu_facts.cpu_flags", "quire.platforms.cpu_facts.available_memory"):
        monkeypatch.setattr(name, fail)
    monkeypatch.setattr("platform.platform", fail)
    monkeypatch.setattr("os.sysconf", fail)
    monkeypatch.setattr("subprocess.run", fail)
    monkeypatch.setattr("importlib.metadata.version", fail)
    assert main(["collect-env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cpu"]["flags"] == facts["system"]["os"] == facts["memory"]["total"] == "OSError: no such luck"
    assert facts["torch"]["unknown"] == "OSError: no such luck"
    assert facts["packages"]["torch"] == "unknown: no such luck"
    assert facts["cpu"]["logical cores"] >= 1 and facts["system"]["python"]


def test_a_gpu_list(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {1: "| Driver Version: 580.1   CUDA Version: 13.0  |\n", 3: "0, NVIDIA H200, 143771 MiB, 580.1, 9.0\n"}
    monkeypatch.setattr(collect_env, "output_of", lambda *command: answers[len(command)])
    assert collect_env.gpu_facts() == {
        "GPU 0": "NVIDIA H200, 143771 MiB, compute capability 9.0",
        "driver": "580.1",
        "CUDA of the driver": "13.0",
    }


def test_a_failing_program_reports_its_error() -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 3: gone"):
        collect_env.output_of(sys.executable, "-c", "import sys; print('gone', file=sys.stderr); sys.exit(3)")


def test_which_variables_are_shown() -> None:
    variables = {
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HUGGING_FACE_HUB_TOKEN": "x",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "QUIRE_SSL_PASSWORD": "x",
        "HOME": "x",
        "XDG_CACHE_HOME": "/cache",
        "OTEL_SERVICE_NAME": "chat",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x",
    }
    assert collect_env.environment(variables) == {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_TOKEN": "set, not shown",
        "OTEL_SERVICE_NAME": "chat",
        "QUIRE_SSL_PASSWORD": "set, not shown",
        "TOKENIZERS_PARALLELISM": "false",
        "XDG_CACHE_HOME": "/cache",
    }


def test_every_variable_of_quire_is_shown_and_no_secret() -> None:
    shown = collect_env.environment({variable.name: "x" for variable in VARIABLES})
    assert shown.keys() == {variable.name for variable in VARIABLES}
    secret = {"HF_TOKEN", "OPENAI_API_KEY", "QUIRE_API_KEY", "QUIRE_CLUSTER_TOKEN", "VLLM_API_KEY"}
    assert {name for name, value in shown.items() if value != "x"} == secret
