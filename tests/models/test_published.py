"""Published checkpoints resolve to parameters without a miss."""

import pytest

from tests.models.published import DATA, build_empty, expanded, load_published, misses


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.json")))
def test_every_tensor_has_a_place(name):
    config, tensors = load_published(name)
    assert misses(build_empty(config), tensors) == []


def test_misses_are_found():
    config, tensors = load_published("ERNIE-4.5-21B-A3B")
    config |= {"num_hidden_layers": 2}
    tensors = {name: shape for name, shape in tensors.items() if not name.startswith("model.layers.")}
    assert "model.layers.1.mlp.gate.weight is missing" in misses(build_empty(config), tensors)
    assert "model.layers.7.mlp.gate.weight has no place" in misses(
        build_empty(config), {"model.layers.7.mlp.gate.weight": [64, 2560]}
    )
    assert "model.norm.weight is [8], not [2560]" in misses(build_empty(config), {"model.norm.weight": [8]})


def test_patterns():
    assert list(expanded("a.{0-1}.b.{3-4}.c")) == ["a.0.b.3.c", "a.0.b.4.c", "a.1.b.3.c", "a.1.b.4.c"]
