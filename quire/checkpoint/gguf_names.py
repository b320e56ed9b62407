"""GGUF tensor names to Hugging Face names, for the decoder families that llama.cpp names alike."""

import re

# The rope factors of Llama 3.1 and later: not a weight but configuration, see gguf_config.
ROPE_FREQS = "rope_freqs.weight"

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a tensor; None for a name that no supported family has."""
    layer = _LAYER_NAME.fullmatch(gguf_name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{layer[1]}.{_LAYER[layer[2]]}.{layer[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP and kind in ("weight", "bias") else None
