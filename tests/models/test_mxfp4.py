"""gpt-oss as published: experts in mxfp4."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.mxfp4 import pair_mxfp4
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.kernels.int_linear import dequantize_torch
from quire.kernels.moe import route_torch, sum_experts
from quire.kernels.moe_routing import Routing
from quire.layers.mxfp4_experts import Mxfp4Experts
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.decoder import DecoderModel
from quire.models.loading.loader import load_model
from quire.models.loading.weight_loader import load_weights
from quire.models.options import ModelOptions
from quire.models.registry import model_class
from quire.quantization.mxfp4 import Mxfp4
from tests.models.helpers import CPU, MemoryTensor, TinyRunner
from tests.tiny_models import prompts, save_tiny

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def random_mxfp4(rows: tuple[int, ...], columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, exponents, and the numbers that they stand for."""
    codes = torch.randint(0, 16, (*rows, columns // 32, 32), dtype=torch.uint8)
    exponents = torch.randint(120, 126, (*rows, columns // 32), dtype=torch.uint8)
    signs = torch.where(codes >= 8, -1.0, 1.0)
    numbers = signs * torch.tensor(MAGNITUDES)[(codes % 8).long()] * 2.0 ** (exponents.float()[..., None] - 127)
    return codes[..., 0::2] | codes[..., 1::2] << 4, exponents, numbers.flatten(-2)


def save_mxfp4(folder: Path) -> Any:
    """A checkpoint, and transformers' model of the same weights."""
    torch.manual_seed(0)
    reference = save_tiny("gpt-oss", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for index, layer in enumerate(reference.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)  # [E, inputs, outputs]
            count, inputs, outputs = parameter.shape
            blocks, exponents, numbers = random_mxfp4((count, outputs), inputs)
            parameter.data.copy_(numbers.transpose(1, 2))
            full = f"model.layers.{index}.mlp.experts.{name}"
            del tensors[full]
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": exponents}
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return reference


def test_experts_in_mxfp4_equal_the_same_in_float32(tmp_path):
    reference = save_mxfp4(tmp_path)
    (prompt,) = prompts((40,))
    checkpoint = resolve_model(str(tmp_path))
    ours = load_model(checkpoint, load_hf_config(checkpoint), torch.float32, CPU)
    (logits,) = TinyRunner(ours, 1).step([(0, prompt)])
    with torch.inference_mode():
        torch.testing.assert_close(logits, reference(torch.tensor([prompt])).logits[0], atol=1e-3, rtol=0)


def load_as_stored(folder: Path, dtype: torch.dtype = torch.float16, tp: TensorParallel = SINGLE) -> DecoderModel:
    """Kept at 4 bits, as on a GPU, by the torch versions of its kernels."""
    ckpt = resolve_model(str(folder))
    hf = load_hf_config(ckpt)
    model = model_class(hf)(hf, ModelOptions(dtype, CPU, tp, quantization=Mxfp4()))
    load_weights(model, open_tensors(ckpt))
    model.process_after_loading()
    return model.eval()


def experts_of(model: DecoderModel) -> list[Mxfp4Experts]:
    return [module for module in model.modules() if isinstance(module, Mxfp4Experts)]


def test_experts_kept_at_4_bits_are_those_of_the_checkpoint(tmp_path):
    save_mxfp4(tmp_path)
    model = load_as_stored(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for index, experts in enumerate(experts_of(model)):
        place = f"model.layers.{index}.mlp.experts"
        wide = {  # by another's decompressor: [E, inputs, outputs]
            name: convert_moe_packed_tensors(
                stored[f"{place}.{name}_blocks"], stored[f"{place}.{name}_scales"], dtype=torch.float32
            )
            for name in ("gate_up_proj", "down_proj")
        }
        gate, up = wide["gate_up_proj"][..., 0::2], wide["gate_up_proj"][..., 1::2]
        wanted = torch.cat((gate, up), -1).transpose(1, 2)
        assert torch.equal(dequantize_torch(experts.gate_up, torch.float32), wanted)
        assert torch.equal(dequantize_torch(experts.down, torch.float32), wide["down_proj"].transpose(1, 2))
    (prompt,) = prompts((40,))
    (logits,) = TinyRunner(model, 1).step([(0, prompt)])
    ckpt = resolve_model(str(tmp_path))
    dequantized = load_model(ckpt, load_hf_config(ckpt), torch.float16, CPU)
    (wanted,) = TinyRunner(dequantized, 1).step([(0, prompt)])
    torch.testing.assert_close(logits.float(), wanted.float(), atol=0.05, rtol=0.02)


def test_two_ranks_summed_by_hand():
    torch.manual_seed(0)
    count, hidden, width, routing = 4, 64, 128, Routing(2, "topk_softmax")
    made = {name: random_mxfp4(shape[:2], shape[2]) for name, shape in
            (("gate_up", (count, 2 * width, hidden)), ("down", (count, hidden, width)))}  # fmt: skip
    biases = torch.randn(count, 2 * width).half(), torch.randn(count, hidden).half()
    x, logits, found = torch.randn(5, hidden).half(), torch.randn(5, count), []
    for tp in (SINGLE, TensorParallel(0, 2), TensorParallel(1, 2)):
        experts = Mxfp4Experts(count, routing, hidden, width, torch.float16, CPU, tp, activation="swigluoai", bias=True)
        slots = experts.load_slots()
        for name, (blocks, exponents, _) in made.items():
            for kind, data in (("blocks", blocks), ("scales", exponents)):
                slot = slots[f"{name}_{kind}", None]
                slot.view.copy_(slot.part_of(data))
        for name, bias in zip(("gate_up_bias", "down_bias"), biases, strict=True):
            slots[name, None].view.copy_(slots[name, None].part_of(bias))
        experts.process_after_loading()
        routes = route_torch(logits, routing)
        found.append(sum_experts(x, *routes, count, experts._expert).float())
    torch.testing.assert_close(found[1] + found[2], found[0], atol=0.02, rtol=0.01)


@pytest.mark.parametrize(("sizes", "wrong"), [((80, 64), "hidden size is 80"), ((64, 96), "of a worker is 48")])
def test_sizes_that_are_no_multiple_of_32(sizes, wrong):
    with pytest.raises(ValueError, match=f"{wrong}; in mxfp4 it must be a multiple of 32"):
        Mxfp4Experts(4, Routing(2), *sizes, torch.float16, CPU, TensorParallel(0, 2))


def test_missing_scales_are_named(tmp_path):
    save_mxfp4(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj_scales"):
        load_as_stored(tmp_path)


def test_half_of_a_pair_is_an_error():
    blocks = MemoryTensor("experts.down_proj_blocks", torch.zeros(1, 2, 1, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"lacks the other half of experts\.down_proj_blocks"):
        list(pair_mxfp4([blocks]))


def test_shapes_that_do_not_fit_are_an_error():
    blocks = MemoryTensor("a_blocks", torch.zeros(1, 2, 1, 16, dtype=torch.uint8))
    scales = MemoryTensor("a_scales", torch.zeros(1, 3, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a_blocks .* and a_scales .* do not fit"):
        list(pair_mxfp4([blocks, scales]))


def test_exponents_that_are_no_numbers_are_refused():
    experts = Mxfp4Experts(2, Routing(1), 32, 32, torch.bfloat16, CPU)
    for slot in experts.load_slots().values():
        slot.view.fill_(255)
    with pytest.raises(ValueError, match="experts in mxfp4: some of their scales are no numbers; allowed"):
        experts.process_after_loading()
