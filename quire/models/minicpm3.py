"""MiniCPM3: latent attention, and scaled embeddings, residuals and logits."""

import math
from typing import Any, ClassVar

from quire.config.values import finite_number
from quire.models.config_checks import MAX_SCALE
from quire.models.decoder import DECODER_WEIGHTS, DecoderModel
from quire.models.decoder_config import DecoderConfig, require
from quire.models.latent_attention import LATENT_ATTENTION, latent_config, latent_weights
from quire.models.loading.weight_map import WeightMap


class MiniCPM3ForCausalLM(DecoderModel):
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*LATENT_ATTENTION)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        require(hf, "hidden_size", "num_hidden_layers", "num_attention_heads")
        layers, hidden = hf["num_hidden_layers"], hf["hidden_size"]
        given = {"scale_emb": 1.0, "scale_depth": math.sqrt(layers), "dim_model_base": hidden}
        given |= {name: hf[name] for name in given if hf.get(name) is not None}
        embeds, depth, base = (finite_number(name, value, 0.0, MAX_SCALE) for name, value in given.items())
        hf = hf if hf.get("v_head_dim") else hf | {"v_head_dim": hidden // hf["num_attention_heads"]}
        hf = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5} | hf
        return latent_config(
            hf,
            interleaved=False,
            embed_scale=embeds,
            residual_scale=depth / math.sqrt(layers),
            logit_scale=base / hidden,
        )

    def family_weights(self) -> WeightMap:
        return latent_weights(super().family_weights(), self.config.latent)
