"""Where log lines go, and what configures that."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
