"""fp8 layers against float32, by the twins; and checkpoints of each kind, written and loaded."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.resolve import Checkpoint, resolve_model
from quire.kernels.quantize_fp8 import FP8, quantize_fp8_torch
from quire.layers.linear import MergedColumnParallelLinear, ParallelLinear, RowParallelLinear
from quire.layers.parallel import TensorParallel
from quire.models.llama import LlamaForCausalLM
from quire.models.loading.loader import load_model
from quire.models.loading.weight_loader import init_dummy_weights
from quire.models.options import ModelOptions
from quire.quantization.fp8 import OnlineFp8Quantization
from quire.quantization.fp8_linear import OnlineFp8LinearMethod
from tests.models.helpers import CPU, TinyRunner
from tests.models.references import SMALL, build_reference
from tests.quantization.test_fp8_config import compressed

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def read(layer, **tensors: torch.Tensor) -> None:
    """Fill a layer as the loader does; weight_0 is shard 0's."""
    slots = layer.load_slots()
    for name, data in tensors.items():
        name, _, shard = name.partition("_of_")
        with slots.pop((name, int(shard) if shard else None)).opened() as view:
            view.copy_(data)
    assert not slots
    layer.process_after_loading()


def test_rows_are_quantized_to_within_half_a_step():
    x = torch.randn(5, 64) * torch.tensor([[1.0], [1e-3], [1e3], [0.0], [1.0]])
    x[4, 3] = 100.0
    q, scale = quantize_fp8_torch(x)
    assert q.dtype is FP8 and torch.equal(q.float().abs().amax(1), torch.tensor([448.0, 448.0, 448.0, 0.0, 448.0]))
    step = torch.maximum(x.abs() * 2**-4, scale[:, None] * 2**-10)  # three bits after the leading one; subnormals
    assert ((q.float() * scale[:, None] - x).abs() <= step * 1.01).all()


@pytest.mark.parametrize("per_channel", [True, False])
def test_online(per_channel):
    layer = MergedColumnParallelLinear(
        256, [64, 32], False, torch.bfloat16, CPU, method=OnlineFp8LinearMethod(per_channel)
    )
    gate, up = torch.randn(64, 256) * 0.02, torch.randn(32, 256) * 0.5
    read(layer, weight_of_0=gate, weight_of_1=up)
    assert layer.weight.dtype is FP8 and layer.weight_scale.shape == (96,)
    assert (layer.weight_scale.unique().numel() == 1) is not per_channel
    x = torch.randn(7, 256).bfloat16()
    wanted = x.float() @ torch.cat((gate, up)).bfloat16().float().T
    assert off(layer(x)[:, 64:], wanted[:, 64:]) < 0.05
    assert off(layer(x)[:, :64], wanted[:, :64]) < (0.05 if per_channel else 0.2)


def test_workers_quantize_their_part():
    """A row-parallel worker's scales are those of its own inputs."""
    weight = torch.randn(32, 128)
    halves = []
    for rank in range(2):
        method = OnlineFp8LinearMethod(per_channel=True)
        layer = RowParallelLinear(128, 32, False, torch.float32, CPU, TensorParallel(rank, 2), method)
        slot = layer.load_slots()["weight", None]
        with slot.opened() as view:
            view.copy_(slot.part_of(weight))
        halves.append(layer.weight.float() * layer.weight_scale[:, None])
    assert off(torch.cat(halves, dim=1), weight) < 0.04


def test_one_layer_at_a_time_is_in_full_precision(monkeypatch):
    """Of the whole model only layers whose tensors are being read exist in full precision."""
    from quire.quantization import staging

    alive, most = 0, 0
    part, done = staging.Staging.part, staging.Staging.done

    def count_part(self, offset, size):
        nonlocal alive, most
        alive += self._weight is None
        most = max(most, alive)
        return part(self, offset, size)

    def count_done(self):
        nonlocal alive
        done(self)
        alive -= self._weight is None

    monkeypatch.setattr(staging.Staging, "part", count_part)
    monkeypatch.setattr(staging.Staging, "done", count_done)
    quantization = OnlineFp8Quantization(True, torch.bfloat16)
    model = LlamaForCausalLM(SMALL, ModelOptions(torch.bfloat16, CPU, quantization=quantization))
    init_dummy_weights(model, 3)
    assert most == 1 and alive == 0
    model.process_after_loading()
    linears = [module for module in model.modules() if isinstance(module, ParallelLinear)]
    assert len(linears) == 4 * SMALL["num_hidden_layers"] and all(linear.weight.dtype is FP8 for linear in linears)
    assert model.lm_head.method.__class__.__name__ == "UnquantizedLinearMethod"


