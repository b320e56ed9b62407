"""bitsandbytes' 4-bit checkpoints through the engine, against their weights unquantized, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.kernels.int_linear import dequantize_torch, pack_int_weight
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import TensorParallel
from quire.quantization.bitsandbytes import BitsAndBytesConfig, BitsAndBytesScheme, quantization, quantize_nf4
from quire.quantization.bitsandbytes_state import regrouped
from quire.quantization.int_kernels import DequantizedKernel
from quire.quantization.int_linear import IntLinearMethod
from quire.quantization.select import choose_quantization
from tests.quantization.bitsandbytes_checkpoints import NUMBERS, bitsandbytes, quantize
from tests.quantization.test_int_checkpoints import THREADS, WIDE, assert_same, checkpoints, generated
from tests.quantization.test_int_layers import CPU, fill

FORMATS = {
    "nf4": bitsandbytes(),
    "nf4, scales in float32": bitsandbytes(nested=False),
    "fp4": bitsandbytes("fp4"),
    "nf4, some layers skipped": bitsandbytes(skipped=("lm_head", "down_proj", "layers.0.self_attn")),
}


class Tensor:
    """Of a checkpoint."""

    def __init__(self, name, data):
        self.name, self.shape, self.data = name, tuple(data.shape), data

    def read_into(self, out):
        out.copy_(self.data)


def tensors_of(weight, kind="nf4", nested=True, module="model.layers.0.mlp.up_proj"):
    """As stored, and the weight that is meant."""
    found, meant = quantize(weight, kind, nested)
    return [Tensor(f"{module}.{name}", data) for name, data in found.items()], meant


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path, name):
    ours, plain = checkpoints(tmp_path, "llama", FORMATS[name], **WIDE)
    wanted = generated(plain)
    assert_same(generated(ours), wanted)
    assert_same(generated(ours, quantization="bitsandbytes"), wanted)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral", "qwen3-moe"])
def test_families(tmp_path, family):
    wide = WIDE | ({"moe_intermediate_size": 64} if family == "qwen3-moe" else {})
    ours, plain = checkpoints(tmp_path, family, bitsandbytes(), **wide)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))


def test_two_workers(tmp_path):
    ours, plain = checkpoints(tmp_path, "llama", bitsandbytes(), **WIDE)
    assert_same(generated(ours, distributed_executor_backend=THREADS), generated(plain))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_shards_of_two_workers_sum_to_the_whole(kind, nested):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 256), torch.randn(5, 256)
    stored, meant = tensors_of(weight, kind, nested)
    parts = {}
    for tensor in regrouped(stored, kind):
        name = tensor.name.rsplit(".", 1)[1]
        parts[name] = torch.empty(tensor.shape, dtype=torch.uint8 if name == "weight" else torch.float32)
        tensor.read_into(parts[name])
    method = IntLinearMethod(BitsAndBytesScheme(kind), DequantizedKernel("float32", "as requested"))
    columns, rows = [], []
    for rank in range(2):
        placed = (torch.float32, CPU, TensorParallel(rank, 2), method)
        column = ColumnParallelLinear(256, 48, False, *placed)
        row = RowParallelLinear(256, 48, False, *placed)
        for layer in (column, row):
            fill(layer, {None: parts})
        columns.append(column(x))
        rows.append(row.method.apply(row, x[:, rank * 128 : rank * 128 + 128], None))
    torch.testing.assert_close(torch.cat(columns, 1), x @ meant.T)
    torch.testing.assert_close(rows[0] + rows[1], x @ meant.T)


def test_quantized_while_loading_is_the_nearest_number():
    weight = torch.randn(40, 192)
    weight[3, 64:128] = 0
    codes, absmax = quantize_nf4(weight)
    groups = weight.view(40, 3, 64)
    torch.testing.assert_close(absmax, groups.abs().amax(-1))
    exact = groups / absmax.clamp(min=1e-9)[..., None]
    nearest = (exact[..., None] - NUMBERS["nf4"]).abs().amin(-1)
    ours = (exact - NUMBERS["nf4"][codes.int()].view(40, 3, 64)).abs()
    torch.testing.assert_close(ours, nearest)
    packed = pack_int_weight(codes, absmax, None, 4, torch.bfloat16, "nf4")
    assert packed.scale_dtype is torch.float16, "closer than bfloat16"
    wanted = (NUMBERS["nf4"][codes.int()].view(40, 3, 64) * absmax[..., None]).flatten(1)
    off = (dequantize_torch(packed, torch.float32) - wanted).abs()
    assert float((off / absmax.repeat_interleave(64, 1).clamp(min=1e-9)).max()) < 2e-3


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        (
            {"load_in_8bit": True, "load_in_4bit": False},
            r"8-bit weights of bitsandbytes \(load_in_8bit\).*load_in_4bit",
        ),
        ({"load_in_4bit": False}, "without load_in_4bit"),
        ({"bnb_4bit_quant_type": "int3"}, "bnb_4bit_quant_type 'int3'.*supported: nf4, fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'.*uint8"),
        ({"llm_int8_skip_modules": 3}, "malformed"),
    ],
)
def test_configs_that_are_refused(differences, message):
    with pytest.raises(ValueError, match=message):
        BitsAndBytesConfig.parse(bitsandbytes(**differences).config)


def state(**differences):
    """A weight's [24, 128]; None: without that key."""
    found = {"blocksize": 64, "shape": [24, 128], "nested_blocksize": 256, "nested_offset": 0.1} | differences
    return torch.tensor(list(json.dumps({k: v for k, v in found.items() if v is not None}).encode()), dtype=torch.uint8)


