"""The table of vLLM's flags: complete, honest, and the one that its docs show."""

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, logs
from quire.config.engine_args import EngineArgs
from quire.config.environment import TRUE_ALREADY, VARIABLES
from quire.config.fields import flag, options
from quire.config.server import ServerConfig
from quire.config.vllm.accepted import SERVER_ARGUMENTS
from quire.config.vllm.choices import CHOICES
from quire.config.vllm.table import KINDS, OTHER_NAMES, SHORT, TABLE, Row
from quire.entrypoints.cli import serve
from scripts import compatibility_page

TESTS = Path(__file__).parents[1]
NAMES = json.loads((Path(__file__).parent / "vllm_names.json").read_text())
FLAGS = {name[2:].replace("-", "_"): others for name, others in NAMES["flags"].items()}
OPTIONS = {name for config in (ServerConfig, *EngineConfig.parts().values()) for name in options(config)}
NOT_YET = [row for row in TABLE.values() if row.status == "not yet"]
EXAMPLES: dict[str, Any] = {"switch": True, "int": 7, "float": 7.5, "text": "other", "texts": ["other"], "any": "other"}
EXAMPLES["json"] = {"key": "value"}


FOUND_AT_START = {"distributed_executor_backend", "attention_backend"}  # a plugin may bring others


def of(status: str) -> list[Row]:
    return [row for row in TABLE.values() if row.status == status]


def test_every_name_of_vllm_is_in_the_table() -> None:
    names = FLAGS.keys() | set(NAMES["engine_args"]) | set(NAMES["LLM"])
    assert not names - TABLE.keys()


def test_every_spelling_of_vllm_is_known() -> None:
    for name, others in FLAGS.items():
        for other in others:
            if other != "-h":
                assert SHORT.get(other, OTHER_NAMES.get(other[2:].replace("-", "_"))) == name


def test_what_works_names_a_test_that_exists() -> None:
    for file in {row.note.partition("::")[0] for row in of("works")}:
        tree = ast.parse((TESTS / file).read_text("utf-8"))
        found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        named = {row.note.partition("::")[2] for row in of("works") if row.note.startswith(f"{file}::")}
        assert not named - found, file


def test_what_works_is_an_option_and_an_option_works() -> None:
    without_option = {"help", "config", *KINDS}
    assert {row.name for row in of("works")} - OPTIONS == without_option
    assert {row.name for row in TABLE.values() if row.status != "works"} & OPTIONS == {"data_parallel_size"}


def test_what_is_accepted_has_a_reason_and_what_is_not_a_feature() -> None:
    assert all(len(row.note) > 3 and not row.note.endswith(".") for row in TABLE.values())
    assert all(row.kind in EXAMPLES for row in (*of("accepted"), *NOT_YET))


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.name)
def test_what_is_not_available_yet_is_refused_by_name(row: Row) -> None:
    value = False if row.kind == "switch" and True in row.neutral else EXAMPLES[row.kind]
    with pytest.raises(ValueError, match=f"not available yet: .*{row.name}") as error:
        EngineConfig.from_kwargs(**{row.name: value})
    assert row.note in str(error.value) and flag(row.name) in str(error.value)
    for neutral in (*row.neutral, None):
        assert EngineConfig.from_kwargs(**{row.name: neutral}) == EngineConfig()


@pytest.mark.parametrize("name", sorted(CHOICES.keys() - FOUND_AT_START))
def test_choices_of_vllm_that_are_not_available_yet_are_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for feature, choices in CHOICES[name].items():
        for choice in choices.split():
            with pytest.raises(ValueError, match="not available yet") as error:
                EngineConfig.from_kwargs(**{name: choice})
            assert feature in str(error.value) and "allowed: " in str(error.value)
            with pytest.raises(SystemExit):
                serve.parser().parse([flag(name), choice])
            assert f"not available yet: {feature}" in capsys.readouterr().err


def test_objects_and_lists_that_ask_for_nothing() -> None:
    asks_nothing = {"limit_mm_per_prompt": {"image": 0}, "pooler_config": {}, "cpu_offload_params": set()}
    assert EngineConfig.from_kwargs(**asks_nothing) == EngineConfig()
    with pytest.raises(ValueError, match="not available yet: images, audio and video"):
        EngineConfig.from_kwargs(limit_mm_per_prompt={"image": 1})


@pytest.mark.parametrize("row", of("accepted"), ids=lambda row: row.name)
def test_what_is_accepted_changes_nothing_and_is_said_once(
    row: Row, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_said", set())
    with caplog.at_level("INFO", logger="quire"):
        for _ in range(2):
            assert EngineConfig.from_kwargs(**{row.name: EXAMPLES[row.kind]}) == EngineConfig()
    assert [record.getMessage() for record in caplog.records] == [f"{flag(row.name)} is accepted: {row.note}"]


def test_options_of_the_server_have_no_meaning_offline(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_said", set())
    for name in (name for name in SERVER_ARGUMENTS if TABLE[name].status == "works"):
        with caplog.at_level("INFO", logger="quire"):
            assert EngineConfig.from_kwargs(**{name: "x"}) == EngineConfig()
        assert f"{name} has no effect here: it is for the server" in caplog.text


def test_all_arguments_at_their_defaults_ask_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_said", set())
    assert set(NAMES["engine_args"]) <= {field.name for field in dataclasses.fields(EngineArgs)}
    with caplog.at_level("INFO", logger="quire"):
        given = dataclasses.asdict(EngineArgs(model="m"))  # as in LLM(**asdict(engine_args))
        assert EngineConfig.from_kwargs(**given) == EngineConfig.from_kwargs(model="m")
    assert caplog.text == ""


def test_none_of_vllms_defaults_is_refused() -> None:
    given = {"block_size": None, "enable_prefix_caching": None, "async_scheduling": None, "seed": None}
    assert EngineConfig.from_kwargs(enable_chunked_prefill=None, numa_bind=None, **given) == EngineConfig()


@pytest.mark.parametrize("name", FLAGS)
def test_the_command_line_knows_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [flag(name)] if name != "help" else ["--port=x"]
    try:
        serve.parser().parse([*words, "{}"])
    except SystemExit:
        assert "unknown flag" not in capsys.readouterr().err


def test_the_help_does_not_show_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parser().parse(["--help"])
    shown = capsys.readouterr().out
    assert "docs/compatibility.md" in shown and "--block-size" in shown
    assert "--numa-bind" not in shown and "--optimization-level" not in shown


def test_the_docs_show_the_table() -> None:
    current = compatibility_page.PAGE.read_text("utf-8")
    assert compatibility_page.page() == current, "run `python -m scripts.compatibility_page`"


def test_variables_of_the_environment_are_vllms() -> None:
    read = {variable.name for variable in VARIABLES if variable.name.startswith("VLLM_")}
    assert not (read | TRUE_ALREADY) - set(NAMES["env"])
