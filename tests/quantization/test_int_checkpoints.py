"""GPTQ, AWQ and compressed-tensors checkpoints of integers through the engine, against their weights unquantized."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.kernels import native
from quire.kernels.native import quantized
from quire.models.loading.loader import load_model
from quire.quantization import select
from quire.quantization.block_quantized import block_quantized_weights
from tests.models.helpers import TinyRunner
from tests.models.references import SMALL
from tests.quantization import rounded_inputs
from tests.quantization.int_checkpoints import (
    Format,
    awq,
    compressed,
    gptq,
    group,
    save_checkpoints,
    w4a16,
    w8a8,
    with_config,
)

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9] * 20, *([7 * i % 200, 11 * i % 200] for i in range(1, 30))]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
THREADS = "tests.executor.threads:ThreadsExecutor"
needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")

WIDE = {"intermediate_size": 128}  # of which groups are whole
FORMATS = {
    "gptq": gptq(),
    "gptq asymmetric": gptq(sym=False),
    "gptq v2, groups of 64": gptq(sym=False, v2=True, group_size=64),
    "gptq desc_act": gptq(shuffled=True),
    "gptq desc_act asymmetric": gptq(shuffled=True, sym=False, group_size=64),
    "gptq per output": gptq(group_size=-1),
    "gptq 8 bits": gptq(bits=8),
    "gptq head": gptq(lm_head=True, group_size=64),
    "awq": awq(),
    "awq, groups of 64": awq(group_size=64),
    "W4A16": w4a16(),
    "W4A16 asymmetric": w4a16(sym=False),
    "W4A16 per output": w4a16(group_size=-1),
    "W4A16 actorder": w4a16(shuffled=True),
    "W8A16": w4a16(bits=8, group_size=64),
    "W8A8": w8a8(),
    "W8A8 static": w8a8(static=True),
}
DEQUANTIZED = {
    "gptq 8 bits asymmetric": gptq(bits=8, sym=False),
    "gptq groups of 16": gptq(group_size=16),
    "gptq float32 scales": gptq(scale_type=torch.float32),
    "W8A8 asymmetric": w8a8(sym=False),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(select, "_registered", {})
    rounded_inputs.register()


@dataclass
class Generated:
    token_ids: list[list[int]]
    logprobs: torch.Tensor  # of these
    prompt_logprobs: torch.Tensor  # of all prompts


def generated(folder, **options):
    options = {"dtype": "float32"} | options
    llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=128, kv_cache_memory_bytes=1 << 22, **options)
    try:
        found = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False)
    finally:
        llm.shutdown()
    outputs = [one.outputs[0] for one in found]
    logprobs = [[step[t].logprob for t, step in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
    of_prompts = [
        step[t].logprob
        for one in found
        for t, step in zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:], strict=True)
    ]
    return Generated([list(o.token_ids) for o in outputs], torch.tensor(logprobs), torch.tensor(of_prompts))


def assert_same(found, wanted):
    assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-4, rtol=0)


def assert_alike(found, plain, **stored):
    """As the unquantized checkpoint with activations rounded alike. Seldom, sums in another order move a number to the
    next of 254 steps, which later tokens of a long prompt then see."""
    config = {"quantization_config": {"quant_method": rounded_inputs.NAME, **stored}}
    wanted = generated(plain, hf_overrides=config)
    off = (found.prompt_logprobs - wanted.prompt_logprobs).abs()
    by_rounding = (generated(plain).prompt_logprobs - wanted.prompt_logprobs).abs()
    assert (off[-29:] < 1e-4).float().mean() > 0.75 and off.mean() < by_rounding.mean()


def checkpoints(tmp_path, family, made, **overrides):
    if not made.config.get("lm_head"):
        write, made.write = made.write, lambda name, w: None if name == "lm_head" else write(name, w)
    return save_checkpoints(family, tmp_path, made, **overrides)


@needs_c
@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name):
    made = FORMATS[name]
    overrides = WIDE | {"vocab_size": 208, "tie_word_embeddings": not made.config.get("lm_head")}
    ours, plain = checkpoints(tmp_path, "llama", made, **overrides)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    shuffled = (made.config.get("group_size") or 32) * ("act" in name)
    assert_alike(generated(ours), plain, shuffled=shuffled, head=made.config.get("lm_head"))
    assert all(len(ids) == 12 for ids in generated(ours, dtype="bfloat16").token_ids)


@needs_c
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "gptq asymmetric"),
        ("qwen3", "W8A8"),
        ("gemma3", "awq"),
        ("gemma3", "W4A16"),
        ("mixtral", "awq"),
        ("mixtral", "W8A8"),
        ("qwen3-moe", "gptq asymmetric"),
        ("qwen3-moe", "W4A16"),
    ],
)
def test_families(tmp_path, family, name):
    ours, plain = checkpoints(tmp_path, family, FORMATS[name])
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    assert_alike(generated(ours), plain)


@needs_c
@pytest.mark.parametrize("name", DEQUANTIZED)
def test_what_panels_cannot_hold_is_dequantized(tmp_path, name, caplog):
    ours, plain = checkpoints(tmp_path, "llama", DEQUANTIZED[name], **WIDE)
    with caplog.at_level("WARNING", "quire"):
        assert_same(generated(ours), generated(plain))
    assert "layers.0.mlp.down_proj, perhaps with others, is dequantized to float32: its " in caplog.text


@needs_c
def test_scales_that_bfloat16_would_round_more_stay(tmp_path, caplog):
    ours, _ = checkpoints(tmp_path, "llama", gptq(scale_type=torch.float32), **WIDE)
    with caplog.at_level("WARNING", "quire"):
        generated(ours, dtype="bfloat16")
    assert "dequantized" not in caplog.text


@pytest.mark.parametrize(
    "name", ["gptq asymmetric", "gptq desc_act", "awq", "W4A16 asymmetric", "W4A16 actorder", "W8A8"]
)
def test_ranks_share_a_checkpoint(tmp_path, name):
    family, wide = ("qwen3-moe", WIDE | {"moe_intermediate_size": 64}) if name == "awq" else ("llama", WIDE)
    ours, plain = checkpoints(tmp_path, family, FORMATS[name], **wide)
    shared = generated(ours, quantization="dequantized", distributed_executor_backend=THREADS)
    assert_same(shared, generated(plain))
    if native.library() is not None and "act" not in name:
        assert_alike(generated(ours, distributed_executor_backend=THREADS), plain)


def test_a_group_may_be_split_between_ranks(tmp_path):
    ours, plain = checkpoints(tmp_path, "llama", gptq(group_size=64, sym=False), intermediate_size=192)
    shared = generated(ours, quantization="dequantized", distributed_executor_backend=THREADS)
    assert_same(shared, generated(plain))


def test_one_tensor_for_several_members(tmp_path):
    """Phi-3 has query, key and value in one, and gate and up."""
    for i, made in enumerate((gptq(sym=False), awq(), w4a16(sym=False), w8a8())):
        ours, plain = checkpoints(tmp_path / str(i), "phi3", made, **WIDE)
        assert_same(generated(ours, quantization="dequantized"), generated(plain))


def test_scales_of_several_members_in_another_shape(tmp_path):
    ours, _ = checkpoints(tmp_path, "phi3", w4a16(), **WIDE)
    tensors = load_file(ours / "model.safetensors")
    name = "model.layers.0.self_attn.qkv_proj.weight_scale"
    for data in (tensors[name].t().contiguous(), tensors[name].flatten()[:-1], torch.ones(3, 5, 7)):
        save_file(tensors | {name: data}, ours / "model.safetensors")
        with pytest.raises(ValueError, match=f"{name} has"):
            generated(ours, quantization="dequantized")
    name = name.removesuffix("scale") + "packed"
    save_file(tensors | {name: torch.tensor(1, dtype=torch.int32)}, ours / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name} has"):
        generated(ours, quantization="dequantized")


def leaving(made, *parts):
    """The same, but for layers whose names have one of these parts."""
    return Format(made.config, lambda name, weight: None if any(p in name for p in parts) else made.write(name, weight))


EXCEPTIONS = {
    "gptq dynamic": gptq(dynamic={r"-:.*\.v_proj": {}, "-:model.layers.1.mlp": {}}),
    "gptq modules in block": gptq(
        modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["self_attn.o_proj"], ["mlp.up_proj"]]
    ),
    "awq": awq(modules_to_not_convert=["v_proj", "layers.1.mlp"]),
    "W4A16": with_config(w4a16(), ignore=["lm_head", r"re:.*v_proj$", r"re:model\.layers\.1\.mlp.*"]),
}
LEFT = {name: ("v_proj", "layers.1.mlp") for name in EXCEPTIONS}
LEFT["gptq modules in block"] = ("v_proj", "gate_proj", "down_proj")


@needs_c
@pytest.mark.parametrize("name", EXCEPTIONS)
def test_exceptions_are_honoured(tmp_path, name):
    ours, plain = checkpoints(tmp_path, "llama", leaving(EXCEPTIONS[name], *LEFT[name]), **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    assert_alike(generated(ours), plain, skipped=LEFT[name])


def test_modules_of_other_bits_and_groups(tmp_path):
    """q, k and v of different schemes are multiplied one by one."""
    four, eight = gptq(), gptq(bits=8, group_size=64)

    def write(name, weight):
        return (eight if name.endswith(("v_proj", "down_proj")) else four).write(name, weight)

    rules = {r"+:.*\.(v|down)_proj": {"bits": 8, "group_size": 64}}
    ours, plain = checkpoints(tmp_path / "gptq", "llama", Format(four.config | {"dynamic": rules}, write), **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))

    four, eight = w4a16(), w4a16(bits=8, group_size=64)
    groups = [group(), group(8, 64, targets=[r"re:.*\.(v|down)_proj"])]
    ours, plain = checkpoints(tmp_path / "compressed", "llama", Format(compressed(*groups), write), **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    if native.library() is not None:
        assert_alike(generated(ours), plain)


@needs_c
def test_members_with_different_orders_of_inputs(tmp_path):
    """desc_act: v_proj has groups of its own."""
    sorted_groups, shuffled = gptq(), gptq(shuffled=True)

    def write(name, weight):
        return (shuffled if name.endswith("v_proj") else sorted_groups).write(name, weight)

    ours, plain = checkpoints(tmp_path, "llama", Format(shuffled.config, write), **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    assert len(generated(ours).token_ids) == len(PROMPTS)


@needs_c
def test_no_dequantized_copy_is_in_memory(tmp_path):
    for i, made in enumerate((gptq(), awq(), w4a16(), w8a8())):
        ours, _ = checkpoints(tmp_path / str(i), "qwen3-moe", made, **WIDE)
        ckpt = resolve_model(str(ours))
        model = load_model(ckpt, load_hf_config(ckpt), torch.bfloat16, "cpu")
        weights = block_quantized_weights(model)
        assert len(weights) > 10 and all(isinstance(part, quantized.Packed) for w in weights for part in w.parts)
        assert not any("proj" in name or "experts" in name for name, _ in model.named_parameters())


def test_a_bias_of_zeros_is_not_needed(tmp_path):
    made = gptq()

    def write(name, weight):
        tensors, meant = made.write(name, weight)
        return tensors | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, meant

    ours, plain = checkpoints(tmp_path, "llama", Format(made.config, write), **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))


@pytest.mark.parametrize("made", [gptq(), awq(), w4a16(sym=False), w8a8(static=True)])
def test_dummy_weights(tmp_path, made):
    sizes = {"architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 96}
    hf = SMALL | sizes | {"quantization_config": made.config}
    model = load_model(Checkpoint("tiny", "dummy", tmp_path, ()), hf, torch.float32, "cpu")
    (logits,) = TinyRunner(model, 1).step([(0, [3, 1, 4])])
    assert logits.isfinite().all() and logits.std() > 0