def changed(stored, end, data):
    """With other data where a name ends so; None: without it."""
    return [
        Tensor(t.name, data) if t.name.endswith(end) else t
        for t in stored
        if data is not None or not t.name.endswith(end)
    ]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("nested_absmax", None, "lacks model.layers.0.mlp.up_proj.weight.nested_absmax"),
        ("weight.absmax", torch.zeros(3, dtype=torch.uint8), r"absmax has shape \[3\]; allowed: 48 numbers"),
        ("up_proj.weight", torch.zeros(7, 1, dtype=torch.uint8), r"weight has shape \[7, 1\]; allowed: 1536 numbers"),
        ("weight.quant_map", torch.zeros(16), "other numbers than those of nf4"),
        ("bitsandbytes__nf4", torch.tensor(list(b"{}"), dtype=torch.uint8), "cannot be used: 'shape'"),
        ("bitsandbytes__nf4", torch.tensor([1, 2], dtype=torch.uint8), "cannot be used"),
        ("nested_quant_map", torch.zeros(3), "allowed: one for each group, and 256"),
        ("bitsandbytes__nf4", torch.full((100_000,), ord("["), dtype=torch.uint8), "up_proj.*cannot be used"),
        ("bitsandbytes__nf4", state(shape=[-24, -128]), "up_proj.*a size of its shape is -24"),
        ("bitsandbytes__nf4", state(nested_blocksize=0), "up_proj.*nested_blocksize is 0; it must be"),
        ("bitsandbytes__nf4", state(nested_blocksize="x"), "up_proj.*nested_blocksize is 'x'; it must be"),
        ("bitsandbytes__nf4", state(nested_offset=None), "up_proj.*cannot be used: 'nested_offset'"),
        ("bitsandbytes__nf4", state(nested_offset=float("nan")), "up_proj.*nested_offset is nan"),
        ("bitsandbytes__nf4", state(nested_blocksize=None), "up_proj.*nested_absmax, but no nested_blocksize"),
    ],
)
def test_states_that_are_refused(name, data, message):
    stored, _ = tensors_of(torch.randn(24, 128))
    with pytest.raises(ValueError, match=message):
        for tensor in regrouped(changed(stored, name, data), "nf4"):
            tensor.read_into(torch.empty(tensor.shape, dtype=torch.float32))


def test_large_nested_groups_need_no_memory():
    stored, _ = tensors_of(torch.randn(24, 128))
    scales = []
    for size in (256, 2**31 - 1):  # both hold all of them
        *_, absmax = regrouped(changed(stored, "bitsandbytes__nf4", state(nested_blocksize=size)), "nf4")
        scales.append(torch.empty(absmax.shape))
        absmax.read_into(scales[-1])
    assert torch.equal(*scales)


def test_another_kind_than_the_config_says():
    stored, _ = tensors_of(torch.randn(24, 128), "fp4")
    with pytest.raises(ValueError, match="is stored as fp4, but the quantization_config has nf4"):
        list(regrouped(stored, "nf4"))


def test_a_checkpoint_with_a_missing_state_is_named(tmp_path):
    ours, _ = checkpoints(tmp_path, "llama", bitsandbytes(), **WIDE)
    file = ours / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("o_proj.weight.absmax"))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"lacks {name}"):
        generated(ours)


def test_in_flight_needs_a_gpu_and_8_bits_are_refused_by_name():
    with pytest.raises(ValueError, match=r"quantizes while loading on a GPU.*allowed on a CPU: int8, int4"):
        choose_quantization("bitsandbytes", {}, torch.bfloat16, CPU)
    config = json.loads(json.dumps(bitsandbytes(load_in_8bit=True, load_in_4bit=False).config))
    with pytest.raises(ValueError, match="load_in_8bit"):
        choose_quantization(None, {"quantization_config": config}, torch.bfloat16, CPU)
    assert "dequantized to bfloat16" in quantization(bitsandbytes().config, torch.bfloat16, CPU, False).describe()
