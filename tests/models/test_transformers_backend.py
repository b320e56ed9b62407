"""Models served with transformers' code and our attention. All that it has: transformers_sweep.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from quire.checkpoint.resolve import resolve_model
from quire.models.loading.loader import load_model
from quire.models.transformers.attention import Unsupported, window_of
from quire.models.transformers.replace_modules import GatedMLP, Linear, RMSNorm
from tests.models.transformers_sweep import is_greedy, prompts, save

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Partly rotated; sinks and windows; soft-caps and windows; experts; fused and normed heads; latent heads of two sizes;
# positions that begin behind the padding.
MODELS = ("stablelm", "gpt_oss", "gemma2", "qwen2_moe", "persimmon", "deepseek_v3", "roberta")
SETTINGS = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "preempted": {"num_gpu_blocks_override": 11},
}


def engine(folder: Path, **options) -> LLM:
    fixed = {"model_impl": "transformers", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 80}
    return LLM(str(folder), **{"block_size": 8, "kv_cache_memory_bytes": 8 << 20} | fixed | options)


@pytest.mark.parametrize("model_type", MODELS)
def test_equal_to_transformers(tmp_path, model_type):
    reference = save(model_type, tmp_path)
    given = [{"prompt_token_ids": ids} for ids in prompts()]
    groups = 1
    for setting, options in SETTINGS.items():
        if "num_gpu_blocks_override" in options:
            options = {"num_gpu_blocks_override": groups * options["num_gpu_blocks_override"]}
        with engine(tmp_path, **options) as llm:
            groups = len(worker_of(llm).runner.rows.block_tables)
            for time in ("first", "again, from the prefix cache"):
                outputs = llm.generate(given, GREEDY, use_tqdm=False)
                tokens = [list(each.outputs[0].token_ids) for each in outputs]
                right = [is_greedy(reference, *pair) for pair in zip(prompts(), tokens, strict=True)]
                assert all(right), f"{setting}, {time}: {right}"
            if setting == "preempted":
                assert llm.llm_engine.stats.num_preemptions > 0


def worker_of(llm: LLM):
    return llm.llm_engine.client.core.executor.worker


def loaded(model_type: str, folder: Path, dtype=torch.float32, load_format="auto", **options):
    save(model_type, folder)
    return load(folder, dtype, load_format, **options)


def load(folder: Path, dtype=torch.float32, load_format="auto", **options):
    checkpoint = resolve_model(str(folder), load_format=load_format)
    hf_config = json.loads((folder / "config.json").read_text())
    return load_model(
        checkpoint, hf_config, dtype, "cpu", model_impl=options.pop("model_impl", "transformers"), **options
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_replaced_by_our_kernels(tmp_path, dtype):
    model = loaded("qwen3", tmp_path, dtype)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(GatedMLP) == 3
    assert kinds.count(RMSNorm) == 3 * 4 + 1
    assert torch.nn.Linear not in kinds and kinds.count(Linear) == 3 * (4 + 2) + 1


def test_attention_parameters_are_probed(tmp_path):
    full, windowed = loaded("gemma2", tmp_path).cache_layers()[1::-1]
    assert (windowed.sliding_window, full.sliding_window) == (24, None)
    assert (full.num_heads, full.num_kv_heads, full.head_size, full.softcap) == (4, 2, 16, 50.0)
    assert full.scale == pytest.approx(256**-0.5)


def test_one_layer_of_each_kind(tmp_path):
    model = loaded("gemma2", tmp_path)
    layers = model.get_submodule("model.model").layers
    with model.one_layer_of_each_kind():
        assert list(model.get_submodule("model.model").layers) == [layers[0], layers[1]]
    assert model.get_submodule("model.model").layers is layers


def test_random_weights_need_no_checkpoint(tmp_path):
    save("stablelm", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    assert first.num_parameters > 10_000
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)) and parameter.isfinite().all()


def test_values_of_the_config_given_win(tmp_path):
    save("stablelm", tmp_path)
    with engine(tmp_path, load_format="dummy", hf_overrides={"num_hidden_layers": 2}) as llm:
        assert len(worker_of(llm).model.cache_layers()) == 2


def test_auto_prefers_our_own(tmp_path):
    assert type(loaded("llama", tmp_path, model_impl="auto")).__name__ == "LlamaForCausalLM"
    save("stablelm", other := tmp_path / "other")
    assert type(load(other, model_impl="auto")).__name__ == "TransformersModel"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "has a recurrent state besides the KV cache"),
        ("bloom", "does not go through transformers' attention interface"),
        ("llama4_text", "chunk"),
        ("doge", "bias of its own"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(tmp_path, model_type, reason):
    with pytest.raises(ValueError, match=reason):
        loaded(model_type, tmp_path)


def test_quantized_weights_are_refused(tmp_path):
    save("stablelm", tmp_path)
    with pytest.raises(ValueError, match=r"quantization here \(int8\); only built-in families"):
        load(tmp_path, quantization="int8")


def test_gguf_is_refused():
    with pytest.raises(ValueError, match="GGUF"):
        LLM(model_impl="transformers")


def test_a_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save("stablelm", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        load(tmp_path)


REMOTE_CODE = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from transformers import StableLmConfig, StableLmForCausalLM
class OwnConfig(StableLmConfig):
    model_type = "own"
class OwnModel(StableLmForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_checkpoint_runs_only_if_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    save("stablelm", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(REMOTE_CODE)
    with pytest.raises(ValueError, match="--trust-remote-code"):
        load(folder, model_impl="auto")
    assert not list(tmp_path.rglob("imported"))
    assert type(load(folder, trust_remote_code=True).model).__name__ == "OwnModel"


def test_the_revision_of_code_in_another_repository(tmp_path):
    folder = tmp_path / "model"
    save("stablelm", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "me/code--own.OwnConfig", "AutoModelForCausalLM": "me/code--own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    repository = tmp_path / "hub" / "models--me--code"
    for name, commit in (("main", "1" * 40), ("next", "2" * 40)):
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "own.py").write_text(f"{REMOTE_CODE}    revision = {name!r}\n")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / name).write_text(commit)
    code = (
        "import sys; from pathlib import Path; from tests.models.test_transformers_backend import load\n"
        "options = {'trust_remote_code': True, 'code_revision': sys.argv[2]}\n"
        "print(type(load(Path(sys.argv[1]), **options).model).revision)"
    )
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    for name in ("next", "main"):
        command = [sys.executable, "-c", code, str(folder), name]
        environment = os.environ | cache | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.stdout.split()[-1:] == [name], done.stderr


def test_without_transformers_the_error_names_the_remedy():
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from quire.models.implementation import choose_implementation\n"
        "print(choose_implementation({'architectures': ['X'], 'model_type': 'x'}).reason)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout and "transformers" in done.stdout


def test_a_window_is_read_off_a_mask():
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert window_of(causal_mask_function) is None
    assert [window_of(sliding_window_causal_mask_function(n)) for n in (1, 24, 4096)] == [1, 24, 4096]
    with pytest.raises(Unsupported, match="chunks"):
        window_of(chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.int)))
    with pytest.raises(Unsupported, match="not causal"):
        window_of(bidirectional_mask_function)
