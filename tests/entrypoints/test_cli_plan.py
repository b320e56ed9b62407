"""`quire plan` as users type it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main
from tests.planning.configs import GPTQ, LLAMA3_8B, LLAMA3_70B


def folder(path: Path, config: dict[str, object]) -> str:
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA3_70B)
    assert main(["plan", model, "--gpus", "8xH100", "--goal", "latency"]) == 0
    out = capsys.readouterr().out
    assert "70.55B parameters" in out and "tensor-parallel sizes: 1, 2, 4, 8" in out
    assert "not 3: 64 attention heads cannot be divided by 3" in out
    assert f"recommended: quire serve {model} -tp 8 --max-model-len 8192" in out


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA3_8B | {"quantization_config": GPTQ})
    flags = ["--gpus", "2xL40S", "--batch", "1,8", "--prompt-len", "512", "--max-model-len", "4096", "--json"]
    assert main(["plan", model, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["weights"]["name"] == "gptq"
    assert [speed["batch"] for speed in found["recommended"]["speeds"]] == [1, 8]
    assert {"tensor_parallel_size", "memory", "first_token_ms", "command", "copies"} <= found["recommended"].keys()
    assert found["recommended"]["memory"]["bytes_per_token"].keys() == {"full"}


def test_a_model_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", folder(tmp_path, LLAMA3_70B), "--gpus", "H100"]) == 1
    out = capsys.readouterr().out
    assert "does not fit 1xH100" in out and "what would:" in out and "1xB200" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3-8b", "--gpus", "8xH900"], "unknown GPU"),
        (["llama3-8b", "--gpus", "H100", "--batch", "1,x"], "numbers of requests"),
        (["llama3-8b", "--gpus", "H100", "--batch", "0"], "from 1 up"),
        (["llama3-8b", "--gpus", "H100", "--prompt-len", "0"], "at least 1"),
        (["llama3-8b", "--gpus", "H100", "--goal", "fun"], "throughput, latency"),
        (["llama3-8b", "--gpus", "H100", "--max-model-len", "900000"], "1 to 131072"),
        (["llama3-8b", "--gpus", "H100", "--max-model-len", "100"], "at most that together"),
        (["llama3-8b", "--gpus", "H100", "--quantization", "int3"], "fp8, int8, int4"),
        (["llama3-8b", "--gpus", "H100", "--kv-cache-dtype", "int3"], "auto, bfloat16"),
        (["llama3-8b", "--gpus", "H100", "--gpu-memory-utilization", "7"], "gpu_memory_utilization"),
        (["llama3-8b", "--gpus", "H100", "--max-num-seqs", "0"], "max_num_seqs"),
        (["no-such-model", "--gpus", "H100"], "a shape: qwen3-0.6b"),
    ],
)
def test_bad_input_says_what_is_allowed(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_hub_id_needs_its_config_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder(tmp_path, LLAMA3_8B)
    asked: list[tuple[str, ...]] = []

    def download(repo: str, patterns: tuple[str, ...], **_: object) -> Path:
        asked.append((repo, *patterns))
        return tmp_path

    monkeypatch.setattr("quire.checkpoint.hub.download", download)
    assert main(["plan", "org/name", "--gpus", "H100"]) == 0
    assert asked == [("org/name", "config.json", "hf_quant_config.json")]


def test_torch_is_not_imported() -> None:
    """A plan takes a fraction of the time that importing torch does."""
    code = (
        "import sys; from quire.entrypoints.cli.main import main; "
        "code = main(['plan', 'llama3-8b', '--gpus', 'H200']); print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
