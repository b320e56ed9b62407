"""ERNIE 4.5 with experts."""

from typing import Any, ClassVar

from quire.config.values import finite_number
from quire.models.decoder import DECODER_WEIGHTS
from quire.models.decoder_config import DecoderConfig, renamed
from quire.models.loading.transforms import halves_from_pairs
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.moe import EXPERTS, SHARED_EXPERTS, Experts, MoEModel

MLP = "model.layers.{i}.mlp"
MTP = (
    "model.mtp_block.{rest}",
    "model.mtp_emb_norm.{rest}",
    "model.mtp_hidden_norm.{rest}",
    "model.mtp_linear_proj.{rest}",
)


class Ernie4_5_MoeForCausalLM(MoEModel):
    """Rotary pairs are interleaved; a bias corrects the choice by softmax. Prediction layers are ignored."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        *EXPERTS,
        *SHARED_EXPERTS,
        Rule(f"{MLP}.moe_statics.e_score_correction_bias", "layers.{i}.mlp.correction_bias"),
        Rule(f"{MLP}.gate.moe_statics.e_score_correction_bias", "layers.{i}.mlp.correction_bias"),
    ).ignoring(*MTP)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        if hf.get("use_bias"):
            raise ValueError("use_bias is true; ERNIE's linears are supported without biases only")
        defaults = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
        return DecoderConfig.from_hf(defaults | hf)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        hf = renamed(hf, num_experts="moe_num_experts", num_experts_per_tok="moe_k")
        least = finite_number("moe_norm_min", hf.get("moe_norm_min", 1e-12), above=0.0, maximum=1.0)
        hf = hf | {"n_shared_experts": hf.get("moe_num_shared_experts", 2)}
        return Experts.from_deepseek(hf, {"epsilon": least}, correction_bias=True)

    def is_sparse(self, layer: int) -> bool:
        first, last = self.hf.get("moe_layer_start_index", 1), self.hf.get("moe_layer_end_index", -1)
        last = self.config.num_layers - 1 if last == -1 else last
        return first <= layer <= last and (layer + 1) % (self.hf.get("moe_layer_interval") or 1) == 0

    def family_weights(self) -> WeightMap:
        order = halves_from_pairs(self.config.head_dim)
        return self.weights.with_rules(
            *(
                Rule(f"model.layers.{{i}}.self_attn.{x}_proj.{{p}}", "layers.{i}.self_attn.qkv_proj.{p}", x, order)
                for x in "qk"
            )
        )
