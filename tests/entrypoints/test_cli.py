import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.entrypoints.cli.main import main


@dataclass
class Logprob:
    logprob: float


@dataclass
class Completion:
    text: str
    token_ids: list[int] = field(default_factory=lambda: [7, 8])
    finish_reason: str = "length"
    stop_reason: int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass
class Output:
    prompt: str
    outputs: list[Completion]
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_cached_tokens: int = 0
    error: str | None = None


class EchoLLM:
    """Answers each prompt in capitals and remembers how it was called."""

    last: "EchoLLM"

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("model") == "missing":
            raise ValueError("model 'missing' was not found; give a folder, a .gguf file or a hub id")
        self.kwargs = kwargs
        self.is_shut_down = False
        EchoLLM.last = self

    def generate(self, prompts: list[str], params: Any, use_tqdm: bool) -> list[Output]:
        self.params = params
        asked = params.logprobs is not None
        logprobs = [{7: Logprob(-0.5)}, {8: Logprob(-1.0)}] if asked else None
        return [
            Output(prompt, [Completion(prompt.upper(), logprobs=logprobs)], error="NaN" if prompt == "bad" else None)
            for prompt in prompts
        ]

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(quire), "LLM", EchoLLM)


def run_python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True)


@pytest.mark.parametrize("argv", [["--help"], ["bench", "--help"], ["--version"], ["generate", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from quire.entrypoints.cli.main import main\n"
        "try:\n"
        f"    main({argv!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('heavy:', sorted({'torch', 'numpy', 'msgspec', 'tokenizers', 'transformers'} & set(sys.modules)))\n"
    )
    child = run_python("-c", code)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "heavy: []"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("generate", "bench throughput", "bench latency", "bench startup"):
        assert f"  {name} " in text


def test_bench_help_lists_the_benchmarks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    text = capsys.readouterr().out
    assert "bench latency" in text
    assert "generate" not in text


def test_version_through_python_m() -> None:
    assert run_python("-m", "quire", "--version").stdout == f"quire {quire.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean 'generate'?"),
        (["bench", "latncy"], "unknown command 'bench latncy'; did you mean 'bench latency'?"),
        (["zzz"], "unknown command 'zzz'; allowed: generate, bench throughput"),
    ],
)
def test_unknown_command(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_generate_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "one", "--prompt", "two"]) == 0
    assert capsys.readouterr().out == "ONE\n\nTWO\n"
    assert EchoLLM.last.is_shut_down


def test_generate_passes_engine_and_sampling_flags_where_they_belong() -> None:
    flags = "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 4 --ignore-eos --block-size 32"
    assert main(["generate", "--prompt", "x", *flags.split(), "tiny"]) == 0
    assert EchoLLM.last.kwargs == {"model": "tiny", "block_size": 32}
    params = EchoLLM.last.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (3, 4, True)


def test_a_failed_prompt_is_named_and_the_others_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "good", "--prompt", "bad"]) == 1
    printed = capsys.readouterr()
    assert "GOOD" in printed.out
    assert printed.err == "quire: error: prompt 'bad' failed: NaN\n"


def test_generate_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "é", "--json", "--logprobs", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "prompt": "é",
        "text": "É",
        "token_ids": [7, 8],
        "finish_reason": "length",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "logprobs": [{"7": -0.5}, {"8": -1.0}],
    }


def test_generate_reads_a_file_or_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\n")
    assert main(["generate", "--prompts-file", str(file)]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
    assert main(["generate"]) == 0
    assert capsys.readouterr().out == "A\n\nB\nC\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "x", "--model", "missing"], "model 'missing' was not found"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be 0 or more"),
        (["--prompt", "x", "--prompts-file", "f"], "both --prompt and --prompts-file"),
        (["--prompts-file", "no-such-file"], "no-such-file"),
        ([], "standard input holds no prompt"),
    ],
)
def test_generate_explains_mistakes(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ")
    assert message in error


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="was not found"):
        main(["generate", "--prompt", "x", "--model", "missing", "--debug"])
