"""dots.llm1."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS
from quire.models.decoder_config import FULL, SLIDING, DecoderConfig, choice, windows_of_types
from quire.models.loading.weight_map import WeightMap
from quire.models.moe import BIASED_SIGMOID, CORRECTION_BIAS, EXPERTS, SHARED_EXPERTS, Experts, MoEModel


class Dots1ForCausalLM(MoEModel):
    """Qwen3's attention, with DeepSeek-V3's experts."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*EXPERTS, *SHARED_EXPERTS, CORRECTION_BIAS, *QK_NORMS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        window, first = hf.get("sliding_window", 4096), hf.get("max_window_layers") or 62
        layers = range(hf["num_hidden_layers"])
        types = hf.get("layer_types") or [SLIDING if window and i >= first else FULL for i in layers]
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            hf, windows=windows_of_types(types, window), qk_norm="head", qkv_bias=bias, o_bias=bias
        )

    @classmethod
    def configure_experts(cls, hf: dict[str, Any]) -> Experts:
        choice(hf, "scoring_func", "noaux_tc", "sigmoid")  # the first is what is published, for the second
        routing = {**BIASED_SIGMOID, "renormalize": bool(hf.get("norm_topk_prob", False))}
        return Experts.from_deepseek(hf, routing, correction_bias=True)
