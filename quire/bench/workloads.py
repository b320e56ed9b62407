"""The fixed workloads behind the reference numbers: random token ids, the same on every machine and day.

The order of random draws is part of a workload: changing it changes every later prompt.
"""

import random
import zlib
from dataclasses import dataclass, replace
from typing import Any

FIRST_TOKEN_ID = 100  # below it are control tokens in common vocabularies
CPU_TOKEN_ID_LIMIT = 49_000
GPU_UNUSED_TOKEN_IDS = 1_000  # at the end of the vocabulary, where reserved tokens are


@dataclass(frozen=True)
class Shape:
    """Equal requests: `common` tokens shared by all, then `own` tokens each, then `output` generated ones."""

    requests: int
    own: int
    output: int
    common: int = 0


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


CPU_SHAPES = {
    "latency": Shape(requests=1, own=128, output=128),
    "throughput": Shape(requests=64, own=128, output=128),
    "prefix": Shape(requests=64, common=1024, own=32, output=32),
    "prefill": Shape(requests=8, own=1024, output=1),
}
# Overrides for Qwen3-0.6B, whose full throughput workload would take minutes on two cores.
QWEN_SHAPES = {"throughput": replace(CPU_SHAPES["throughput"], requests=16, output=64)}

GPU_SHAPES = {
    "b1": Shape(requests=1, own=128, output=257),
    "t512_128": Shape(requests=1024, own=512, output=128),
    "prefill": Shape(requests=64, own=2048, output=1),
    "prefix": Shape(requests=256, common=4096, own=64, output=64),
    "ctx6k": Shape(requests=32, own=6000, output=129),
}


def cpu_workload(name: str, repetition: int, *, qwen: bool = False) -> Workload:
    """A CPU workload; every repetition has new prompts."""
    shapes = CPU_SHAPES | QWEN_SHAPES if qwen else CPU_SHAPES
    return random_workload(name, repetition, _lookup(shapes, name))


def random_workload(name: str, repetition: int, shape: Shape, token_id_limit: int = CPU_TOKEN_ID_LIMIT) -> Workload:
    """Prompts of any shape, drawn like those of the CPU workload `name`."""
    rng = random.Random(zlib.crc32(f"{name}/{repetition}".encode()))
    return _draw(rng, shape, token_id_limit)


def gpu_workload(name: str, vocab_size: int) -> Workload:
    if name == "nano":
        return _nano()
    return _draw(random.Random(0), _lookup(GPU_SHAPES, name), vocab_size - GPU_UNUSED_TOKEN_IDS)


def _draw(rng: random.Random, shape: Shape, token_id_limit: int) -> Workload:
    if token_id_limit <= FIRST_TOKEN_ID:
        raise ValueError(f"token ids are drawn from {FIRST_TOKEN_ID} up; the limit is {token_id_limit}, raise it")

    def ids(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN_ID, token_id_limit) for _ in range(count)]

    common = ids(shape.common)
    prompts = [common + ids(shape.own) for _ in range(shape.requests)]
    return Workload(prompts, [shape.output] * shape.requests)


def _nano() -> Workload:
    """256 requests of uneven lengths; each prompt draws its length, then its ids, and the output lengths come last."""
    rng = random.Random(0)

    def length() -> int:
        return rng.randint(100, 1024)

    prompts = [[rng.randint(0, 10_000) for _ in range(length())] for _ in range(256)]
    return Workload(prompts, [length() for _ in range(256)])


def _lookup(shapes: dict[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise ValueError(f"unknown workload {name!r}; allowed: {', '.join(shapes)}")
    return shapes[name]


# The models of the reference numbers as config.json would describe them; their weights are random.
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "attention_bias": False,
    },
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "vocab_size": 102400,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
    },
    # DeepSeek-V3 cut to three dense layers and three with experts, in fp8 by blocks as it is published.
    "deepseek-v3-6-layers": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    },
}
# For testing the card itself, in seconds on any machine. Its vocabulary holds the ids that the workload `nano` draws.
TINY_SHAPE = MODEL_SHAPES["qwen3-0.6b"] | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 12288,
}


def shrunk(workload: Workload) -> Workload:
    """The same kind of workload at a fraction of the work: few requests, short prompts, some tokens each."""
    keep = max(1, len(workload.prompts) // 64)
    prompts = [prompt[-max(4, len(prompt) // 32) :] for prompt in workload.prompts[:keep]]
    return Workload(prompts, [1 + (length - 1) // 32 for length in workload.output_lens[:keep]])
