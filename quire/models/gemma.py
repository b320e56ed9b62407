"""Gemma 1, 2 and 3 (text), and EmbeddingGemma."""

from dataclasses import replace
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
from quire.models.encoder import PoolingModel
from quire.models.loading.transforms import plus_one
from quire.models.loading.weight_map import Rule, WeightMap

DEFAULTS = {"head_dim": 256, "tie_word_embeddings": True}  # omitted in configs
LAYER, OUR_LAYER = "model.layers.{i}", "layers.{i}"

# Gemma's norms multiply by 1 + weight.
GEMMA_WEIGHTS = DECODER_WEIGHTS.with_rules(
    Rule("model.norm.weight", "norm.weight", transform=plus_one),
    Rule(f"{LAYER}.input_layernorm.weight", f"{OUR_LAYER}.attention_norm.weight", transform=plus_one),
    Rule(f"{LAYER}.post_attention_layernorm.weight", f"{OUR_LAYER}.mlp_norm.weight", transform=plus_one),
)
GEMMA2_WEIGHTS = GEMMA_WEIGHTS.with_rules(
    Rule(f"{LAYER}.post_attention_layernorm.weight", f"{OUR_LAYER}.attention_out_norm.weight", transform=plus_one),
    Rule(f"{LAYER}.pre_feedforward_layernorm.weight", f"{OUR_LAYER}.mlp_norm.weight", transform=plus_one),
    Rule(f"{LAYER}.post_feedforward_layernorm.weight", f"{OUR_LAYER}.mlp_out_norm.weight", transform=plus_one),
)
GEMMA3_WEIGHTS = GEMMA2_WEIGHTS.with_rules(*(replace(rule, transform=plus_one) for rule in QK_NORMS))


def _configure(hf: dict[str, Any], **differences: Any) -> DecoderConfig:
    """What all versions share."""
    require(hf, "hidden_size")
    if hf.get("use_bidirectional_attention"):
        raise ValueError("the config sets use_bidirectional_attention; only causal attention is supported")
    activation = hf.get("hidden_activation") or hf.get("hidden_act") or "gelu"
    bias = bool(hf.get("attention_bias", False))
    return DecoderConfig.from_hf(
        DEFAULTS | hf,
        # The first releases say "gelu" and mean its approximation.
        activation="gelu_pytorch_tanh" if activation == "gelu" else activation,
        embed_scale=hf["hidden_size"] ** 0.5,
        qkv_bias=bias,
        o_bias=bias,
        **differences,
    )


class GemmaForCausalLM(DecoderModel):
    weights: ClassVar[WeightMap] = GEMMA_WEIGHTS

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return _configure(hf)


class Gemma2ForCausalLM(DecoderModel):
    """Norms also on the outputs of attention and MLP, soft-capped scores and logits, a window on every other layer."""

    weights: ClassVar[WeightMap] = GEMMA2_WEIGHTS

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return _configure(
            hf,
            windows=windows_of_types(layer_types(hf, full_every=2), hf.get("sliding_window", 4096)),
            post_norm=True,
            attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            attention_softcap=hf.get("attn_logit_softcapping", 50.0),
            logit_softcap=hf.get("final_logit_softcapping", 30.0),
        )


class Gemma3ForCausalLM(DecoderModel):
    """Gemma 2 with normed queries and keys in place of soft-capped scores; five of six layers have a window, and
    rotate by a base of their own."""

    weights: ClassVar[WeightMap] = GEMMA3_WEIGHTS

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        if hf.get("attn_logit_softcapping") is not None:
            raise ValueError("attn_logit_softcapping is not supported for Gemma 3, which has none; it must be null")
        types = layer_types(hf, full_every=hf.get("sliding_window_pattern") or 6)
        bases = {FULL: hf.get("rope_theta") or 1e6, SLIDING: hf.get("rope_local_base_freq") or 1e4}
        ropes = ropes_by_layer_type(hf, types, hf.get("head_dim") or DEFAULTS["head_dim"], bases)
        # max_position_embeddings is already the stretched length.
        positions = int(hf.get("max_position_embeddings") or 131072)
        return _configure(
            hf,
            windows=windows_of_types(types, hf.get("sliding_window", 4096)),
            ropes=tuple(replace(rope, max_positions=positions) for rope in ropes),
            post_norm=True,
            qk_norm="head",
            attention_scale=hf.get("query_pre_attn_scalar", 256) ** -0.5,
            logit_softcap=hf.get("final_logit_softcapping"),
        )


class Gemma3TextModel(PoolingModel):
    """EmbeddingGemma: Gemma 3 without a head, whose tokens see each other, in windows half before and half behind."""

    default_pooling: ClassVar[str] = "MEAN"
    weights: ClassVar[WeightMap] = GEMMA3_WEIGHTS.also_without("model.").ignoring("lm_head.weight")

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        causal = Gemma3ForCausalLM.configure(hf | {"use_bidirectional_attention": False})
        if not hf.get("use_bidirectional_attention"):
            return causal
        windows = tuple(window and window // 2 + 1 for window in causal.windows)
        return replace(causal, causal=False, windows=windows)
