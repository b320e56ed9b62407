"""Checkpoints of 4-bit floats (NVFP4, MXFP4) through the engine, against their weights unquantized."""

import json
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from quire.checkpoint.resolve import Checkpoint
from quire.kernels.int_linear import dequantize_torch
from quire.kernels.round_fp4 import mantissa, round_mxfp4_torch, round_nvfp4_torch
from quire.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.loading.loader import load_model
from quire.quantization import select
from quire.quantization.compressed_tensors import CompressedConfig
from quire.quantization.fp4_config import MODELOPT
from quire.quantization.fp4_linear import fp4_linear_method, input_rounding
from quire.quantization.int_kernels import DequantizedKernel, PanelKernel
from quire.quantization.int_triton import TritonIntKernel, packed_of
from quire.quantization.select import choose_quantization, register_quantization
from quire.quantization.unquantized import UnquantizedLinearMethod
from tests.models.helpers import CPU, TinyRunner
from tests.models.references import SMALL
from tests.quantization.fp4_checkpoints import (
    INPUTS_TIMES,
    group,
    modelopt,
    mxfp4,
    nvfp4,
    quantize_mxfp4,
    quantize_nvfp4,
    round_inputs,
)
from tests.quantization.int_checkpoints import compressed
from tests.quantization.test_int_checkpoints import THREADS, WIDE, assert_same, checkpoints, generated, needs_c
from tests.quantization.test_int_layers import Q_PROJ, fill, load

NAME = "rounded-to-fp4"
DEQUANTIZED = DequantizedKernel("float32", "as requested")
FAMILIES = ["llama", "qwen3", "gemma3", "mixtral", "qwen3-moe"]
ROUNDED = {"nvfp4": (nvfp4(rounds_inputs=True), "nvfp4"), "mxfp4": (mxfp4(rounds_inputs=True), "mxfp4"),
           "modelopt": (modelopt(), "nvfp4")}  # fmt: skip


@dataclass(frozen=True)
class RoundedInputsMethod(UnquantizedLinearMethod):
    kind: str = "nvfp4"

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(round_inputs(x, self.kind), layer.weight, bias)


class RoundedInputs:
    """A reference for W4A4: unquantized weights, activations rounded before each product."""

    ignored: tuple[str, ...] = ()

    def __init__(self, stored, dtype, device) -> None:
        self.kind = stored["kind"]

    def linear_method(self, name: str) -> RoundedInputsMethod:
        return RoundedInputsMethod(self.kind)

    def vocab_method(self) -> None:
        return None

    def describe(self) -> str:
        return "activations rounded: made up for a test"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(select, "_registered", {})
    register_quantization(NAME, RoundedInputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("made", [nvfp4(), mxfp4()], ids=["nvfp4", "mxfp4"])
def test_weights_alone(tmp_path, made, family):
    ours, plain = checkpoints(tmp_path, family, made, **WIDE)
    assert_same(generated(ours, quantization="dequantized"), generated(plain))
    assert all(len(ids) == 12 for ids in generated(ours, dtype="bfloat16").token_ids)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROUNDED)
def test_activations_are_rounded_alike(tmp_path, name, family):
    """Seldom, sums in another order move a number to the next of sixteen, which later tokens then see."""
    made, kind = ROUNDED[name]
    ours, plain = checkpoints(tmp_path, family, made, **WIDE)
    found = generated(ours, quantization="dequantized").prompt_logprobs
    config = {"quantization_config": {"quant_method": NAME, "kind": kind}}
    wanted, exact = generated(plain, hf_overrides=config).prompt_logprobs, generated(plain).prompt_logprobs
    off, by_rounding = (found - wanted).abs(), (exact - wanted).abs()
    assert (off[-29:] < 1e-4).float().mean() > 0.75 and off.mean() < 0.3 * by_rounding.mean()


def test_groups_of_16_are_dequantized_on_a_cpu(tmp_path, caplog):
    ours, plain = checkpoints(tmp_path, "llama", nvfp4(), **WIDE)
    with caplog.at_level("INFO", "quire"):
        assert_same(generated(ours), generated(plain))
    assert "compressed-tensors: 4-bit floats (nvfp4), groups of 16; weights dequantized to float32" in caplog.text


