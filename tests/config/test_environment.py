"""Environment variables: how they are read, and that docs/environment.md lists them."""

import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from quire.config import EngineConfig, environment, logs
from quire.config.environment import OPTION_DEFAULTS, VARIABLES, Variable
from quire.config.server import ServerConfig, server_config
from quire.platforms.defaults import with_platform_defaults

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
        (environment.VLLM_SERVER_DEV_MODE, "1", True),
        (environment.VLLM_SERVER_DEV_MODE, "0", False),
        (environment.VLLM_XGRAMMAR_CACHE_MB, "2", 2 << 20),
        (environment.VLLM_CPU_KVCACHE_SPACE, "0.5", 1 << 29),
        (environment.VLLM_LOGGING_LEVEL, "debug", "DEBUG"),
    ],
)
def test_values_are_typed(variable: Variable[object], text: str | None, value: object) -> None:
    environ = {} if text is None else {variable.name: text}
    assert variable.get(environ) == value
    assert variable.is_set(environ) == (text is not None)


def test_a_value_that_is_not_allowed_is_an_error() -> None:
    with pytest.raises(ValueError, match="TRACES_PROTOCOL is 'udp'; allowed: grpc, http/protobuf"):
        environment.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "udp"})


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf"])
def test_seconds_between_lines_are_more_than_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"VLLM_LOG_STATS_INTERVAL is '{text}'; it must be more than 0"):
        environment.VLLM_LOG_STATS_INTERVAL.get({"VLLM_LOG_STATS_INTERVAL": text})


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


def test_vllms_variables_are_the_defaults_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "7")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_XGRAMMAR_CACHE_MB", "3")
    assert server_config(Namespace()).max_n == 7 and server_config(Namespace()).enable_admin
    assert server_config(Namespace(max_n=5)).max_n == 5
    assert EngineConfig.from_kwargs().structured_outputs.structured_outputs_cache_bytes == 3 << 20
    given = EngineConfig.from_kwargs(structured_outputs_cache_bytes=1)
    assert given.structured_outputs.structured_outputs_cache_bytes == 1
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "many")
    with pytest.raises(ValueError, match="VLLM_MAX_N_SEQUENCES is 'many'; it must be a number like 128"):
        server_config(Namespace())


def test_a_default_of_an_option_is_that_of_its_variable() -> None:
    engine = EngineConfig()
    config = {**vars(ServerConfig()), **vars(engine.device), **vars(engine.structured_outputs)}
    config |= vars(engine.observability)
    assert {name: config[name] for name in OPTION_DEFAULTS} == {
        name: variable.default for name, variable in OPTION_DEFAULTS.items()
    }


def test_vllms_variables_without_effect_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_said", set())
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_OF_TOMORROW", "1")
    monkeypatch.setenv("VLLM_API_KEY", "read")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    for _ in range(2):
        EngineConfig.from_kwargs()
    names = "VLLM_OF_TOMORROW, VLLM_USE_V2_MODEL_RUNNER"
    assert [r.getMessage() for r in caplog.records] == [f"environment variables without effect here: {names}"]


def test_the_size_of_the_cache_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    sized = with_platform_defaults(EngineConfig.from_kwargs(device="cpu")).cache
    assert sized.kv_cache_memory_bytes == 2 << 30
    given = with_platform_defaults(EngineConfig.from_kwargs(device="cpu", kv_cache_memory_bytes=5)).cache
    assert given.kv_cache_memory_bytes == 5


def test_the_environment_is_read_in_one_module() -> None:
    package = Path(environment.__file__).parents[1]
    reading = re.compile(r"os\.environ|getenv|import environ\b")
    found = [str(file.relative_to(package)) for file in package.rglob("*.py") if reading.search(file.read_text())]
    assert found == ["config/environment.py"]
