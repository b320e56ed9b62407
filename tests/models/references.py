"""Tiny random models of every family, as transformers builds them."""

from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 16.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
# As long as the original context, so that transformers never switches to the long factors.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 5, "use_sliding_window": True}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-longrope": ("Llama", {"rope_parameters": LONGROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed-windows": ("Qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen2-layer-types": ("Qwen2", WINDOW | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biased": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-mixed-windows": ("Qwen3", WINDOW | {"head_dim": 16, "max_window_layers": 2}),
}


def build_reference(family: str, **overrides: Any) -> Any:
    import transformers

    name, differences = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SMALL | differences | overrides))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Fresh biases are 0 and norms 1, which would hide a mistake in loading them.
            scale = 0.3 if "norm" in parameter_name or "bias" in parameter_name else 0.08
            parameter.add_(torch.randn_like(parameter) * scale)
    return model
