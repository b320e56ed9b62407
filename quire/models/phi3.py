"""Phi-3, Phi-3.5 and Phi-4."""

from typing import Any

from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig, ModuleNames, require

NAMES = ModuleNames(qkv=("qkv_proj",), up=("gate_up_proj",))


class Phi3ForCausalLM(DecoderModel):
    """Phi-3, Phi-3.5, Phi-4: Llama with q, k, v in one tensor, gate and up in another."""

    @classmethod
    def configure(cls, hf: dict[str, Any]) -> DecoderConfig:
        require(hf, "num_hidden_layers")
        hf = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | hf
        window = hf.get("sliding_window")
        if window is not None and window >= hf["max_position_embeddings"]:
            window = None  # as in the long-context releases: wider than any sequence
        return DecoderConfig.from_hf(_with_longrope(hf), windows=(window,) * hf["num_hidden_layers"], names=NAMES)


def _with_longrope(hf: dict[str, Any]) -> dict[str, Any]:
    """The first releases call it "su" or "yarn"."""
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(key) or {}
    kind = given.get("rope_type") or given.get("type")
    return hf | {key: given | {"rope_type": "longrope"}} if kind in ("su", "yarn") else hf
