"""Linear layers of integer weights: products on panels, two ranks summed by hand, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import resolve_model
from quire.kernels import native
from quire.kernels.native import quantized
from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import TensorParallel
from quire.models.loading.loader import load_model
from quire.quantization.awq import AWQScheme
from quire.quantization.block_quantized import weight_of
from quire.quantization.compressed_int import CompressedScheme
from quire.quantization.gptq import GPTQConfig, GPTQScheme
from quire.quantization.int_kernels import DequantizedKernel, PanelKernel
from quire.quantization.int_linear import IntLinearMethod
from quire.quantization.int_panels import pack_int_weight
from quire.quantization.int_weight import IntWeight
from quire.quantization.select import choose_quantization
from tests.quantization.int_checkpoints import (
    awq,
    awq_tensors,
    compressed,
    gptq,
    gptq_tensors,
    group,
    packed_tensors,
    plain_tensors,
    quantize,
    save_checkpoints,
    w4a16,
    w8a8,
)
from tests.quantization.rounded_inputs import round_inputs

CPU = torch.device("cpu")
needs_c = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
PANELS, DEQUANTIZED = PanelKernel("float32"), DequantizedKernel("float32", "as requested")

# A scheme, the panels that hold it, and a layer's tensors and weight.
SCHEMES = {
    "gptq": (GPTQScheme(4, 64, True), "Q4_0", lambda w: gptq_of(w, 4, 64)),
    "gptq asymmetric": (GPTQScheme(4, 64, True), "Q5_0", lambda w: gptq_of(w, 4, 64, sym=False)),
    "gptq 8 bits": (GPTQScheme(8, 32, True), "Q8_0", lambda w: gptq_of(w, 8, 32)),
    "awq": (AWQScheme(32), "Q5_0", lambda w: made(quantize(w, 4, 32, False), awq_tensors)),
    "W4A16": (
        CompressedScheme(4, 128, packed=True, symmetric=True), "Q4_0",
        lambda w: made(quantize(w, 4, 128), packed_tensors, 4, True),
    ),
    "W4A16 asymmetric": (
        CompressedScheme(4, -1, packed=True, symmetric=False), "Q5_0",
        lambda w: made(quantize(w, 4, -1, False), packed_tensors, 4, False),
    ),
    "W8A8": (
        CompressedScheme(8, -1, packed=False, symmetric=True), "Q8_0",
        lambda w: made(quantize(w, 8, -1), plain_tensors, 8, True),
    ),
}  # fmt: skip


def made(q, write, *args):
    return write(q, *args), q.dequantized()


def gptq_of(weight, bits, group_size, sym=True, shuffled=False):
    return made(quantize(weight, bits, group_size, sym, shuffled), gptq_tensors, bits)


def fill(layer, tensors_of_shards):
    """As the loader does."""
    slots = layer.load_slots()
    for shard, tensors in tensors_of_shards.items():
        for name, tensor in tensors.items():
            slot = slots.pop((name, shard))
            with slot.opened() as view:
                view.copy_(slot.part_of(tensor.view(slot.full_shape)))
    assert all(slot.optional for slot in slots.values())
    layer.process_after_loading()


@needs_c
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_round_activations_and_nothing_else(name, dtype):
    scheme, panels, write = SCHEMES[name]
    layer = MergedColumnParallelLinear(256, [48, 32], True, dtype, CPU, method=IntLinearMethod(scheme, PANELS))
    (gate, gate_weight), (up, up_weight) = (write(torch.randn(n, 256)) for n in (48, 32))
    bias = torch.randn(80).to(dtype)
    fill(layer, {0: gate | {"bias": bias[:48]}, 1: up | {"bias": bias[48:]}})
    assert all(part.format is quantized.FORMATS[panels] for part in weight_of(layer).parts)
    x = torch.randn(9, 256).to(dtype)
    wanted = round_inputs(x.float()) @ torch.cat((gate_weight, up_weight)).T + bias.float()
    torch.testing.assert_close(layer(x), wanted.to(dtype), atol=1e-4 if dtype is torch.float32 else 0.1, rtol=0.01)
    assert torch.equal(layer(x[3:4])[0], layer(x)[3])


@needs_c
def test_inputs_are_permuted_for_desc_act():
    tensors, weight = gptq_of(torch.randn(48, 256), 4, 64, sym=False, shuffled=True)
    layer = ColumnParallelLinear(
        256, 48, False, torch.float32, CPU, method=IntLinearMethod(GPTQScheme(4, 64, True), PANELS)
    )
    fill(layer, {None: tensors})
    order = tensors["g_idx"].argsort(stable=True)
    x = torch.randn(5, 256)
    torch.testing.assert_close(layer(x), round_inputs(x[:, order]) @ weight[:, order].T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*SCHEMES, "desc_act"])
@pytest.mark.parametrize("kernel", [DEQUANTIZED, pytest.param(PANELS, marks=needs_c)], ids=["dequantized", "panels"])
def test_two_ranks_summed_by_hand(name, kernel):
    shuffled = GPTQScheme(4, 64, True), None, lambda w: gptq_of(w, 4, 64, shuffled=True)
    scheme, _, write = SCHEMES.get(name, shuffled)
    tensors, weight = write(torch.randn(48, 256))
    x, found, columns = torch.randn(7, 256), 0, []
    for rank in range(2):
        placed = (torch.float32, CPU, TensorParallel(rank, 2), IntLinearMethod(scheme, kernel))
        row, column = RowParallelLinear(256, 48, False, *placed), ColumnParallelLinear(256, 48, False, *placed)
        fill(row, {None: tensors})
        fill(column, {None: tensors})
        found = found + row.method.apply(row, x[:, 128 * rank :][:, :128].contiguous(), None)
        columns.append(column(x))
    # Inputs of a shuffled group are on both ranks, whose groups are then not of 32: such a part is dequantized.
    if kernel is DEQUANTIZED or name == "desc_act":
        torch.testing.assert_close(found, x @ weight.T, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(found, round_inputs(x) @ weight.T, atol=1e-4, rtol=1e-4)
    order = tensors["g_idx"].argsort(stable=True) if name == "desc_act" else torch.arange(256)
    rounded = x if kernel is DEQUANTIZED else round_inputs(x[:, order])[:, order.argsort()]
    torch.testing.assert_close(torch.cat(columns, 1), rounded @ weight.T, atol=1e-4, rtol=1e-4)


def test_zero_points_of_0_in_the_first_version():
    """One is subtracted from whole numbers of 32 bits, so a zero point of 0 borrows from its neighbour."""
    q = quantize(torch.rand(16, 32) + 1, 4, 32, sym=False)
    q.zeros[:] = torch.randint(0, 16, q.zeros.shape).numpy()
    q.zeros[3] = 0
    tensors = gptq_tensors(q, 4, v2=True)
    tensors["qzeros"] = (tensors["qzeros"].long() - 0x11111111).to(torch.int32)
    ours = torch.empty(16, 32)
    GPTQScheme(4, 32, adds_one=True).decode(tensors, 16, 32).dequantize_into(ours)
    torch.testing.assert_close(ours, q.dequantized())


def test_dynamic_rules_are_tried_in_order():
    rules = {r"-:.*\.0\.": {}, r"+:.*down_proj": {"bits": 8}, r".*\.mlp": {"group_size": 64}, "lm_head": {"bits": 8}}
    config = GPTQConfig.parse(gptq(dynamic=rules).config)
    assert config.scheme("model.layers.0.mlp.down_proj") is None
    assert config.scheme("model.layers.1.mlp.down_proj") == GPTQScheme(8, 32, True)
    assert config.scheme("model.layers.1.mlp.up_proj") == GPTQScheme(4, 64, True)
    assert config.scheme("model.layers.1.self_attn.q_proj") == GPTQScheme(4, 32, True)
    assert config.scheme("lm_head") == GPTQScheme(8, 32, True)
    assert GPTQConfig.parse(gptq().config).scheme("lm_head") is None


def without(config: dict, name: str) -> dict:
    return {key: value for key, value in config.items() if key != name}


REFUSED = [
    ({"quant_method": "torchao"}, "by 'torchao'.*not supported; supported: fp8, compressed-tensors, gptq, awq"),
    ({"quant_method": "hqq"}, "quantized by 'hqq'.*not supported"),
    ({"quant_method": "auto-round"}, "quantized by 'auto-round'.*not supported"),
    (gptq(bits=4).config | {"bits": 3}, "weights of 3 bits, which is not supported; supported: 4 or 8"),
    (gptq(bits=4).config | {"bits": 2}, "weights of 2 bits.*supported: 4 or 8"),
    (gptq(checkpoint_format="marlin").config, "'marlin', which is not supported; supported: gptq, gptq_v2"),
    (gptq(is_marlin_format=True).config, "checkpoint_format"),
    (gptq(pack_dtype="int8").config, "pack_dtype 'int8'.*supported: int32"),
    (gptq(group_size=-1).config | {"group_size": 0}, "group_size .* is 0"),
    (gptq(dynamic={"+:.*q_proj": {"bits": 3}}).config, r"for modules '\.\*q_proj' \(dynamic\).*3 bits.*4 or 8"),
    (gptq(dynamic={"-:(": {}}).config, "malformed"),
    (gptq(dynamic=[1]).config, "malformed"),
    (without(gptq().config, "bits"), "malformed: 'bits'"),
    (awq(version="gemv").config, "awq version 'gemv'.*supported: gemm"),
    (awq().config | {"bits": 8}, "weights of 8 bits.*supported: 4"),
    (awq(zero_point=False).config, "without zero points"),
    (awq(modules_to_not_convert=[3]).config, "malformed"),
    (compressed(group(2)), r"weights of 2 bits.*4-bit int, 8-bit int.* \(config_groups: group_0\)"),
    (compressed(group(), kind="marlin-24"), "format 'marlin-24'.*pack-quantized, int-quantized"),
    (compressed(group(), {"targets": ["re:.*v"], "weights": {"type": "float", "num_bits": 8}}), "for fp8.*: group_1"),
    (compressed(group(input_activations={"type": "float", "num_bits": 8})), "8-bit float input_activations.*8-bit int"),
    (compressed(group(), ignore=["re:("]), "malformed"),
    (compressed(group(), ignore="lm_head"), "ignore must be a list of names"),
    (compressed(group(targets="Linear")), "targets must be a list of names"),
    (compressed(group(), transform_config={"config_groups": {}}), "transform_config"),
    (compressed(group(), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "complaint"), REFUSED)
def test_configs_that_are_refused(stored, complaint):
    with pytest.raises(ValueError, match=complaint):
        choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, CPU)


def test_another_quantization_than_the_checkpoints():
    with pytest.raises(
        ValueError, match="is 'awq', but the checkpoint is quantized by 'gptq'; leave it out, or use deq"
    ):
        choose_quantization("awq", {"quantization_config": gptq().config}, torch.bfloat16, CPU)


def load(folder):
    ckpt = resolve_model(str(folder))
    return load_model(ckpt, load_hf_config(ckpt), torch.float32, "cpu")


def test_groups_that_do_not_divide_are_found_before_weights_are_read(tmp_path):
    ours, _ = save_checkpoints("llama", tmp_path, gptq(group_size=32))
    config = json.loads((ours / "config.json").read_text())
    config["quantization_config"]["group_size"] = 24
    (ours / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj has 64 inputs, .* group size of 24"):
        load(ours)


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("form", "changes", "complaint"),
    [
        (gptq(), {"scales": None}, rf"lacks {Q_PROJ}\.scales"),
        (gptq(), {"qzeros": None}, rf"lacks {Q_PROJ}\.qzeros"),
        (gptq(), {"qweight": torch.zeros(8, 60, dtype=torch.int32)}, rf"{Q_PROJ}\.qweight has shape \[8, 60\]"),
        (gptq(), {"scales": torch.full((2, 64), torch.nan)}, rf"{Q_PROJ}: its scales are not all finite numbers"),
        (w4a16(), {"weight_scale": torch.full((64, 2), torch.inf)}, rf"{Q_PROJ}: its scales are not all finite"),
        (w8a8(), {"weight": torch.full((64, 64), 0.5)}, rf"{Q_PROJ}\.weight .*torch.float32 that torch.int8 does not"),
        (
            w8a8(sym=False),
            {"weight_zero_point": torch.full((64, 1), 200, dtype=torch.int16)},
            "zero points are not all",
        ),
        (gptq(), {"g_idx": torch.full((64,), 2)}, rf"{Q_PROJ}: its inputs are in groups 2 to 2; allowed: 0 to 1"),
        (gptq(), {"bias": torch.ones(64)}, rf"{Q_PROJ} has a bias in the checkpoint"),
        (awq(), {"scales": torch.zeros(1, 64)}, rf"{Q_PROJ}\.scales has shape \[1, 64\]"),
        (w8a8(static=True), {"input_scale": None}, rf"lacks {Q_PROJ}\.input_scale"),
        (w8a8(), {"weight_scale": torch.zeros(3, 1)}, rf"{Q_PROJ}\.weight_scale has shape \[3, 1\]"),
        (w8a8(), {"weight_scale": torch.zeros(2, 32)}, rf"{Q_PROJ}\.weight_scale has shape \[2, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, form, changes, complaint):
    ours, _ = save_checkpoints("llama", tmp_path, form)
    tensors = load_file(ours / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(f"{Q_PROJ}.{name}", None)
        tensors |= {} if tensor is None else {f"{Q_PROJ}.{name}": tensor}
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        load(ours)


def test_families_whose_rows_are_reordered_are_refused(tmp_path):
    ours, _ = save_checkpoints("cohere", tmp_path, awq())
    with pytest.raises(ValueError, match=r"[qk]_proj\.\w+ is a packed weight, but this family's weights are reordered"):
        load(ours)


def test_outputs_that_cannot_be_divided_among_ranks():
    method = IntLinearMethod(AWQScheme(32), DEQUANTIZED, "model.layers.0.mlp.up_proj")
    layer = ColumnParallelLinear(64, 24, False, torch.float32, CPU, TensorParallel(0, 2), method)
    with pytest.raises(ValueError, match=r"up_proj: 24 outputs cannot be divided .* qweight packs 8 of them"):
        layer.load_slots()


def test_inputs_that_do_not_fill_words():
    scheme = CompressedScheme(4, -1, packed=True, symmetric=True)
    with pytest.raises(ValueError, match="60 inputs are no multiple of 8"):
        scheme.tensors(8, 60, 1)


def test_scales_that_float16_rounds_to_nothing_are_not_packed():
    codes = torch.full((16, 32), 3, dtype=torch.uint8)
    for scale in (2e-8, 9.2e-7):
        weight = IntWeight(4, codes, torch.full((16, 1), scale), None, 32, None)
        assert pack_int_weight(weight, exact=False) == "its scales do not fit float16"


def test_codes_of_a_table_are_not_packed_as_integers():
    codes = torch.randint(0, 16, (16, 64), dtype=torch.uint8)
    weight = IntWeight(4, codes, torch.ones(16, 1), None, 64, kind="nf4")
    assert pack_int_weight(weight, exact=False) == "its nf4 codes are no integers"
