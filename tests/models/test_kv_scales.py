"""Scales of a KV cache in fp8 that a checkpoint has, under the names of each format."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.attention.cache_format import FP8
from quire.kernels.kv_scales import KVScales, dequantized
from quire.kernels.kv_write import kv_write_scaled
from quire.models.loading.kv_scales import use_checkpoint_scales
from tests.tiny_models import save_tiny

NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "fp8": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "one for both": ("kv_scale",),
}


def with_scales(model, folder, scale, names=NAMES["compressed-tensors"], shape=(1,)):
    """A copy of a checkpoint whose layer i has the scale times 2^i for keys, half of it for values."""
    shutil.copytree(model, folder)
    (file,) = Path(folder).glob("*.safetensors")
    tensors = load_file(file)
    layers = {int(name.split(".")[2]) for name in tensors if name.startswith("model.layers.")}
    for layer in layers:
        for i, name in enumerate(names):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full(shape, scale * 2**layer / 2**i)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def loaded_layers(path):
    with LLM(str(path), skip_tokenizer_init=True, dtype="float32", max_model_len=64) as llm:
        return llm.llm_engine.client.core.executor.worker.model.cache_layers()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    save_tiny("llama", folder)
    return folder


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_each_formats_names_are_found(model, tmp_path, names):
    layers = loaded_layers(with_scales(model, tmp_path / "scaled", 0.375, names, shape=()))
    assert all(layer.kv_scales is None for layer in layers), "the cache is not in fp8"
    use_checkpoint_scales(layers)
    for i, layer in enumerate(layers):
        assert (layer.kv_scales.k, layer.kv_scales.v) == (0.375 * 2**i, 0.375 * 2**i / (2 if len(names) == 2 else 1))
        assert layer.features.kv_scales is layer.kv_scales


def test_without_scales_they_are_one_and_said_once(model, caplog):
    layers = loaded_layers(model)
    with caplog.at_level("INFO", logger="quire"):
        use_checkpoint_scales(layers)
    assert all(layer.kv_scales is None for layer in layers)
    assert caplog.text.count("scale 1 in") == 1


@pytest.mark.parametrize(("scale", "shape"), [(0.0, (1,)), (-1.0, ()), (float("nan"), (1,)), (0.5, (2,))])
def test_scales_that_cannot_be_used_are_an_error_only_where_they_are(model, tmp_path, scale, shape):
    layers = loaded_layers(with_scales(model, tmp_path / "bad", scale, shape=shape))
    with pytest.raises(ValueError, match=r"in layer 0 are not two positive numbers.*--kv-cache-dtype bfloat16"):
        use_checkpoint_scales(layers)


def test_vectors_divided_by_their_scale_fit_and_return():
    k, v = 3000 * torch.randn(20, 2, 16), 0.01 * torch.randn(20, 2, 16)
    cache, scales = torch.zeros(2, 2, 2, 16, 16, dtype=FP8), KVScales(k=float(k.abs().max()) / 448, v=0.01 / 448)
    kv_write_scaled(k, v.clamp(-0.01, 0.01), cache, torch.arange(20), scales)
    found = dequantized(cache, torch.arange(2), scales, torch.float32)
    for part, given in enumerate((k, v.clamp(-0.01, 0.01))):
        ours = found[:, part].transpose(1, 2).reshape(32, 2, 16)[:20]
        torch.testing.assert_close(ours, given, rtol=1 / 15, atol=float(given.abs().max()) / 400)