def write_checkpoint(folder, reference, kind: str) -> tuple[dict, dict[str, torch.Tensor]]:
    """An fp8 checkpoint of a reference model; also the dequantized weights by name."""
    tensors, plain = {}, {}
    quantized = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    for name, data in reference.state_dict().items():
        if name.split(".")[-2] not in quantized or ".layers.2." in name or not name.endswith(".weight"):
            tensors[name] = plain[name] = data.contiguous()
            continue
        layer = name.removesuffix(".weight")
        if kind == "channel":
            q, scale = quantize_fp8_torch(data)
            tensors[f"{layer}.weight_scale"] = scale[:, None].clone()
            factor = scale[:, None]
        elif kind == "block":
            block = 16
            rows, columns = (-(-n // block) for n in data.shape)
            scale = torch.rand(rows, columns) * 0.01 + 0.001
            factor = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: data.shape[0], : data.shape[1]]
            q = (data / factor).clamp(-448, 448).to(FP8)
            tensors[f"{layer}.weight_scale_inv"] = scale
        else:
            scale = factor = data.abs().max() / 448
            q = (data / scale).to(FP8)
            tensors[f"{layer}.weight_scale"] = scale if kind == "tensor" else scale.view(1)
        if kind == "static":
            tensors[f"{layer}.input_scale"] = torch.tensor([0.05])
        tensors[name], plain[name] = q, q.float() * factor
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    skipped = [f"model.layers.2.{part}" for part in ("self_attn", "mlp")]
    stored = {
        "channel": compressed(ignore=["lm_head", r"re:model\.layers\.2\..*"]),
        "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": skipped},
        "static": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": skipped},
        "block": {"quant_method": "fp8", "weight_block_size": [16, 16], "modules_to_not_convert": skipped},
    }[kind]
    reference.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["LlamaForCausalLM"],
        "quantization_config": stored,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return config, plain


@pytest.mark.parametrize("kind", ["channel", "tensor", "static", "block"])
def test_checkpoint_on_the_cpu_is_dequantized(tmp_path, kind, caplog):
    reference = build_reference("llama")
    _, plain = write_checkpoint(tmp_path, reference, kind)
    ckpt = resolve_model(str(tmp_path))
    with caplog.at_level("INFO", "quire"):
        model = load_model(ckpt, load_hf_config(ckpt), torch.float32, "cpu")
    assert "dequantized to float32" in caplog.text
    reference.load_state_dict(plain)
    with torch.inference_mode():
        wanted = reference(torch.tensor([TOKENS])).logits[0]
    (logits,) = TinyRunner(model, 1).step([(0, TOKENS)])
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["channel", "tensor", "static"])
def test_checkpoint_in_fp8(tmp_path, kind, monkeypatch):
    """The path of a GPU, by the twins: weights and scales stay as stored, activations are quantized."""
    reference = build_reference("llama")
    _, plain = write_checkpoint(tmp_path, reference, kind)
    ckpt = resolve_model(str(tmp_path))
    monkeypatch.setattr("quire.quantization.fp8.has_fp8", lambda device: True)
    model = load_model(ckpt, load_hf_config(ckpt), torch.bfloat16, "cpu")
    qkv = model.layers[1].self_attn.qkv_proj
    assert qkv.weight.dtype is FP8 and (qkv.input_scale is not None) == (kind == "static")
    stored = torch.cat([plain[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"])
    torch.testing.assert_close(qkv.weight.float() * qkv.weight_scale[:, None], stored)
    assert model.layers[2].mlp.down_proj.method.__class__.__name__ == "UnquantizedLinearMethod"
    reference.load_state_dict(plain)
    with torch.inference_mode():
        wanted = reference(torch.tensor([TOKENS])).logits[0]
    (logits,) = TinyRunner(model, 1).step([(0, TOKENS)])
    assert off(logits, wanted) < (0.2 if kind == "static" else 0.1)


def test_a_missing_scale_is_named(tmp_path):
    write_checkpoint(tmp_path, build_reference("llama"), "tensor")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    ckpt = resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.self_attn\.q_proj\.input_scale"):
        load_model(ckpt, config, torch.float32, "cpu")


def test_dummy_weights_of_an_fp8_checkpoint(tmp_path):
    hf = SMALL | {"architectures": ["LlamaForCausalLM"], "quantization_config": compressed()}
    model = load_model(Checkpoint("tiny", "dummy", tmp_path, ()), hf, torch.float32, "cpu")
    (logits,) = TinyRunner(model, 1).step([(0, TOKENS)])
    assert logits.isfinite().all() and logits.std() > 0


def test_sizes_that_fp8_cannot_multiply():
    with pytest.raises(ValueError, match="multiples of 16; one has 40 and 32"):
        RowParallelLinear(40, 32, False, torch.bfloat16, CPU, method=OnlineFp8LinearMethod(True))
