"""Family-specific config keys from a GGUF's metadata."""

from collections.abc import Callable
from typing import Any

from quire.checkpoint.gguf_header import GGUFHeader

Config = dict[str, Any]

# llama.cpp has these patterns in its code, not in the file.
COHERE2_FULL_EVERY = 4
GEMMA3_FULL_EVERY = 6
OLMO3_FULL_EVERY = 4
# The 27B models scale queries by hidden_size / heads, not by head_dim. As in llama.cpp, they are recognized by their
# number of layers.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _rotary_part(header: GGUFHeader, config: Config) -> Config:
    rotated = header.of_model("rope.dimension_count")
    return {} if rotated is None else {"partial_rotary_factor": int(rotated) / config["head_dim"]}


def _gpt_neox(header: GGUFHeader, config: Config) -> Config:
    parallel = bool(header.of_model("use_parallel_residual"))
    return {"hidden_act": "gelu", "use_parallel_residual": parallel} | _rotary_part(header, config)


def _falcon(header: GGUFHeader, config: Config) -> Config:
    has_two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    return {
        "num_kv_heads": config["num_key_value_heads"],
        "new_decoder_architecture": True,  # any number of KV heads; the 7B's one is a case of it
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "ffn_hidden_size": config["intermediate_size"],
        "bias": config["attention_bias"],
    }


def _starcoder2(header: GGUFHeader, config: Config) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": config["attention_bias"]}


def _cohere(header: GGUFHeader, config: Config) -> Config:
    return {
        "logit_scale": header.of_model("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _cohere2(header: GGUFHeader, config: Config) -> Config:
    return _cohere(header, config) | {"sliding_window_pattern": COHERE2_FULL_EVERY}


def _gemma(header: GGUFHeader, config: Config) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(header: GGUFHeader, config: Config) -> Config:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    given = {name: header.of_model(name) for name in caps}
    is_27b = config["num_hidden_layers"] == GEMMA_27B_LAYERS[header.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return (
        _gemma(header, config)
        | {"query_pre_attn_scalar": scalar}
        | {name: float(cap) for name, cap in given.items() if cap is not None}
    )


def _gemma3(header: GGUFHeader, config: Config) -> Config:
    return (
        _gemma2(header, config)
        | {"model_type": "gemma3_text", "rope_local_base_freq": float(header.of_model("rope.freq_base_swa") or 10000.0)}
        | _layer_types(header, config, GEMMA3_FULL_EVERY)
    )


def _layer_types(header: GGUFHeader, config: Config, full_every: int) -> Config:
    """From the file's pattern: a flag per layer for a window, or the period of layers without one."""
    pattern, layers = header.of_model("attention.sliding_window_pattern") or full_every, config["num_hidden_layers"]
    windowed = [(i + 1) % pattern != 0 for i in range(layers)] if isinstance(pattern, int) else pattern[:layers]
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in windowed]}


def _phi3(header: GGUFHeader, config: Config) -> Config:
    original = header.of_model("rope.scaling.original_context_length") or config["max_position_embeddings"]
    return {"original_max_position_embeddings": int(original)} | _rotary_part(header, config)


def _olmo2(header: GGUFHeader, config: Config) -> Config:
    """OLMo 3 has the same architecture name; only it has windows."""
    if not config.get("sliding_window"):
        return {}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return olmo3 | _layer_types(header, config, OLMO3_FULL_EVERY)


def _granite(header: GGUFHeader, config: Config) -> Config:
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    given = {ours: header.of_model(theirs) for ours, theirs in names.items()}
    if given["attention_multiplier"] is None:
        given["attention_multiplier"] = config["head_dim"] ** -0.5
    return {name: float(f"{value:.7g}") for name, value in given.items() if value is not None}


def _experts(header: GGUFHeader) -> Config:
    """Sizes from the tensors: not every converter has written them."""
    down = _first(header, "ffn_down_exps.weight")
    if down is None or len(down) != 3:
        raise ValueError(
            "it has no experts (ffn_down_exps) of three dimensions, as its metadata says; convert the model again"
        )
    return {
        "num_experts": down[0],
        "num_experts_per_tok": header.of_model("expert_used_count"),
        "moe_intermediate_size": down[2],
    }


def _first(header: GGUFHeader, kind: str) -> tuple[int, ...] | None:
    """The shape of the first layer's tensor that has one of that kind."""
    return next((info.shape for name, info in header.tensors.items() if name.endswith(f".{kind}")), None)


def _llama(header: GGUFHeader, config: Config) -> Config:
    """Mixtral, if there are experts."""
    if not header.of_model("expert_count"):
        return {}
    experts = _experts(header)
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return mixtral | experts | {"intermediate_size": experts["moe_intermediate_size"]}


def _qwen_moe(header: GGUFHeader, config: Config) -> Config:
    layers = min(config["num_hidden_layers"], len(header.tensors))  # others have no tensors
    dense = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in header.tensors]
    shared = _first(header, "ffn_down_shexp.weight")
    normed = header.of_model("expert_weights_norm")
    return _experts(header) | {
        "mlp_only_layers": dense,
        "shared_expert_intermediate_size": shared[-1] if shared else 0,
        # llama.cpp has these in its code.
        "norm_topk_prob": header.architecture == "qwen3moe" if normed is None else bool(normed),
    }


def _olmoe(header: GGUFHeader, config: Config) -> Config:
    experts, clip = _experts(header), header.of_model("attention.clamp_kqv")
    return experts | {"intermediate_size": experts["moe_intermediate_size"], "clip_qkv": clip, "norm_topk_prob": False}


def _granite_moe(header: GGUFHeader, config: Config) -> Config:
    experts = _experts(header)
    stored = {"intermediate_size": experts["moe_intermediate_size"], "experts_checkpoint": "per_expert"}
    return _granite(header, config) | experts | stored


def _gpt_oss(header: GGUFHeader, config: Config) -> Config:
    experts = _experts(header)
    keys = {"intermediate_size": experts["moe_intermediate_size"], "experts_checkpoint": "per_expert"}
    if config["rope_scaling"]:
        keys["rope_scaling"] = config["rope_scaling"] | {"truncate": False}
    return experts | keys


MIXTURES = ("llama", "qwen2moe", "qwen3moe", "olmoe", "granitemoe", "gpt-oss")
FAMILY_KEYS: dict[str, Callable[[GGUFHeader, Config], Config]] = {
    "chatglm": _rotary_part,
    "cohere2": _cohere2,
    "command-r": _cohere,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _rotary_part,
    "gptneox": _gpt_neox,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "llama": _llama,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "starcoder2": _starcoder2,
}
