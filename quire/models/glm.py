"""GLM-4 and GLM-4-0414."""

from typing import Any

from quire.models.decoder import DECODER_WEIGHTS, DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames
from quire.models.loading.transforms import halves_from_pairs, of_queries_and_keys
from quire.models.loading.weight_map import Rule, WeightMap

LAYER, OURS = "model.layers.{i}", "layers.{i}"
DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5}


class GlmForCausalLM(DecoderModel):
    """GLM-4 9B: Llama with gate and up in one tensor, half of each head rotated, in interleaved pairs."""

    def family_weights(self) -> WeightMap:
        c = self.config
        rope = c.ropes[0]
        assert rope is not None
        order = halves_from_pairs(c.head_dim, rope.rotary_dim)
        fused = of_queries_and_keys(order, (c.num_heads + c.num_kv_heads) * c.head_dim)
        return DECODER_WEIGHTS.with_rules(
            *(Rule(f"{LAYER}.self_attn.{x}_proj.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", x, order) for x in "qk"),
            Rule(f"{LAYER}.self_attn.qkv_proj.{{p}}", f"{OURS}.self_attn.qkv_proj.{{p}}", ("q", "k", "v"), fused),
            Rule(f"{LAYER}.post_self_attn_layernorm.weight", f"{OURS}.attention_out_norm.weight"),
            Rule(f"{LAYER}.post_mlp_layernorm.weight", f"{OURS}.mlp_out_norm.weight"),
        )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return cls.configure_with(hf)

    @classmethod
    def configure_with(cls, hf: dict[str, Any], **differences: Any) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", True))
        return DecoderConfig.from_hf(
            DEFAULTS | hf, names=ModuleNames(up=("gate_up_proj",)), qkv_bias=bias, **differences
        )


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414: norms also on the outputs of attention and MLP."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        return cls.configure_with(hf, post_norm=True)
