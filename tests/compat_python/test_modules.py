"""vLLM's import paths under `quire`."""

import importlib
import importlib.util
import re
import runpy
import subprocess
import sys

import pytest

from quire import vllm_paths
from quire.config import EngineConfig

LISTED = [
    (path, text.partition("=")[0])
    for path, homes in vllm_paths.MODULES.items()
    for names in homes.values()
    for text in names.split()
    if not text.startswith("*")
]


@pytest.mark.parametrize(("path", "name"), LISTED)
def test_every_listed_name_can_be_imported(path, name):
    assert getattr(importlib.import_module(f"quire.{path}"), name) is not None


@pytest.mark.parametrize("path", sorted(vllm_paths.UNAVAILABLE))
def test_names_of_features_to_come_say_so(path):
    module = f"quire.{path}".rstrip(".")
    for name, feature in vllm_paths.UNAVAILABLE[path].items():
        with pytest.raises(ImportError, match=re.escape(f"{name} is not available yet: {feature}")):
            exec(f"from {module} import {name}")
        assert not hasattr(importlib.import_module(module), name)


def test_imports_as_scripts_write_them():
    from quire.engine.arg_utils import EngineArgs as SameArgs
    from quire.engine.async_llm_engine import AsyncLLMEngine as SameEngine
    from quire.inputs import EmbedsPrompt
    from quire.inputs import TokensPrompt as SamePrompt
    from quire.utils import FlexibleArgumentParser, random_uuid
    from quire.v1.engine.async_llm import AsyncLLM

    from quire import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, TextPrompt, TokensPrompt
    from quire.config import VllmConfig
    from quire.sampling_params import SamplingParams, SamplingType

    assert (SameArgs, SameEngine, SamePrompt) == (EngineArgs, AsyncLLMEngine, TokensPrompt)
    assert AsyncLLM is AsyncLLMEngine and issubclass(AsyncEngineArgs, EngineArgs) and LLMEngine is not None
    assert EmbedsPrompt(prompt_embeds=[[1.0]]) == {"prompt_embeds": [[1.0]]}
    assert TextPrompt(prompt="x") == {"prompt": "x"} and random_uuid() != random_uuid()
    assert VllmConfig.from_kwargs(seed=3).model_config.seed == 3
    assert SamplingParams(seed=3).sampling_type == SamplingType.RANDOM_SEED and FlexibleArgumentParser is not None


def test_classes_for_mappings_make_them():
    from quire.distributed.weight_transfer.base import WeightTransferUpdateRequest

    from quire.config import KVEventsConfig, KVTransferConfig, WeightTransferConfig
    from quire.weights.engine_methods import info_of, is_part

    request = WeightTransferUpdateRequest(update_info={"path": "model"})
    assert is_part(request) and info_of(request, "update_info") == {"path": "model"}
    config = EngineConfig.from_kwargs(
        kv_transfer_config=KVTransferConfig(kv_connector="noop", kv_role="kv_both"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
        weight_transfer_config=WeightTransferConfig(backend="gloo"),
    )
    assert [one.name for one in config.transfer.connectors] == ["noop"]
    assert config.kv_events.events.published and config.weight_transfer.backend == "gloo"


def test_chat_templates(tmp_path):
    from quire.entrypoints.chat_utils import load_chat_template

    file = tmp_path / "template.jinja"
    file.write_text("{{ messages }}")
    assert load_chat_template(file) == load_chat_template("{{ messages }}", is_literal=True) == "{{ messages }}"
    assert load_chat_template(None) is None


def test_variables_of_the_environment(monkeypatch):
    import quire.envs as envs

    monkeypatch.setenv("VLLM_SOMETHING", "3")
    assert envs.VLLM_SOMETHING == "3" and envs.VLLM_NOTHING is None
    with pytest.raises(AttributeError, match="HOME"):
        assert envs.HOME


def test_what_is_in_neither_place_is_missing():
    with pytest.raises(ModuleNotFoundError, match=r"quire\.nowhere"):
        importlib.import_module("quire.nowhere")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from quire.outputs import Nothing")
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        assert importlib.import_module("quire").Nothing


def test_the_server_as_a_module(monkeypatch):
    command = [sys.executable, "-m", "quire.entrypoints.openai.api_server", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "--served-model-name" in shown
    assert importlib.util.find_spec("quire.entrypoints.openai.api_server").origin  # libraries read sys.argv[0]
    monkeypatch.delitem(sys.modules, "quire.entrypoints.openai.api_server", raising=False)
    runpy.run_module("quire.entrypoints.openai.api_server", run_name="__mp_main__")  # as the engine's process does
    wrong = subprocess.run([sys.executable, "-m", "quire.outputs"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode != 0 and "no command" in wrong.stderr


def test_importing_quire_loads_nothing_else():
    code = "import sys, quire; print(sorted(name for name in sys.modules if name.startswith('quire')))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert shown.strip() == "['quire']"