@needs_c
def test_mxfp4_becomes_integers_on_a_cpu():
    scheme = CompressedConfig.parse(mxfp4().config).scheme("a")
    tensors, meant = mxfp4().write("a", torch.randn(48, 64))
    weight = scheme.decode(tensors, 48, 32).as_integers()
    found = torch.empty(48, 64)
    weight.dequantize_into(found)
    assert weight.bits == 8 and torch.equal(found, meant)
    layer = ColumnParallelLinear(
        64, 48, False, torch.float32, CPU, method=fp4_linear_method(scheme, PanelKernel("float32"), "a")
    )
    fill(layer, {None: tensors})
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ meant.T, atol=0.3, rtol=0.02)


@pytest.mark.parametrize("made", [nvfp4(), nvfp4(rounds_inputs=True), mxfp4()], ids=["nvfp4", "w4a4", "mxfp4"])
def test_ranks_share_a_checkpoint(tmp_path, made):
    ours, plain = checkpoints(tmp_path, "qwen3-moe", made, **WIDE | {"moe_intermediate_size": 64})
    shared = generated(ours, quantization="dequantized", distributed_executor_backend=THREADS)
    if "local" not in json.dumps(made.config):
        assert_same(shared, generated(plain))
    else:
        alone = generated(ours, quantization="dequantized")
        assert (shared.prompt_logprobs - alone.prompt_logprobs).abs().median() < 1e-3


@pytest.mark.parametrize("made", [nvfp4(), mxfp4(), modelopt()], ids=["nvfp4", "mxfp4", "modelopt"])
def test_two_ranks_summed_by_hand(made):
    scheme = MODELOPT if "quant_algo" in made.config else CompressedConfig.parse(made.config).scheme("a")
    tensors, meant = made.write("a", torch.randn(48, 256))
    x, found, columns = torch.randn(7, 256), 0, []
    for rank in range(2):
        placed = (torch.float32, CPU, TensorParallel(rank, 2), fp4_linear_method(scheme, DEQUANTIZED, "a"))
        row, column = RowParallelLinear(256, 48, False, *placed), ColumnParallelLinear(256, 48, False, *placed)
        fill(row, {None: tensors})
        fill(column, {None: tensors})
        found = found + row.method.apply(row, x[:, 128 * rank :][:, :128].contiguous(), None)
        columns.append(column(x))
    wanted = (round_inputs(x, "nvfp4") if scheme.rounds_inputs else x) @ meant.T
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.cat(columns, 1), wanted, atol=1e-4, rtol=1e-4)


def merged(scheme, kernel, dtype, tensors):
    method = fp4_linear_method(scheme, kernel, "model.layers.0.mlp.gate_proj")
    layer = MergedColumnParallelLinear(64, [48, 32], False, dtype, CPU, SINGLE, method)
    fill(layer, dict(enumerate(tensors)))
    return layer


def test_members_with_different_global_scales_are_one_packed_weight():
    """As on a GPU, by the torch versions of its kernels."""
    scheme = CompressedConfig.parse(nvfp4().config).scheme("a")
    (gate, first), (up, second) = (nvfp4().write("a", torch.randn(n, 64) * n) for n in (48, 32))
    layer = merged(scheme, TritonIntKernel(torch.bfloat16), torch.bfloat16, [gate, up])
    packed = packed_of(layer)
    assert packed is not None and packed.kind == "e2m1" and packed.parts == 2
    torch.testing.assert_close(dequantize_torch(packed, torch.float32), torch.cat((first, second)), rtol=1e-6, atol=0)
    x = torch.randn(5, 64).bfloat16()
    wanted = x.float() @ torch.cat((first, second)).T
    torch.testing.assert_close(layer(x).float(), wanted, atol=1.0, rtol=0.02)


