"""Architectures we have written, imported on demand."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.decoder import DecoderModel

ARCHITECTURES = {
    "LlamaForCausalLM": "quire.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "quire.models.mistral:MistralForCausalLM",
    "Qwen2ForCausalLM": "quire.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "quire.models.qwen3:Qwen3ForCausalLM",
}


def model_class(hf_config: dict[str, Any]) -> "type[DecoderModel]":
    """The class for the first of the config's `architectures` that is supported."""
    names = hf_config.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            module, _, attribute = ARCHITECTURES[name].partition(":")
            return getattr(importlib.import_module(module), attribute)
    given = ", ".join(names) if names else "none is named in the model's config"
    raise ValueError(f"architecture not supported: {given}; supported: {', '.join(ARCHITECTURES)}")
