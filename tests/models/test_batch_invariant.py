"""`--batch-invariant`: the option, what a loaded model gets, and what is refused by name."""

import json

import pytest
import torch

from quire.config import EngineConfig
from quire.models.batch_invariant import check_invariant, invariant_backend, make_invariant
from quire.quantization.unquantized import InvariantLinearMethod
from tests.tiny_models import save_tiny


def test_the_option_and_the_variable(monkeypatch):
    assert not EngineConfig.from_kwargs().device.batch_invariant
    assert EngineConfig.from_kwargs(batch_invariant=True).device.batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert EngineConfig.from_kwargs().device.batch_invariant
    assert not EngineConfig.from_kwargs(batch_invariant=False).device.batch_invariant


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_config": {"method": "eagle", "model": "m", "num_speculative_tokens": 2}}, "'eagle'"),
    ],
)
def test_options_that_are_refused(options, named):
    with pytest.raises(ValueError, match=rf"batch_invariant is not possible.*{named}"):
        check_invariant(EngineConfig.from_kwargs(**options))
    check_invariant(EngineConfig.from_kwargs())
    with pytest.raises(ValueError, match=r"'torch'"):
        invariant_backend("torch")


def load(folder):
    from quire.checkpoint.resolve import resolve_model
    from quire.models.loading.loader import load_model

    config = json.loads((folder / "config.json").read_text())
    return load_model(resolve_model(str(folder)), hf_config=config, dtype=torch.float32, device=torch.device("cpu"))


def test_a_model_gets_the_kernels(tmp_path):
    save_tiny("llama", tmp_path)
    model = load(tmp_path)
    make_invariant(model)
    methods = [module.method for module in model.modules() if hasattr(module, "in_features")]
    assert methods and all(isinstance(method, InvariantLinearMethod) for method in methods)
    assert model.max_fused_rows == 0


def test_experts_need_the_kernels_of_a_gpu(tmp_path):
    save_tiny("mixtral", tmp_path)
    with pytest.raises(ValueError, match=r"experts are multiplied by torch"):
        make_invariant(load(tmp_path))


def test_quantized_weights_are_refused_by_name(tmp_path):
    save_tiny("llama", tmp_path)
    model = load(tmp_path)

    class OtherMethod:
        pass

    model.layers[0].mlp.up_proj.method = OtherMethod()
    with pytest.raises(ValueError, match=r"OtherMethod, of quantized weights.*dequantized"):
        make_invariant(model)


def test_a_cpu_accepts_it(tmp_path):
    from quire import LLM, SamplingParams

    save_tiny("llama", tmp_path)
    with LLM(str(tmp_path), batch_invariant=True, skip_tokenizer_init=True, use_tqdm_on_load=False) as llm:
        made = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(made[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_fused_for_any_number_of_tokens_compute_the_same(family, tmp_path, monkeypatch):
    """As on a GPU, where each product takes norm, activation and residual; here by the torch references."""
    from quire import LLM, SamplingParams
    from quire.models.loading import loader
    from quire.worker import worker

    save_tiny(family, tmp_path)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (2, 9, 150)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    models = []

    def load(*args, **kwargs):
        models.append(loader.load_model(*args, **kwargs))
        make_invariant(models[-1])
        return models[-1]

    def generated():
        with LLM(str(tmp_path), **options) as llm:
            return [list(made.outputs[0].token_ids) for made in llm.generate(prompts, params, use_tqdm=False)]

    wanted = generated()
    monkeypatch.setattr(worker, "load_model", load)
    monkeypatch.setattr("quire.quantization.unquantized.can_fuse", lambda weight: True)
    assert generated() == wanted
    assert models[0].max_fused_rows > 150
