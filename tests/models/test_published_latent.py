"""Published checkpoints with latent attention: every tensor is loaded or declared ignored, every parameter filled."""

import os
import re

import pytest
import torch

from quire.layers.load_slot import all_load_slots
from quire.layers.parallel import TensorParallel
from quire.messages.kv_cache import KVCacheConfig, make_groups
from quire.models.mtp import SupportsMTP
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.quantization.select import choose_quantization
from tests.models.published import load_published

META = torch.device("meta")
NAMES = (
    "DeepSeek-V2-Lite",
    "DeepSeek-V2",
    "DeepSeek-V3",
    "DeepSeek-V3.1",
    "DeepSeek-V3.2",
    "Kimi-K2",
    "Moonlight-16B-A3B",
    "MiniCPM3-4B",
    "GLM-4.7-Flash",
)
WHOLE = bool(os.environ.get("QUIRE_ALL_MODELS"))


def cut_to(config, tensors, layers, experts=16):
    """The first layers, and the prediction layer behind the last, with fewer experts."""
    last = config["num_hidden_layers"]
    kept = {}
    for name, shape in tensors.items():
        number = re.match(r"model\.layers\.(\d+)\.", name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if (number and layers <= int(number[1]) < last) or (expert and int(expert[1]) >= experts):
            continue
        if number and int(number[1]) == last:
            name = name.replace(f"layers.{last}.", f"layers.{layers}.", 1)
        kept[name] = [experts, *shape[1:]] if ".mlp.gate." in name else shape
    changed = {"num_hidden_layers": layers} | ({"n_routed_experts": experts} if "n_routed_experts" in config else {})
    return config | changed, kept


def resolved(weights, slots, tensors):
    """Tensors that are ignored; AssertionError if one is unknown or of another shape, or a parameter is left empty."""
    ignored = []
    for name, shape in tensors.items():
        if weights.is_ignored(name):
            ignored.append(name)
            continue
        target = weights.target(name)
        assert target is not None, f"{name} is unknown"
        for shard in target.shards:
            slot = slots.pop((target.parameter, shard), None)
            assert slot is not None, f"{name} has no place: {target}"
            assert list(slot.full_shape) == shape or (slot.any_shape and len(target.shards) == 1), (
                name,
                shape,
                slot.full_shape,
            )
    assert not [key for key, slot in slots.items() if not slot.optional]
    return ignored


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_its_parameter(name):
    hf, tensors = load_published(f"latent/{name}")
    if not WHOLE:
        hf, tensors = cut_to(hf, tensors, (hf.get("first_k_dense_replace") or 1) + 1)
    quantization = choose_quantization(None, hf, torch.bfloat16, torch.device("cpu"))
    model = model_class(hf)(hf, ModelOptions(torch.bfloat16, META, quantization=quantization))
    weights = model.weight_map().ignoring(*quantization.ignored)
    ignored = resolved(weights, all_load_slots(model), tensors)
    behind = f"model.layers.{hf['num_hidden_layers']}."
    assert all(each.startswith(behind) for each in ignored)
    if not hf.get("num_nextn_predict_layers"):
        assert not ignored
        return
    assert isinstance(model, SupportsMTP)
    head = model.make_mtp_head(ModelOptions(torch.bfloat16, META))
    resolved(model.mtp_weights(), all_load_slots(head), {each: tensors[each] for each in ignored})


@pytest.mark.parametrize("name", NAMES)
def test_ranks_have_their_share(name):
    """Latents are on every rank, heads on one."""
    hf, _ = cut_to(*load_published(f"latent/{name}"), 2)
    hf.pop("quantization_config", None)
    whole, half = (
        model_class(hf)(hf, ModelOptions(torch.bfloat16, META, TensorParallel(0, size))).layers[0].self_attn
        for size in (1, 2)
    )
    assert half.attn.num_heads * 2 == whole.attn.num_heads
    assert half.in_proj.out_partition_sizes[1] == whole.in_proj.out_partition_sizes[1] == half.sizes.latent
    assert half.attn.kv_cache_spec(16, torch.bfloat16) == whole.attn.kv_cache_spec(16, torch.bfloat16)


def test_a_token_of_v2_lite_is_27_vectors_of_576_numbers():
    hf, _ = load_published("latent/DeepSeek-V2-Lite")
    model = model_class(hf)(hf, ModelOptions(torch.bfloat16, META))
    groups = make_groups({layer.layer_index: layer.kv_cache_spec(16, torch.bfloat16) for layer in model.cache_layers()})
    cache = KVCacheConfig(100, groups)
    assert len(groups) == 1 and cache.page_bytes * cache.num_tensors == 16 * 27 * 576 * 2
