"""Granite, dense."""

from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig


class GraniteForCausalLM(DecoderModel):
    """Llama with four multipliers."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            hf,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
            embed_scale=hf.get("embedding_multiplier", 1.0),
            scales_given_embeds=True,
            attention_scale=hf.get("attention_multiplier", 1.0),
            residual_scale=hf.get("residual_multiplier", 1.0),
            logit_scale=1.0 / hf.get("logits_scaling", 1.0),
        )
