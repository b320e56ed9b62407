from typing import Any, ClassVar

from quire.models.decoder import DECODER_WEIGHTS, DecoderModel
from quire.models.decoder_config import DecoderConfig, windows_by_layer_type
from quire.models.weight_map import Rule, WeightMap

QK_NORMS = (
    Rule("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    Rule("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
)


class Qwen3ForCausalLM(DecoderModel):
    """Queries and keys normed per head; the head size stands on its own."""

    weights: ClassVar[WeightMap] = WeightMap(DECODER_WEIGHTS.rules + QK_NORMS, DECODER_WEIGHTS.ignored)

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        return DecoderConfig.from_hf(
            hf, windows=windows_by_layer_type(hf), head_dim=128, qk_norm=True, qkv_bias=bias, o_bias=bias
        )
