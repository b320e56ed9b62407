"""OLMoE."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS
from quire.models.decoder_config import DecoderConfig
from quire.models.loading.weight_map import WeightMap
from quire.models.moe import EXPERTS, Experts, MoEModel


class OlmoeForCausalLM(MoEModel):
    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*EXPERTS, *QK_NORMS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        hf = {"rms_norm_eps": 1e-5} | hf
        return DecoderConfig.from_hf(hf, qk_norm="width", qkv_clip=hf.get("clip_qkv"), qkv_bias=bias, o_bias=bias)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        return Experts.from_hf(hf, routing={"renormalize": bool(hf.get("norm_topk_prob", False))})
