"""GLM-4.5 and 4.6."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS
from quire.models.decoder_config import DecoderConfig
from quire.models.loading.weight_map import WeightMap
from quire.models.moe import BIASED_SIGMOID, CORRECTION_BIAS, EXPERTS, SHARED_EXPERTS, Experts, MoEModel


class Glm4MoeForCausalLM(MoEModel):
    """Half of each head is rotated; experts are DeepSeek-V3's. Prediction layers after the last are ignored."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*EXPERTS, *SHARED_EXPERTS, CORRECTION_BIAS, *QK_NORMS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        hf = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5} | hf
        bias, qk_norm = bool(hf.get("attention_bias", False)), "head" if hf.get("use_qk_norm") else None
        return DecoderConfig.from_hf(hf, qkv_bias=bias, qk_norm=qk_norm)

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        hf = {"n_shared_experts": 1, "first_k_dense_replace": 1} | hf
        routing = {**BIASED_SIGMOID, "renormalize": bool(hf.get("norm_topk_prob", True))}
        return Experts.from_deepseek(hf, routing, correction_bias=True)

    def family_weights(self) -> WeightMap:
        return self.weights.ignoring_layers_from(self.config.num_layers)