@pytest.mark.parametrize("kernel", [DEQUANTIZED, TritonIntKernel(torch.bfloat16)], ids=["dequantized", "packed"])
@pytest.mark.parametrize("scales", [{}, {"up": 50.0}], ids=["equal", "different"])
def test_scales_of_inputs_of_members(scales, kernel):
    made = nvfp4(rounds_inputs=True, inputs_times=scales)
    scheme = CompressedConfig.parse(made.config).scheme("a")
    (gate, first), (up, second) = (made.write(name, torch.randn(n, 64)) for name, n in (("gate", 48), ("up", 32)))
    dtype = torch.float32 if kernel is DEQUANTIZED else torch.bfloat16
    layer = merged(scheme, kernel, dtype, [gate, up])
    assert len(layer.input_scales) == 1 + bool(scales)
    assert not layer.method.can_fuse(layer)
    x = torch.randn(5, 64).to(dtype)
    sides = (round_inputs(x.float(), "nvfp4", times) for times in (INPUTS_TIMES, scales.get("up", INPUTS_TIMES)))
    wanted = torch.cat([side @ weight.T for side, weight in zip(sides, (first, second), strict=True)], 1)
    close = {"atol": 1e-4, "rtol": 1e-4} if kernel is DEQUANTIZED else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(layer(x).float(), wanted, **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_activations(dtype):
    x = (torch.randn(40, 96) * torch.rand(40, 1) * 8).to(dtype)
    x[0] = 0
    x[1, :32] = torch.arange(32) / 4 - 3  # on the middle between two numbers
    wanted = quantize_nvfp4(x, INPUTS_TIMES)[3]
    found = round_nvfp4_torch(x, INPUTS_TIMES).float() / mantissa(INPUTS_TIMES)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)
    assert torch.equal(round_mxfp4_torch(x).float(), quantize_mxfp4(x)[2])


