"""gpt-oss as published: experts in mxfp4."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoint.config import load_hf_config
from quire.checkpoint.mxfp4 import pair_mxfp4
from quire.checkpoint.resolve import resolve_model
from quire.models.loading.loader import load_model
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


def test_experts_in_mxfp4_equal_the_same_in_float32(tmp_path):
    torch.manual_seed(0)
    reference = save_tiny("gpt-oss", tmp_path)
    file = tmp_path / "model.safetensors"
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
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    (prompt,) = prompts((40,))
    checkpoint = resolve_model(str(tmp_path))
    ours = load_model(checkpoint, load_hf_config(checkpoint), torch.float32, CPU)
    (logits,) = TinyRunner(ours, 1).step([(0, prompt)])
    with torch.inference_mode():
        torch.testing.assert_close(logits, reference(torch.tensor([prompt])).logits[0], atol=1e-3, rtol=0)


def test_half_of_a_pair_is_an_error():
    blocks = MemoryTensor("experts.down_proj_blocks", torch.zeros(1, 2, 1, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"lacks the other half of experts\.down_proj_blocks"):
        list(pair_mxfp4([blocks]))


def test_shapes_that_do_not_fit_are_an_error():
    blocks = MemoryTensor("a_blocks", torch.zeros(1, 2, 1, 16, dtype=torch.uint8))
    scales = MemoryTensor("a_scales", torch.zeros(1, 3, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a_blocks .* and a_scales .* do not fit"):
        list(pair_mxfp4([blocks, scales]))
