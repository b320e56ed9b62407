"""Models of a range of layers: what a stage has, what it reads, and what cannot be split."""

import pytest
import torch

from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.models.loading.loader import load_model
from quire.models.loading.weight_loader import load_weights
from quire.models.options import ModelOptions
from quire.models.registry import ModelRegistry, model_class
from quire.models.stage import Stage, split_layers
from tests.features.encoder_model import LlamaWithEncoder
from tests.tiny_models import FAMILIES, save_tiny

CPU = torch.device("cpu")


def parts(stage, hf, tensors):
    model = model_class(hf)(hf, ModelOptions(torch.float32, CPU, stage=stage))
    load_weights(model, tensors)
    return dict(model.named_parameters())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_have_the_parameters_of_the_whole_model_under_the_same_names(tmp_path, family):
    hf = save_tiny(family, tmp_path).config.to_dict()
    hf["architectures"] = hf.get("architectures") or [model_class(hf).__name__]
    checkpoint = resolve_model(str(tmp_path))
    whole = parts(Stage(), hf, open_tensors(checkpoint))
    stages = [parts(Stage(i, 3), hf, open_tensors(checkpoint)) for i in range(3)]
    assert set().union(*stages) == set(whole)
    for stage in stages:
        for name, parameter in stage.items():
            torch.testing.assert_close(parameter, whole[name], equal_nan=True)
    shared = [name for name in whole if sum(name in stage for stage in stages) > 1]
    assert all(name.startswith("embed_tokens.") for name in shared)  # of a tied head, whose place is the last stage


def test_a_stage_misses_only_its_own_tensors(tmp_path):
    hf = save_tiny("llama", tmp_path, tie_word_embeddings=False).config.to_dict()
    checkpoint = resolve_model(str(tmp_path))

    def without(text):
        return (tensor for tensor in open_tensors(checkpoint) if text not in tensor.name)

    read = parts(Stage(1, 2), hf, without("layers.1."))
    assert {name.split(".")[1] for name in read if name.startswith("layers.")} == {"2", "3"}
    with pytest.raises(ValueError, match=r"lacks model\.layers\.3\."):
        parts(Stage(1, 2), hf, without("layers.3."))
    with pytest.raises(ValueError, match=r"lacks model\.embed_tokens\.weight"):
        parts(Stage(0, 2), hf, without("embed_tokens"))
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        parts(Stage(1, 2), hf, without("lm_head"))


def test_layers_are_split_evenly_and_the_ends_get_fewer():
    assert [list(split_layers(total, 4)) for total in (8, 9, 10, 11)] == [
        [2, 2, 2, 2],
        [2, 3, 2, 2],
        [2, 3, 3, 2],
        [3, 3, 3, 2],
    ]
    assert list(Stage(1, 2, (3, 5)).layers(8)) == [3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 stages; use at most 3"):
        Stage(0, 4).layers(3)
    with pytest.raises(ValueError, match=r"split as 3,4; needed are 2 positive numbers.*layers, 8"):
        Stage(0, 2, (3, 4)).layers(8)


def test_models_that_cannot_be_split_say_so(tmp_path, monkeypatch):
    hf = save_tiny("llama", tmp_path).config.to_dict()
    checkpoint = resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="transformers runs cannot be split into stages"):
        load_model(checkpoint, hf, torch.float32, CPU, model_impl="transformers", stage=Stage(0, 2))
    monkeypatch.setattr(ModelRegistry, "resolve", lambda hf: LlamaWithEncoder)
    with pytest.raises(ValueError, match="LlamaWithEncoder has encoders and cannot be split into stages yet"):
        load_model(checkpoint, hf, torch.float32, CPU, stage=Stage(0, 2))
