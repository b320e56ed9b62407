"""GGUF tensor names to Hugging Face names.

llama.cpp has one set of names for all families, and stores fused tensors in the order q, k, v. So all map to Llama's
names, which every decoder here accepts (models/decoder.py), whatever the names in the family's own checkpoints, and
those of mixtures to Qwen's. Names that differ are in `_DIFFERENT`. Tensors of all experts have `{e}` in their names
where each expert is to be a tensor of its own.
"""

import re

# The rope factors of Llama 3.1 and later, and LongRoPE's: not weights but configuration, see gguf_config.
ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
NO_WEIGHTS = (ROPE_FREQS, ROPE_LONG, ROPE_SHORT)

_TOP = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GLM = {"ffn_up": "mlp.gate_up_proj"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_SANDWICHED = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_DIFFERENT: dict[str, dict[str, str]] = {
    "chatglm": _GLM,
    # attn_norm is the MLP's norm where there are two.
    "falcon": {"attn_norm_2": "ln_attn"},
    "gemma2": _SANDWICHED,
    "gemma3": _SANDWICHED,
    "glm4": _GLM | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "gpt-oss": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    "olmo2": _POST_NORMS,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def hf_name(gguf_name: str, architecture: str = "llama") -> str | None:
    """The Hugging Face name of a tensor; None for a name that no supported family has."""
    names = _LAYER | _DIFFERENT.get(architecture, {})
    layer = _LAYER_NAME.fullmatch(gguf_name)
    if layer and layer[2] in names:
        return f"model.layers.{layer[1]}.{names[layer[2]]}.{layer[3]}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP and kind in ("weight", "bias") else None
