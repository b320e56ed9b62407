import io
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.config import EngineConfig, ModelConfig
from quire.config.flags import engine_kwargs
from quire.entrypoints.cli import start
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
    request_id: str
    prompt: str
    outputs: list[Completion]
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    num_cached_tokens: int = 0
    prompt_logprobs: None = None
    error: str | None = None


class EchoEngine:
    """Upper-cases each prompt, the last one first, and records its calls."""

    last: "EchoEngine"
    config = EngineConfig()

    def __init__(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("model") == "missing":
            raise ValueError("model 'missing' was not found; give a folder, a .gguf file or a hub id")
        self.kwargs = kwargs
        self.input_processor = self
        self.is_shut_down = False
        self.waiting: list[Output] = []
        self.params: list[Any] = []
        EchoEngine.last = self

    def parse_many(self, prompts: list[Any]) -> list[Any]:
        return [self.parse(prompt) for prompt in prompts]

    def parse(self, prompt: Any) -> Any:
        if prompt == "wrong":
            raise ValueError("no such token")
        return prompt

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        if prompt == "long":
            raise ValueError("the prompt has 99 tokens")
        logprobs = [{7: Logprob(-0.5)}, {8: Logprob(-1.0)}] if params.logprobs is not None else None
        completion = Completion(str(prompt).upper(), logprobs=logprobs)
        error = "NaN" if prompt == "bad" else None
        self.waiting.append(Output(request_id, prompt, [completion] * params.n, error=error))
        self.params.append(params)

    def step(self) -> list[Output]:
        return [self.waiting.pop()]

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "start_engine", lambda args, leave_out: EchoEngine(engine_kwargs(args, leave_out)))


def run_python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True)


@pytest.mark.parametrize("argv", [["--help"], ["bench", "--help"], ["--version"]])
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


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_of_a_command_imports_no_engine(command: str) -> None:
    code = (
        "import sys\n"
        "from quire.entrypoints.cli.main import main\n"
        "try:\n"
        f"    main([{command!r}, '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('heavy:', sorted({'torch', 'numpy', 'tokenizers', 'transformers', 'jinja2'} & set(sys.modules)))\n"
    )
    child = run_python("-c", code)
    assert "--presence-penalty" in child.stdout and "--stop TEXT" in child.stdout
    assert child.stdout.splitlines()[-1] == "heavy: []"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("generate", "chat", "bench throughput", "bench latency", "bench startup"):
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
        (["zzz"], "unknown command 'zzz'; allowed: "),
    ],
)
def test_unknown_command(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_generate_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "one", "--prompt", "two"]) == 0
    assert capsys.readouterr().out == "ONE\n\nTWO\n"
    assert EchoEngine.last.is_shut_down


def test_generate_passes_engine_and_sampling_flags_where_they_belong() -> None:
    flags = "--temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --max-tokens 4 --ignore-eos --block-size 32"
    assert main(["generate", "--prompt", "x", *flags.split(), "tiny"]) == 0
    assert EchoEngine.last.kwargs == {"model": "tiny", "block_size": 32}
    [params] = EchoEngine.last.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.max_tokens, params.ignore_eos) == (3, 4, True)


def test_generate_takes_the_models_defaults_for_what_is_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    defaults = ModelConfig(default_sampling={"temperature": 0.6, "top_k": 20, "max_tokens": 9})
    monkeypatch.setattr(EchoEngine, "config", EngineConfig(model=defaults))
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "x"}\n{"prompt": "y", "temperature": 0.1}\n')
    assert main(["generate", "--prompts-file", str(lines), "--top-k", "5"]) == 0
    asked = [(params.temperature, params.top_k, params.max_tokens) for params in EchoEngine.last.params]
    assert asked == [(0.6, 5, 9), (0.1, 5, 9)]


def test_a_failed_prompt_is_named_and_the_others_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "good", "--prompt", "bad"]) == 1
    printed = capsys.readouterr()
    assert "GOOD" in printed.out
    assert printed.err == "quire: error: prompt 'bad' failed: NaN\n"


def test_repeated_flags_and_several_completions(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["generate", "--prompt", "x", "--stop", "a", "--stop", "b", "--n", "2", "--logit-bias", '{"5": 1}']) == 0
    )
    [params] = EchoEngine.last.params
    assert params.stop == ["a", "b"] and params.logit_bias == {5: 1}
    assert capsys.readouterr().out == "X\n\nX\n"


def write(tmp_path: Path, *lines: Any) -> str:
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(file)


def test_json_lines_override_the_flags_and_come_back_in_order(tmp_path: Path) -> None:
    source = write(
        tmp_path, {"prompt": "a\u2028b", "id": 7, "temperature": 0}, "", {"prompt_token_ids": [5, 6], "stop": "x"}
    )
    out = tmp_path / "out.jsonl"
    assert main(["generate", "--prompts-file", source, "--temperature", "0.5", "--output", str(out)]) == 0
    results = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert [(r.get("id"), r["text"]) for r in results] == [(7, "A\u2028B"), (None, "[5, 6]")]
    first, second = EchoEngine.last.params
    assert (first.temperature, second.temperature, second.stop) == (0, 0.5, ["x"])


BAD_LINES = {
    "line 2: not valid JSON": "{oops",
    "line 2: a line must be a JSON object": "[1]",
    "line 2: give one of prompt, prompt_token_ids, messages; this line has none": {},
    "this line has prompt, messages": {"prompt": "x", "messages": []},
    "unknown field 'temprature'; did you mean 'temperature'?": {"prompt": "x", "temprature": 1},
    "line 2: temperature is -1": {"prompt": "x", "temperature": -1},
    "line 2: temperature must be a finite number": {"prompt": "x", "temperature": "hot"},
    "line 2: stop": {"prompt": "x", "stop": 5},
    "line 2: prompt must be a string": {"prompt": [1]},
    "line 2: no such token": {"prompt": "wrong"},
    "line 2: the prompt has 99 tokens": {"prompt": "long"},
}


@pytest.mark.parametrize("message", BAD_LINES)
def test_a_bad_line_stops_or_is_skipped(message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path, {"prompt": "one"}, BAD_LINES[message], {"prompt": "three"})
    assert main(["generate", "--prompts-file", source]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert main(["generate", "--prompts-file", source, "--on-error", "skip"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == "ONE\n\nTHREE\n"


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
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "d"}\n'))
    assert main(["generate"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"prompt": "d"}\n'))
    assert main(["generate", "--input-format", "text"]) == 0
    assert capsys.readouterr().out == 'A\n\nB\nC\nD\n{"PROMPT": "D"}\n'


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "x", "--model", "missing"], "model 'missing' was not found"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0; it must be between 0"),
        (["--prompt", "x", "--prompts-file", "f"], "both --prompt and --prompts-file"),
        (["--prompts-file", "no-such-file"], "no-such-file"),
        (["--prompt", "x", "--output", "/no/such/folder/out"], "/no/such/folder/out"),
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
