"""SmolLM3."""

from dataclasses import replace
from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import FULL, SLIDING, DecoderConfig, windows_of_types


class SmolLM3ForCausalLM(DecoderModel):
    """Llama in which every fourth layer has no rotary embedding."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        bias = bool(hf.get("attention_bias", False))
        config = DecoderConfig.from_hf(
            {"tie_word_embeddings": True, "rope_theta": 2e6} | hf,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=bool(hf.get("mlp_bias", False)),
        )
        rotated = _rotated(hf, config.num_layers)
        window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
        types = hf.get("layer_types") or [FULL if rotates or not window else SLIDING for rotates in rotated]
        if len(types) != config.num_layers:
            raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {config.num_layers}")
        ropes = tuple(rope if rotates else None for rope, rotates in zip(config.ropes, rotated, strict=True))
        return replace(config, windows=windows_of_types(types, window), ropes=ropes)


def _rotated(hf: dict[str, Any], layers: int) -> list[bool]:
    given = hf.get("no_rope_layers")  # 1 for layers with a rotary embedding
    if given is None:
        interval = hf.get("no_rope_layer_interval") or 4
        return [(i + 1) % interval != 0 for i in range(layers)]
    if len(given) < layers:
        raise ValueError(f"no_rope_layers names {len(given)} layers, num_hidden_layers is {layers}")
    return [bool(rotates) for rotates in given[:layers]]
