"""Llama and models of the same architecture."""

from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig


class LlamaForCausalLM(DecoderModel):
    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        attention_bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            hf, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=bool(hf.get("mlp_bias", False))
        )