@pytest.mark.parametrize("rounds_inputs", [False, True])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_the_library_reads_the_same_weight(kind, rounds_inputs):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    made = (nvfp4 if kind == "nvfp4" else mxfp4)(rounds_inputs)
    tensors, meant = made.write("a", torch.randn(40, 128))
    each, stored = group(kind, rounds_inputs), made.config
    compressor = compressors.BaseCompressor.get_value_from_registry(stored["format"])
    read = compressor.decompress(dict(tensors), QuantizationScheme(**each))["weight"]
    torch.testing.assert_close(read.float(), meant, rtol=2**-7, atol=0)  # it computes in bfloat16
    ours = torch.empty(40, 128)
    scheme = CompressedConfig.parse(stored).scheme("a")
    scheme.decode(tensors, 40, scheme.group_size).dequantize_into(ours)
    torch.testing.assert_close(ours * (mantissa(INPUTS_TIMES) if kind == "nvfp4" and rounds_inputs else 1), meant)


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_the_library_rounds_activations_alike(kind):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    scale_type = torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8
    args = group(kind, True)["input_activations"] | {"scale_dtype": scale_type, "zp_dtype": scale_type}
    args = QuantizationArgs(**args)
    x = torch.randn(16, 64)
    groups = x.unflatten(-1, (-1, args.group_size))
    times = torch.tensor([INPUTS_TIMES]) if kind == "nvfp4" else None
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=times)
    wanted = fake_quantize(x, scale, zero, args, global_scale=times)
    found = round_nvfp4_torch(x, INPUTS_TIMES) / mantissa(INPUTS_TIMES) if kind == "nvfp4" else round_mxfp4_torch(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


REFUSED = [
    (compressed(group("nvfp4"), kind="pack-quantized"), "format 'pack-quantized' for 4-bit floats.*nvfp4-pack-quant"),
    (compressed(group("mxfp4"), kind="nvfp4-pack-quantized"), "float by group of 32.*by tensor_group of 16"),
    (compressed(group("nvfp4", input_activations={"type": "float", "num_bits": 8, "strategy": "tensor"}),
                kind="nvfp4-pack-quantized"), "input_activations of 8-bit float by tensor"),
    (compressed(group("nvfp4", input_activations=group("nvfp4", True)["input_activations"] | {"dynamic": False}),
                kind="nvfp4-pack-quantized"), "static input_activations in nvfp4-pack-quantized"),
    (modelopt(quant_algo="NVFP4_AWQ").config, "quant_algo 'NVFP4_AWQ'.*supported: .*NVFP4"),
]  # fmt: skip


@pytest.mark.parametrize(("stored", "complaint"), REFUSED)
def test_configs_that_are_refused(stored, complaint):
    with pytest.raises(ValueError, match=complaint):
        choose_quantization(None, {"quantization_config": stored}, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("made", "changes", "complaint"),
    [
        (nvfp4(), {"weight_scale": None}, rf"lacks {Q_PROJ}\.weight_scale"),
        (nvfp4(), {"weight_global_scale": None}, rf"lacks {Q_PROJ}\.weight_global_scale"),
        (nvfp4(True), {"input_global_scale": None}, rf"lacks {Q_PROJ}\.input_global_scale"),
        (nvfp4(True), {"input_global_scale": torch.zeros(1)}, rf"{Q_PROJ}: its input_global_scale is 0\.0; allowed"),
        (nvfp4(), {"weight_global_scale": torch.zeros(1)}, rf"{Q_PROJ}: its weight_global_scale is 0\.0; allowed"),
        (nvfp4(), {"weight_global_scale": -torch.ones(1)}, rf"{Q_PROJ}: its weight_global_scale is -1\.0; allowed"),
        (nvfp4(), {"weight_global_scale": torch.tensor([1e-42])}, rf"{Q_PROJ}: its weight_global_scale .*from 1e-30"),
        (modelopt(), {"input_scale": -torch.ones(1)}, rf"{Q_PROJ}: its input_scale is -1\.0; allowed"),
        (mxfp4(), {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)}, rf"{Q_PROJ}: its scales are not all"),
        (nvfp4(), {"weight_packed": torch.zeros(64, 30, dtype=torch.uint8)}, r"weight_packed has shape \[64, 30\]"),
        (mxfp4(), {"weight_scale": torch.zeros(64, 4, dtype=torch.uint8)}, r"weight_scale has shape \[64, 4\]"),
        (modelopt(), {"weight_scale_2": None}, rf"lacks {Q_PROJ}\.weight_scale_2"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, made, changes, complaint):
    ours, _ = checkpoints(tmp_path, "llama", made, **WIDE)
    tensors = load_file(ours / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(f"{Q_PROJ}.{name}", None)
        tensors |= {} if tensor is None else {f"{Q_PROJ}.{name}": tensor}
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(ValueError, match=complaint):
        load(ours)


def test_exponents_of_their_own_type(tmp_path):
    ours, _ = checkpoints(tmp_path, "llama", mxfp4(), **WIDE)
    tensors = load_file(ours / "model.safetensors")
    wanted = load(ours).layers[0].self_attn.o_proj(torch.ones(1, 64))
    exponents = {n: t.view(torch.float8_e8m0fnu) for n, t in tensors.items() if n.endswith("weight_scale")}
    save_file(tensors | exponents, ours / "model.safetensors")
    assert torch.equal(load(ours).layers[0].self_attn.o_proj(torch.ones(1, 64)), wanted)


def test_groups_that_do_not_divide(tmp_path):
    sizes = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 80}
    hf = SMALL | sizes | {"quantization_config": mxfp4().config}
    with pytest.raises(ValueError, match=r"_proj has \d+ inputs, which are no multiple of .* group size of 32"):
        load_model(Checkpoint("tiny", "dummy", tmp_path, ()), hf, torch.float32, "cpu")


@pytest.mark.parametrize("made", [nvfp4(), nvfp4(True), mxfp4(), modelopt()])
def test_dummy_weights(tmp_path, made):
    sizes = {"architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 96}
    hf = SMALL | sizes | {"quantization_config": made.config}
    model = load_model(Checkpoint("tiny", "dummy", tmp_path, ()), hf, torch.float32, "cpu")
    (logits,) = TinyRunner(model, 1).step([(0, [3, 1, 4])])
    assert logits.isfinite().all()


def test_how_experts_round_their_inputs():
    def layers(*scales):
        made = [nn.Module() for _ in scales]
        for layer, scale in zip(made, scales, strict=True):
            layer.stored_on = CPU
            if scale != "none":
                layer.input_scales = scale if isinstance(scale, list) else [(scale, 8)]
        return made

    assert input_rounding(layers("none", "none"), layers("none", "none")) == (True, None)
    can, rounding = input_rounding(layers(2.0, 3.0), layers(4.0, 5.0))
    assert can and rounding.gate_up.tolist() == [2, 3] and rounding.down.tolist() == [4, 5]
    can, rounding = input_rounding(layers(None, None), layers(None, None))  # MXFP4
    assert can and rounding.gate_up is None
    for gate_up, down in (
        (layers(2.0, [(1.0, 8), (2.0, 8)]), layers(1.0, 1.0)),  # gate and up differ
        (layers(2.0, 2.0), layers("none", 1.0)),
        (layers(2.0, None), layers(1.0, 1.0)),
    ):
        assert input_rounding(gate_up, down) == (False, None)
