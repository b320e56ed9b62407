"""Where log lines go, and what configures that."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.config.vllm.unpack import logging_options

SAY = "import logging; from quire.config.logs import set_up_logging; set_up_logging({}); log = logging.getLogger({}); "
LINES = "log.debug('fine'); log.info('plain'); log.warning('bad')"


def logged(arguments: str = "", logger: str = "quire", **environ: str) -> tuple[str, str]:
    """Standard output and standard error of a process that logs three lines."""
    code = SAY.format(arguments, repr(logger)) + LINES
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**ENV, **environ})
    assert not ran.returncode, ran.stderr
    return ran.stdout, ran.stderr


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    ENV.clear()
    ENV.update({name: value for name, value in os.environ.items() if not name.startswith("VLLM_")})


ENV: dict[str, str] = {}


def test_lines_go_to_standard_error_from_info_on() -> None:
    assert logged() == ("", "quire: plain\nquire: bad\n")


def test_the_level() -> None:
    assert logged("'WARNING'") == ("", "quire: bad\n")
    assert logged(VLLM_LOGGING_LEVEL="debug")[1] == "quire: fine\nquire: plain\nquire: bad\n"
    assert logged("'ERROR'", VLLM_LOGGING_LEVEL="debug") == ("", "")


def test_stream_and_prefix() -> None:
    said = logged(VLLM_LOGGING_STREAM="ext://sys.stdout", VLLM_LOGGING_PREFIX="50% ")
    assert said == ("50% quire: plain\n50% quire: bad\n", "")


def test_a_program_may_configure_logging_itself() -> None:
    assert logged(VLLM_CONFIGURE_LOGGING="0") == ("", "bad\n")  # Python's last resort


def test_a_file_configures_logging(tmp_path: Path) -> None:
    file = tmp_path / "logging.json"
    handler = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "own"}
    config = {
        "version": 1,
        "formatters": {"own": {"class": "vllm.logging_utils.NewLineFormatter", "format": "[%(name)s] %(message)s"}},
        "handlers": {"own": handler},
        "loggers": {"vllm": {"handlers": ["own"], "level": "WARNING"}},
    }
    file.write_text(json.dumps(config))
    assert logged(f"None, {str(file)!r}", "quire.access") == ("[quire.access] bad\n", "")
    assert logged(VLLM_LOGGING_CONFIG_PATH=str(file)) == ("[quire] bad\n", "")


def test_a_file_that_is_wrong_is_an_error(tmp_path: Path) -> None:
    from quire.config.logs import set_up_logging

    file = tmp_path / "logging.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"is not JSON: .*--log-config-file"):
        set_up_logging(config_file=str(file))
    file.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        set_up_logging(config_file=str(file))


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"logging_config": {"log_level": "DEBUG"}}, "DEBUG"),
        ({"logging_config": {"log_level": "DEBUG"}, "log_level": "ERROR"}, "ERROR"),
        ({"logging_config": None}, None),
        ({}, None),
    ],
)
def test_the_level_of_vllms_object(given: dict[str, Any], level: str | None) -> None:
    assert logging_options(given) == (level, None)
    assert EngineConfig.from_kwargs(**given).observability.log_level == level


def test_programs_with_a_level_in_vllms_object() -> None:
    """The engine's constructor is not reached: a model that does not exist."""
    ask = "import logging; print(logging.getLogger('quire').level)"
    starts = (
        "from quire import LLM as start; given = {'logging_config': {'log_level': 'ERROR'}, 'model': '/nowhere'}",
        "from quire import AsyncLLMEngine as E, AsyncEngineArgs as A; start = E.from_engine_args; "
        "given = {'engine_args': A(model='/nowhere', logging_config={'log_level': 'ERROR'})}",
        "from quire import LLMEngine as E, EngineArgs as A; start = E.from_engine_args; "
        "given = {'engine_args': A(model='/nowhere', logging_config={'log_level': 'ERROR'})}",
        "from quire.entrypoints.cli import serve; start = serve.run; "
        "words = ['/nowhere', '--logging-config.log_level', 'ERROR', '--host', 'nowhere.invalid']; "
        "given = {'args': serve.parser().parse(words)}",
    )
    for lines in starts:
        code = f"{lines}\ntry: start(**given)\nexcept Exception: pass\n{ask}"
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
        assert ran.stdout.strip() == "40", ran.stderr
