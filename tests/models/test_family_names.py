"""Configs that families do not support are named, and names that older checkpoints have are understood."""

import pytest
import torch

from quire.models.loading.weight_loader import load_weights
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from tests.models.helpers import CPU, MemoryTensor, tensors_of
from tests.tiny_models import save_tiny

REFUSED = {
    "gpt2": ({"scale_attn_by_inverse_layer_idx": True}, {"add_cross_attention": True}),
    "opt": ({"do_layer_norm_before": False}, {"word_embed_proj_dim": 32}, {"_remove_final_layer_norm": True}),
}
# (family, in names of today, in older ones)
RENAMED = [
    ("gpt2", "transformer.", ""),
    ("opt", "model.decoder.", "decoder."),
    ("gpt-neox", "lm_head.", "embed_out."),
]


def config_of(reference):
    return reference.config.to_dict() | {"architectures": [type(reference).__name__]}


@pytest.mark.parametrize("family", REFUSED)
def test_unsupported_configs_are_named(family, tmp_path):
    hf = config_of(save_tiny(family, tmp_path))
    for keys in REFUSED[family]:
        with pytest.raises(ValueError, match=next(iter(keys))):
            model_class(hf).configure(hf | keys)
    with pytest.raises(ValueError, match="tanhshrink"):
        model_class(hf).configure(hf | {"activation_function": "tanhshrink"})


@pytest.mark.parametrize(("family", "today", "older"), RENAMED)
def test_older_names(family, today, older, tmp_path):
    reference = save_tiny(family, tmp_path)
    hf = config_of(reference)
    models = []
    for name in (today, older):
        model = model_class(hf)(hf, ModelOptions(torch.float32, CPU))
        load_weights(model, [MemoryTensor(t.name.replace(today, name, 1), t.data) for t in tensors_of(reference)])
        models.append(model)
    for (key, wanted), (_, found) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.equal(wanted, found), key


def test_keys_of_older_configs(tmp_path):
    neox = config_of(save_tiny("gpt-neox-sequential", tmp_path))
    older = neox | {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 10000}
    assert model_class(neox).configure(older) == model_class(neox).configure(neox)
    assert model_class(neox).configure(neox).ropes[0].rotary_dim == 8
