"""MiniMax-M2."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS
from quire.models.decoder_config import DecoderConfig
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.mixtral import BLOCK, MIXTRAL_EXPERTS
from quire.models.moe import Experts, MoEModel


class MiniMaxM2ForCausalLM(MoEModel):
    """Mixtral's experts, chosen by sigmoids with a bias, and norms over all queries and all keys."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(
        *MIXTRAL_EXPERTS,
        *QK_NORMS,
        Rule(f"{BLOCK}.e_score_correction_bias", "layers.{i}.mlp.correction_bias"),
    )

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        hf = {"rope_theta": 5e6} | hf
        if hf.get("rotary_dim") and hf.get("head_dim"):
            hf = {"partial_rotary_factor": hf["rotary_dim"] / hf["head_dim"]} | hf
        if hf.get("qk_norm_type", "per_layer") != "per_layer":
            raise ValueError(f"qk_norm_type is {hf['qk_norm_type']!r}; supported: per_layer")
        return DecoderConfig.from_hf(hf, qk_norm="width" if hf.get("use_qk_norm", True) else None)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        routing = {"scores": "sigmoid"}
        return Experts.from_hf(
            hf, routing=routing, correction_bias=True, module="block_sparse_moe", names=("w1", "w3", "w2")
        )
