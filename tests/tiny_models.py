"""Tiny random models of each family, saved as users' checkpoints are, and transformers' own greedy output for them."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # far-apart logits: greedy choices do not hang on rounding
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5] * 4, "long_factor": [4.0, 6.0] * 4, "factor": 4.0}
GEMMA2 = {
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 10.0,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
    "attention_bias": True,
}

ALL_KV = {"num_key_value_heads": 4}
FALCON_GROUPS = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}
FALCON_RW = {"alibi": True, "bias": True, "parallel_attn": False, "multi_query": False, "ffn_hidden_size": 96}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 32,
    "sliding_window": 24,
    "rope_parameters": YARN | {"truncate": False},
}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
}
ERNIE_EXPERTS = {
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "moe_num_shared_experts": 2,
    "moe_layer_interval": 2,
}

# All sizes differ, and none divides the others.
LATENT = ALL_KV | {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20}

# Experts in groups; both of YaRN's scales, which differ.
DEEPSEEK = LATENT | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
}
KIMI = DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}

FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-mixed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "gemma2": ("Gemma2Config", GEMMA2),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 24, "sliding_window_pattern": 3},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24, "partial_rotary_factor": 0.75}),
    "phi3-longrope": ("Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", {"sliding_window": 24}),
    "granite": ("GraniteConfig", GRANITE),
    "smollm3": ("SmolLM3Config", {}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"use_sliding_window": True, "sliding_window": 24, "no_rope_layer_interval": 2},
    ),
    "gpt2": ("GPT2Config", ALL_KV | {"n_inner": 96}),
    "gpt2-unscaled": ("GPT2Config", ALL_KV | {"n_inner": 96, "scale_attn_weights": False}),
    "gpt-neox": ("GPTNeoXConfig", ALL_KV),
    "gpt-neox-sequential": ("GPTNeoXConfig", ALL_KV | {"use_parallel_residual": False, "rotary_pct": 0.5}),
    "opt": ("OPTConfig", ALL_KV | {"ffn_dim": 96, "init_std": 0.15}),
    "falcon-7b": ("FalconConfig", {"ffn_hidden_size": 96}),
    "falcon-40b": ("FalconConfig", FALCON_GROUPS),
    "falcon-11b": ("FalconConfig", FALCON_GROUPS | {"num_ln_in_parallel_attn": 1}),
    "falcon-rw": ("FalconConfig", FALCON_RW),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 24}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "cohere-qk-norm": ("CohereConfig", {"use_qk_norm": True, "logit_scale": 0.25, "attention_bias": True}),
    "cohere2": ("Cohere2Config", {"sliding_window": 24, "logit_scale": 0.25}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "minicpm3": ("MiniCPM3Config", LATENT | {"q_lora_rank": 28, "dim_model_base": 32, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2MoeConfig", EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", EXPERTS | {"head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmoe": ("OlmoeConfig", EXPERTS | {"clip_qkv": 0.8}),
    "granite-moe": ("GraniteMoeConfig", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "deepseek-v2-lite": ("DeepseekV2Config", DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek-v2": ("DeepseekV2Config", DEEPSEEK | {"q_lora_rank": 28, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK | {"q_lora_rank": 28}),
    "deepseek-v32": (
        "DeepseekV32Config",
        DEEPSEEK | {"q_lora_rank": 28, "index_topk": 24, "index_n_heads": 6, "index_head_dim": 16},
    ),
    "glm5": (
        "GlmMoeDsaConfig",
        KIMI | {"q_lora_rank": 28, "index_topk": 24, "index_n_heads": 6, "index_head_dim": 16},
    ),
    "kimi-k2": ("DeepseekV3Config", KIMI | {"q_lora_rank": 28}),
    "moonlight": ("DeepseekV3Config", KIMI | {"q_lora_rank": None, "rope_interleave": False}),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", KIMI | {"q_lora_rank": 28, "rope_parameters": {"rope_theta": 5000.0}}),
    "gpt-oss": ("GptOssConfig", GPT_OSS),
    "glm4-moe": ("Glm4MoeConfig", DEEPSEEK_EXPERTS | {"head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-air": ("Glm4MoeConfig", DEEPSEEK_EXPERTS | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2}),
    "dots1": ("Dots1Config", DEEPSEEK_EXPERTS | {"head_dim": 32, "sliding_window": 24, "max_window_layers": 2}),
    "ernie-moe": ("Ernie4_5_MoeConfig", ERNIE_EXPERTS),
    "minimax-m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
    ),
}

# Those that the whole matrix of settings is tried on in every run of the tests: without windows, with, and with both
# kinds of layers; on the others by `make test-models`.
CORE = ("llama", "mistral", "qwen2-mixed")

PROMPT_LENGTHS = (1, 5, 16, 17, 33, 50, 64, 100)
NUM_TOKENS = 64


@dataclass
class Reference:
    """Greedy continuation of each prompt and the log-probability of each of its tokens."""

    path: str
    prompts: list[list[int]]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    num_groups: int  # of the KV cache


class Sorted(NamedTuple):
    values: torch.Tensor
    indices: torch.Tensor


def earliest_topk(scores: torch.Tensor, k: int, dim: int = -1) -> Sorted:
    """Of equal scores the earlier: where no head of DeepSeek-V3.2's index likes a token its score is 0 exactly, and
    which of these torch.topk takes depends on the shape."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return Sorted(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def of_transformers(name: str) -> Any:
    """A class; the test is skipped where transformers is too old, or too new, for it."""
    import transformers

    if not hasattr(transformers, name):
        import pytest

        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def save_tiny(family: str, folder: Path, **overrides: object):
    import transformers

    name, differences = FAMILIES[family]
    config = of_transformers(name)(**{**COMMON, **differences, **overrides})
    torch.manual_seed(0)
    # transformers' eager attention adds Falcon's ALiBi twice.
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)  # initialised to zero, they would test nothing
            elif "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.2)  # nor would norms that are all alike
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.forward = patch.object(torch.Tensor, "topk", earliest_topk)(module.forward)
    model.save_pretrained(folder)
    return model


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, vocab: int = COMMON["vocab_size"]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]


def make_reference(
    family: str, folder: Path, lengths: tuple[int, ...] = PROMPT_LENGTHS, num_tokens: int = NUM_TOKENS
) -> Reference:
    model = save_tiny(family, folder)
    reference = Reference(str(folder), prompts(lengths), [], [], num_groups=num_groups(model.config.to_dict()))
    for prompt in reference.prompts:
        tokens, logprobs = greedy(model, prompt, num_tokens)
        reference.token_ids.append(tokens)
        reference.logprobs.append(logprobs)
    return reference


def num_groups(hf: dict) -> int:
    """Of the KV cache, by our own reading of the config: one or more per kind of attention."""
    from quire.messages.kv_cache import group_length
    from quire.models.registry import model_class

    layers = list(Counter(model_class(hf).configure(hf).windows).values())
    return sum(math.ceil(count / group_length(layers)) for count in layers)


@torch.no_grad()
def greedy(model, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Without a cache for the first and with transformers' cache for the rest, as its generate() does."""
    tokens: list[int] = []
    logprobs: list[float] = []
    ids, past = torch.tensor([prompt]), None
    for _ in range(count):
        out = model(ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        scores = out.logits[0, -1].float().log_softmax(-1)
        token = int(scores.argmax())
        tokens.append(token)
        logprobs.append(float(scores[token]))
        ids = torch.tensor([[token]])
    return tokens, logprobs
