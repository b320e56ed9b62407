"""Cohere: Command R, Aya, Command R7B, Command A."""

from dataclasses import replace
from typing import Any

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS, DecoderModel
from quire.models.decoder_config import SLIDING, DecoderConfig, layer_types, renamed, windows_of_types
from quire.models.loading.transforms import halves_from_pairs, in_each_row
from quire.models.loading.weight_map import Rule, WeightMap

DEFAULTS = {"rms_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}


class CohereForCausalLM(DecoderModel):
    """Command R, Aya: attention and MLP read one LayerNorm without bias; rotary pairs are interleaved."""

    def family_weights(self) -> WeightMap:
        order = halves_from_pairs(self.config.head_dim)
        q, k = (
            Rule(f"model.layers.{{i}}.self_attn.{x}_proj.{{p}}", "layers.{i}.self_attn.qkv_proj.{p}", x, order)
            for x in ("q", "k")
        )
        norms = (replace(rule, transform=in_each_row(order)) for rule in QK_NORMS)
        return DECODER_WEIGHTS.with_rules(q, k, *norms)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return cls.configure_with({"rope_theta": 500000.0} | hf, qk_norm="layer" if hf.get("use_qk_norm") else None)

    @classmethod
    def configure_with(cls, hf: dict[str, Any], **differences: Any) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        hf = renamed(DEFAULTS | hf, rms_norm_eps="layer_norm_eps")
        return DecoderConfig.from_hf(
            hf,
            norm="layer",
            parallel=True,
            mlp_norm=False,
            logit_scale=hf["logit_scale"] or 1.0,
            qkv_bias=bias,
            o_bias=bias,
            **differences,
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B, Command A: three of four layers have a window and rotate, the others do neither."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        types = layer_types(hf, full_every=hf.get("sliding_window_pattern") or 4)
        base = cls.configure_with(hf, windows=windows_of_types(types, hf.get("sliding_window", 4096)))
        ropes = (rope if kind == SLIDING else None for rope, kind in zip(base.ropes, types, strict=True))
        return replace(base, ropes=tuple(ropes))
