import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.checkpoint import gguf_config
from quire.models.implementation import choose_implementation
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ARCHITECTURES, BUILT_IN, ModelRegistry, Registry, model_class
from quire.models.transformers import library
from tests.entrypoints.server_process import server_process
from tests.models import out_of_tree
from tests.tiny_models import greedy, prompts, save_tiny

MINE = {"architectures": ["MyForCausalLM"]}
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


class Mine(LlamaForCausalLM):
    pass


def test_every_entry_can_be_imported_and_says_what_it_is() -> None:
    assert len(ARCHITECTURES) == len(BUILT_IN)
    for built_in in BUILT_IN:
        assert isinstance(model_class({"architectures": [built_in.architecture]}), type)
        assert (
            built_in.family
            and built_in.kind in ("dense", "MoE", "encoder")
            and "|" not in built_in.family + built_in.note
        )


def test_gguf_names_are_those_that_load() -> None:
    assert {built_in.gguf for built_in in BUILT_IN} - {""} == set(gguf_config.ARCHITECTURES)
    assert {architecture for architecture, _ in gguf_config.ARCHITECTURES.values()} <= set(ARCHITECTURES)


def test_a_class_or_its_name_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    registry.register_model("MyForCausalLM", Mine)
    assert registry.resolve(MINE) is Mine
    registry.register_model("OtherForCausalLM", f"{__name__}_made_up:Mine")
    assert registry.get_supported_archs() == [*ARCHITECTURES, "MyForCausalLM", "OtherForCausalLM"]
    monkeypatch.setitem(sys.modules, f"{__name__}_made_up", sys.modules[__name__])  # only now can it be imported
    assert registry.resolve({"architectures": ["Unknown", "OtherForCausalLM"]}) is Mine
    # A registry keeps its registrations to itself.
    assert not {"MyForCausalLM", "OtherForCausalLM"} & set(ModelRegistry.get_supported_archs())


def test_registering_again_replaces_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    with caplog.at_level(logging.WARNING, "quire"):
        registry.register_model("MyForCausalLM", "nowhere:Model")
        assert not caplog.records
        registry.register_model("MyForCausalLM", Mine)
        registry.register_model("LlamaForCausalLM", Mine)
    assert [record.args[0] for record in caplog.records] == ["MyForCausalLM", "LlamaForCausalLM"]
    assert registry.resolve(MINE) is registry.resolve({"architectures": ["LlamaForCausalLM"]}) is Mine


def test_mistakes_are_explained() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match=r"as a class or as 'module:Class', not as 'my.module.Class'"):
        registry.register_model("MyForCausalLM", "my.module.Class")
    with pytest.raises(TypeError, match="not as a int"):
        registry.register_model("MyForCausalLM", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"not supported: MyForCausalLM; supported: LlamaForCausalLM, "):
        registry.resolve(MINE)
    with pytest.raises(ValueError, match="none is named in the model's config"):
        registry.resolve({})
    registry.register_model("MyForCausalLM", "nowhere_at_all:Model")
    with pytest.raises(
        ValueError, match="MyForCausalLM is registered as nowhere_at_all:Model, which cannot be imported"
    ):
        registry.resolve(MINE)


@pytest.mark.parametrize(
    ("hf_config", "options", "impl", "why"),
    [
        (QWEN3, {}, "quire", "Qwen3ForCausalLM is Qwen3, a built-in family"),
        (QWEN3, {"model_impl": "transformers"}, "transformers", "as requested"),
        (BLOOM, {}, "transformers", "it is none of ours"),
        (BLOOM, {"model_impl": "quire"}, None, "not supported: BloomForCausalLM"),
        (BLOOM, {"is_gguf": True}, None, "GGUF files are read by built-in"),
        (MINE, {}, None, "transformers has no causal language model"),
        (MINE | {"auto_map": {"AutoModelForCausalLM": "m.C"}}, {}, None, "--trust-remote-code"),
        (MINE | {"auto_map": {"AutoModelForCausalLM": "m.C"}}, {"trust_remote_code": True}, "transformers", ""),
        ({}, {"model_impl": "quire"}, None, "none is named"),
    ],
)
def test_choice_of_implementation(hf_config: dict, options: dict, impl: str | None, why: str) -> None:
    choice = choose_implementation(hf_config, **options)
    assert choice.impl == impl and why in choice.reason


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    choice = choose_implementation(BLOOM)
    assert choice.impl is None and "pip install" in choice.reason


def test_the_public_name() -> None:
    assert quire.ModelRegistry is ModelRegistry


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """A Llama under a name that only the plugin knows, a prompt, and its greedy continuation."""
    folder = tmp_path_factory.mktemp("tiny")
    prompt = prompts((9,))[0]
    expected, _ = greedy(save_tiny("llama", folder), prompt, 7)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [out_of_tree.ARCHITECTURE], "model_type": "out-of-tree"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 7}))
    return folder, prompt, expected


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin is installed for the processes that a test starts; what it notes."""
    monkeypatch.setenv("PYTHONPATH", str(out_of_tree.install(tmp_path / "site")))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


SCRIPT = """
import json, sys
from quire import LLM

with LLM(sys.argv[1], dtype="float32", device="cpu", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 24) as llm:
    [output] = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, use_tqdm=False)
print(json.dumps(list(output.outputs[0].token_ids)))
"""


def offline(model: Path, prompt: list[int]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(prompt)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_plugins_model_offline(tiny: tuple[Path, list[int], list[int]], calls: Path) -> None:
    folder, prompt, expected = tiny
    done = offline(folder, prompt)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
    assert calls.read_text().split() == ["register", "load"]
    assert "plugins: out-of-tree (out_of_tree_model:register)" in done.stderr
    message = "the plugin broken (out_of_tree_model:fail) failed and is skipped: RuntimeError: the moon is"
    assert message in done.stderr


def test_plugins_can_be_chosen(
    tiny: tuple[Path, list[int], list[int]], calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PLUGINS", "broken, missing")
    done = offline(*tiny[:2])
    assert done.returncode != 0 and not calls.exists()
    assert (
        "QUIRE_PLUGINS names 'missing', which no installed package provides; installed: broken, out-of-tree"
        in done.stderr
    )
    assert "architecture not supported: OutOfTreeForCausalLM" in done.stderr.splitlines()[-1]


def test_a_plugins_model_in_the_servers_engine_process(
    tiny: tuple[Path, list[int], list[int]], calls: Path, tmp_path: Path
) -> None:
    folder, prompt, expected = tiny
    flags = ("--dtype", "float32", "--device", "cpu", "--skip-tokenizer-init", "--kv-cache-memory-bytes", "16M")
    (tmp_path / "run").mkdir()
    with server_process(tmp_path / "run", str(folder), *flags) as server:
        asked = {"prompt": prompt, "return_token_ids": True}
        [choice] = server.post("/v1/completions", asked).json()["choices"]
        assert choice["token_ids"] == expected  # greedy and seven tokens, as the model's generation_config.json says
        [choice] = server.post("/v1/completions", asked | {"max_tokens": 3}).json()["choices"]
        assert choice["token_ids"] == expected[:3]
        log = server.log.read_text()
    # The API process loads plugins for their dialects, the engine's for their models.
    assert sorted(calls.read_text().split()) == ["load", "register", "register"]
    assert log.count("plugins: out-of-tree (out_of_tree_model:register)") == 2
    assert log.count("sampling defaults: temperature 0, max_tokens 7") == 1
