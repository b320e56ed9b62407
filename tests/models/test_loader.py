import pytest
import torch

from quire.layers.parallel import TensorParallel
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import fill_from, fill_with_random, load_model
from tests.models.helpers import CPU, MemoryTensor, TinyRunner, tensors_of
from tests.models.references import SMALL, build_reference


def tiny(**differences) -> LlamaForCausalLM:
    return LlamaForCausalLM(SMALL | differences, torch.float32, CPU)


@pytest.fixture(scope="module")
def tensors() -> list[MemoryTensor]:
    return tensors_of(build_reference("llama"))


def test_missing_tensor_is_named(tensors):
    kept = [t for t in tensors if t.name != "model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight$"):
        fill_from(tiny(), kept)


def test_many_missing_tensors_are_counted():
    with pytest.raises(ValueError, match=r"and [0-9]+ more"):
        fill_from(tiny(), [])


def test_unknown_tensor_is_named(tensors):
    bias = MemoryTensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(48))
    with pytest.raises(ValueError, match=r"unknown model\.layers\.0\.self_attn\.q_proj\.bias, vision\.weight"):
        fill_from(tiny(), [*tensors, bias, MemoryTensor("vision.weight", torch.zeros(1))])


def test_misshapen_tensor_is_named(tensors):
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight has shape \[97, 48\].*\[98, 48\]"):
        fill_from(tiny(vocab_size=98), tensors)


def test_ignored_tensors_may_be_present(tensors):
    model = tiny(tie_word_embeddings=True)
    fill_from(model, [*tensors, MemoryTensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))])
    assert model.lm_head.weight is model.embed_tokens.weight


def test_workers_hold_slices_of_the_whole(tensors):
    whole = tiny()
    fill_from(whole, tensors)
    halves = []
    for rank in range(2):
        half = LlamaForCausalLM(SMALL, torch.float32, CPU, TensorParallel(rank, 2))
        fill_from(half, tensors)
        halves.append(half.layers[0])
    layer = whole.layers[0]
    down = torch.cat([half.mlp.down_proj.weight for half in halves], dim=1)
    assert torch.equal(down, layer.mlp.down_proj.weight)
    sizes, local = layer.self_attn.qkv_proj.out_partition_sizes, halves[0].self_attn.qkv_proj.out_partition_sizes
    full_parts = layer.self_attn.qkv_proj.weight.split(sizes)
    half_parts = [half.self_attn.qkv_proj.weight.split(local) for half in halves]
    for full, first, second in zip(full_parts, *half_parts, strict=True):
        assert torch.equal(full, torch.cat((first, second)))


def test_random_weights_depend_on_the_seed_alone():
    first, second, other = tiny(), tiny(), tiny()
    for model, seed in ((first, 7), (second, 7), (other, 8)):
        fill_with_random(model, seed)
    assert torch.equal(first.embed_tokens.weight, second.embed_tokens.weight)
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)
    assert torch.equal(first.norm.weight, torch.ones(48))


def test_load_model_from_a_folder(tmp_path):
    from quire.checkpoint.resolve import resolve_model

    reference = build_reference("qwen3")
    reference.save_pretrained(tmp_path)
    hf = reference.config.to_dict()
    model = load_model(resolve_model(str(tmp_path)), hf, torch.float32, "cpu")
    tokens = [3, 1, 4, 1, 5, 9]
    (logits,) = TinyRunner(model, 1).step([(0, tokens)])
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits, theirs, atol=1e-4, rtol=1e-4)
