"""The planner reads every family's config as the model's own code does, on one rank and on two."""

from typing import Any

import pytest
import torch

from quire.layers.parallel import TensorParallel
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.planning.memory import Limits, cache_specs, weight_bytes
from quire.planning.shape import read_shape
from quire.planning.sizes import Layout
from quire.planning.weight_format import dense_format
from tests.models.published import load_published
from tests.tiny_models import COMMON, FAMILIES

CPU = torch.device("cpu")
NO_TENSOR_PARALLEL = ("olmo2", "olmo3", "olmoe")  # a norm over all heads' queries


def tiny_config(family: str) -> dict[str, Any]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name, differences = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **differences})
    hf: dict[str, Any] = config.to_dict()
    return hf | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def matrix_values(hf: dict[str, Any], tp: TensorParallel) -> int:
    """Of the model as it is built; the planner leaves out norms and biases."""
    model = model_class(hf)(hf, ModelOptions(torch.bfloat16, CPU, tp))
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() > 1 and not {"bias", "norm"} & words(name))


def words(name: str) -> set[str]:
    return {word for part in name.split(".") for word in part.split("_")}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_windows_are_those_of_the_model(family: str) -> None:
    hf = tiny_config(family)
    shape = read_shape(hf)
    assert shape.parameters == pytest.approx(matrix_values(hf, TensorParallel()), abs=200)
    assert shape.windows == model_class(hf).configure(hf).windows


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_TENSOR_PARALLEL])
def test_weights_of_a_rank(family: str) -> None:
    hf = tiny_config(family)
    shape = read_shape(hf)
    expected = 2 * matrix_values(hf, TensorParallel(0, 2))
    assert weight_bytes(shape, dense_format(2), Layout(2)) == [pytest.approx(expected, abs=400)]


def test_bytes_of_a_latent_cache() -> None:
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 numbers in bf16, on every rank."""
    config, _ = load_published("latent/DeepSeek-V2-Lite")
    for tensor in (1, 4):
        specs = cache_specs(read_shape(config), Limits(4096), tensor, range(27))
        assert sum(spec.page_bytes for spec in specs.values()) == 16 * 27 * 576 * 2


def test_a_config_without_sizes() -> None:
    with pytest.raises(ValueError, match="hidden_size or n_embd"):
        read_shape({"model_type": "llama"})
