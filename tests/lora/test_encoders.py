"""Adapters of encoders: of their layers, not of a head, which has one row for a text."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, PoolingParams
from quire.messages.lora import LoRARequest
from tests.encoders.tiny_encoders import prompts, save_tiny_encoder

PROMPTS = prompts()


def adapter(model, folder, *ends):
    """A random one for the weights whose names have these ends, saved as peft does, and the model merged with it."""
    merged, tensors, generator = copy.deepcopy(model), {}, torch.Generator().manual_seed(3)
    for name, weight in merged.named_parameters():
        if name.endswith(ends):
            a, b = (torch.randn(size, generator=generator) * 0.2 for size in ((4, weight.shape[1]), (len(weight), 4)))
            place = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
            weight.data += b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return LoRARequest(folder.name, len(folder.name), str(folder)), merged


@pytest.mark.parametrize("dtype, error", [("float32", 1e-5), ("bfloat16", 0.02)])
def test_texts_with_and_without_an_adapter_in_one_step(tmp_path, dtype, error):
    model = save_tiny_encoder("bert", tmp_path / "base", "ForSequenceClassification")
    lora, merged = adapter(model, tmp_path / "layers", "query.weight", "intermediate.dense.weight")
    for_head, _ = adapter(model, tmp_path / "head", "query.weight", "pooler.dense.weight")
    # A step holds a whole text, whatever it may hold by this.
    given = {"dtype": dtype, "skip_tokenizer_init": True, "max_num_batched_tokens": 40, "cpu_threads": 1}
    loras = [None if i % 2 else lora for i in range(len(PROMPTS))]
    with LLM(str(tmp_path / "base"), enable_lora=True, **given) as llm:
        outputs = llm.encode(PROMPTS, PoolingParams(), pooling_task="classify", use_tqdm=False, lora_request=loras)
        with pytest.raises(ValueError, match=r"pooler\.dense takes no adapter in this model"):
            llm.encode(PROMPTS[:1], PoolingParams(), pooling_task="classify", use_tqdm=False, lora_request=for_head)
    for prompt, own, output in zip(PROMPTS, loras, outputs, strict=True):
        with torch.inference_mode():
            logits = (model if own is None else merged)(torch.tensor([prompt])).logits[0]
        assert (torch.tensor(output.outputs.data) - logits.softmax(-1)).abs().max() < error
