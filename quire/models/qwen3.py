"""Qwen 3, dense."""

from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, QK_NORMS, DecoderModel
from quire.models.decoder_config import DecoderConfig, windows_by_layer_type
from quire.models.loading.weight_map import WeightMap


class Qwen3ForCausalLM(DecoderModel):
    """Queries and keys normed per head; head_dim is independent of hidden_size."""

    weights: ClassVar[WeightMap] = DECODER_WEIGHTS.with_rules(*QK_NORMS)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            hf, windows=windows_by_layer_type(hf), head_dim=128, qk_norm="head", qkv_bias=bias, o_bias=bias
        )
