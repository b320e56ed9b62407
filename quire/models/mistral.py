"""Mistral, dense."""

from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig


class MistralForCausalLM(DecoderModel):
    """Llama with a window on every layer; later releases set it to null."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        window = hf.get("sliding_window", 4096)
        return DecoderConfig.from_hf(hf, windows=(window,) * hf["num_hidden_layers"])
