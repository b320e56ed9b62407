"""OLMo 2 and 3."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS, DecoderModel
from quire.models.decoder_config import (
    FULL,
    SLIDING,
    DecoderConfig,
    layer_types,
    require,
    ropes_by_layer_type,
    windows_of_types,
)
from quire.models.loading.weight_map import Rule, WeightMap


class Olmo2ForCausalLM(DecoderModel):
    """Norms only on the outputs of attention and MLP; queries and keys are normed over all heads together."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        *QK_NORMS,
        Rule("model.layers.{i}.post_attention_layernorm.{p}", "layers.{i}.attention_out_norm.{p}"),
        Rule("model.layers.{i}.post_feedforward_layernorm.{p}", "layers.{i}.mlp_out_norm.{p}"),
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return cls.configure_with(hf)

    @classmethod
    def configure_with(cls, hf: dict[str, Any], **differences: Any) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            {"rms_norm_eps": 1e-5} | hf,
            pre_norm=False,
            post_norm=True,
            qk_norm="width",
            qkv_bias=bias,
            o_bias=bias,
            **differences,
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three of four layers have a window; only the others stretch their rotations."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        types = layer_types(hf, full_every=4)
        require(hf, "hidden_size", "num_attention_heads")
        base = hf.get("rope_theta") or 500000.0
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        return cls.configure_with(
            hf,
            windows=windows_of_types(types, hf.get("sliding_window", 4096)),
            ropes=ropes_by_layer_type(hf, types, head_dim, {FULL: base, SLIDING: base}),
        )
