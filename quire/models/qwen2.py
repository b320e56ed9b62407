"""Qwen 2 and 2.5, dense."""

from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig, windows_by_layer_type


class Qwen2ForCausalLM(DecoderModel):
    """Llama with biases on q, k and v, and windows on some layers if the config enables them."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return DecoderConfig.from_hf(hf, windows=windows_by_layer_type(hf), qkv_bias=True)
