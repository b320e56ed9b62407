"""Environment variables: how they are read, and that docs/environment.md lists them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config import environment
from quire.config.environment import VARIABLES, Variable

PAGE = (Path(__file__).parents[2] / "docs" / "environment.md").read_text("utf-8")


def row(variable: Variable[object]) -> str:
    default = variable.default_text or f"`{variable.default}`"
    return f"| `{variable.name}` | {default} | {variable.meaning} |"


def test_the_docs_list_the_variables_that_users_may_set() -> None:
    listed = [line for line in PAGE.splitlines() if re.match(r"\| `[A-Z]", line)]
    assert listed == [row(variable) for variable in VARIABLES if variable.documented]


def test_a_constant_has_the_name_of_its_variable() -> None:
    assert all(getattr(environment, variable.name) is variable for variable in VARIABLES)
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (environment.QUIRE_API_KEY, " a, b ,,", ("a", "b")),
        (environment.QUIRE_API_KEY, None, ()),
        (environment.QUIRE_PLUGINS, None, None),
        (environment.QUIRE_PLUGINS, "", ()),
        (environment.QUIRE_CPU_ISA, None, "amx"),
        (environment.QUIRE_CPU_ISA, "avx2", "avx2"),
        (environment.QUIRE_NATIVE_KERNELS, None, True),
        (environment.QUIRE_NATIVE_KERNELS, "0", False),
        (environment.TRITON_INTERPRET, "1", True),
        (environment.TRITON_INTERPRET, "0", False),
        (environment.XDG_CACHE_HOME, "", None),
        (environment.XDG_CACHE_HOME, "/cache", "/cache"),
        (environment.NO_COLOR, "", False),
        (environment.NO_COLOR, "0", True),
        (environment.OTEL_SERVICE_NAME, None, "quire"),
    ],
)
def test_values_are_typed(variable: Variable[object], text: str | None, value: object) -> None:
    environ = {} if text is None else {variable.name: text}
    assert variable.get(environ) == value
    assert variable.is_set(environ) == (text is not None)


def test_a_value_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(ValueError, match="TRACES_PROTOCOL is 'udp'; allowed: grpc, http/protobuf"):
        environment.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "udp"})


def test_a_default_does_not_replace_what_the_user_has_set() -> None:
    environ = {"LRU_CACHE_CAPACITY": "7"}
    environment.LRU_CACHE_CAPACITY.set_default(environ=environ)
    environment.GOMP_SPINCOUNT.set_default(environ=environ)
    environment.ONEDNN_MAX_CPU_ISA.set_default("AVX2", environ)
    assert environ == {"LRU_CACHE_CAPACITY": "7", "GOMP_SPINCOUNT": "3000", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def test_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert environment.TERM.is_set() and environment.TERM.get() == "xterm"
    environment.TERM.set("dumb")
    environment.TERM.set_default("vt100")
    assert os.environ["TERM"] == "dumb"
    child = environment.process_environment({"TERM": "vt100"})
    assert child["TERM"] == "vt100" and os.environ["TERM"] == "dumb"


def test_the_import_is_cheap() -> None:
    code = "import sys, quire.config.environment; print({'torch', 'numpy', 'msgspec', 'jinja2'} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
