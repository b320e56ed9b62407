import pytest

from quire.layers.rope_scaling import Linear
from quire.layers.rotary import RopeParameters
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.qwen2 import Qwen2ForCausalLM
from quire.models.registry import model_class
from tests.models.references import SMALL


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ValueError, match=r"BloomForCausalLM; supported: LlamaForCausalLM, "):
        model_class({"architectures": ["BloomForCausalLM"]})


def test_other_activation_is_refused():
    with pytest.raises(ValueError, match=r"'mish'.*supported: silu"):
        Qwen2ForCausalLM.configure(SMALL | {"hidden_act": "mish"})


def test_unknown_rope_is_refused():
    with pytest.raises(ValueError, match=r"'spiral'.*default, linear, dynamic, yarn, llama3, longrope"):
        RopeParameters.from_hf({"rope_scaling": {"type": "spiral", "factor": 2.0}}, 64)


def test_missing_keys_are_named():
    with pytest.raises(ValueError, match="lacks vocab_size"):
        Qwen2ForCausalLM.configure({k: v for k, v in SMALL.items() if k != "vocab_size"})


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}},
    ],
)
def test_old_and_new_rope_keys_agree(hf):
    hf = {"max_position_embeddings": 32} | hf
    assert RopeParameters.from_hf(hf, 64) == RopeParameters(500.0, 64, 64, Linear(2.0))


def test_windows_follow_max_window_layers():
    hf = SMALL | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    assert Qwen2ForCausalLM.configure(hf).windows == (None, None, 8)
    assert Qwen2ForCausalLM.configure(hf | {"use_sliding_window": False}).windows == (None, None, None)


def test_weight_map_goes_both_ways():
    weights = WeightMap((Rule("a.{i}.q.{p}", "b.{i}.qkv.{p}", "q"),), ignored=("a.{i}.junk",))
    target = weights.target("a.12.q.bias")
    assert target is not None and (target.parameter, target.shards) == ("b.12.qkv.bias", ("q",))
    assert weights.checkpoint_name("b.12.qkv.bias", "q") == "a.12.q.bias"
    assert weights.target("a.x.q.bias") is None
    assert weights.is_ignored("a.3.junk")
