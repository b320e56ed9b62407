"""Translates a GGUF's metadata to the keys of a Hugging Face config.json."""

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.checkpoint.gguf_families import FAMILY_KEYS, MIXTURES
from quire.checkpoint.gguf_header import GGUFHeader
from quire.checkpoint.gguf_names import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from quire.config.values import whole_number

# GGUF architecture -> (Hugging Face class, model_type). Mistral is "llama" in GGUF: the computation is the same. So is
# Mixtral, whose class and experts gguf_families.py adds.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "granite": ("GraniteForCausalLM", "granite"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gpt2": ("GPT2LMHeadModel", "gpt2"),
    "gptneox": ("GPTNeoXForCausalLM", "gpt_neox"),
    "falcon": ("FalconForCausalLM", "falcon"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "chatglm": ("GlmForCausalLM", "glm"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}

# Names of end-of-turn tokens in chat models.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")
CONTROL, USER_DEFINED = 3, 4

MAX_ROPE_FACTORS = 4096  # one per pair of a head's elements

# The rope parameters of Llama 3.1 and later; GGUF stores only the resulting factors, see _llama3_rope_scaling.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def require_supported(header: GGUFHeader) -> None:
    if header.architecture not in ARCHITECTURES:
        raise ValueError(
            f"{header.path} has the GGUF architecture {header.architecture!r}, which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}. The model's safetensors folder may work."
        )
    if header.of_model("expert_count") and header.architecture not in MIXTURES:
        raise ValueError(
            f"{header.path} is a mixture of experts of architecture {header.architecture!r}, which is not supported; "
            f"supported: {', '.join(MIXTURES)}. The model's safetensors folder may work."
        )


def gguf_to_hf_config(header: GGUFHeader) -> dict[str, Any]:
    """An equivalent of the model's config.json."""
    require_supported(header)
    with _errors_name_the_file(header):
        return _config(header)


@contextmanager
def _errors_name_the_file(header: GGUFHeader) -> Iterator[None]:
    """Metadata may have any type; errors from a wrong one become a ValueError that names the file."""
    try:
        yield
    except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise ValueError(f"{header.path} has metadata of a wrong type ({error}); convert the model again") from error
    except ValueError as error:
        raise error if str(header.path) in str(error) else ValueError(f"{header.path}: {error}") from error


def _config(header: GGUFHeader) -> dict[str, Any]:
    architecture, model_type = ARCHITECTURES[header.architecture]
    heads = query_heads(header)
    hidden_size = _required_size(header, "embedding_length")
    values = header.values
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _required_size(header, "feed_forward_length"),
        "num_hidden_layers": _required_size(header, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads(header),
        "head_dim": int(_optional(header, "attention.key_length") or hidden_size // heads),
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": _required_size(header, "context_length"),
        # Stored as float32: rounding to 7 digits restores the original 1e-05 or 500000.0.
        "rms_norm_eps": float(f"{_norm_eps(header):.7g}"),
        "rope_theta": float(f"{_optional(header, 'rope.freq_base') or 10000.0:.7g}"),
        "rope_scaling": _rope_scaling(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "qkv")),
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": _torch_dtype(header),
    }
    window = _optional(header, "attention.sliding_window")
    if window:
        config |= {"sliding_window": int(window), "use_sliding_window": True}
    family = FAMILY_KEYS.get(header.architecture)
    return config | family(header, config) if family else config


def gguf_eos_token_ids(header: GGUFHeader) -> set[int]:
    """The declared ends of text and turn, and every end-of-turn token the vocabulary marks as one."""
    values = header.values
    with _errors_name_the_file(header):
        declared = (values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
        ids = {whole_number("the id of an end token", token, minimum=0) for token in declared if token is not None}
        types = values.get("tokenizer.ggml.token_type") or ()
        names = frozenset(END_OF_TURN)
        for token_id, (token, kind) in enumerate(zip(values.get("tokenizer.ggml.tokens") or (), types, strict=False)):
            if kind in (CONTROL, USER_DEFINED) and token in names:
                ids.add(token_id)
    return ids


def query_heads(header: GGUFHeader) -> int:
    return _same_in_every_layer(header, "attention.head_count", _required(header, "attention.head_count"))


def kv_heads(header: GGUFHeader) -> int:
    count = _optional(header, "attention.head_count_kv")
    return query_heads(header) if count is None else _same_in_every_layer(header, "attention.head_count_kv", count)


def _same_in_every_layer(header: GGUFHeader, key: str, count: Any) -> int:
    """GGUF may give one count per layer; no supported family has counts that differ."""
    counts = set(count) if isinstance(count, list) else {count}
    if len(counts) != 1 or not isinstance(count := counts.pop(), int) or count < 1:
        raise ValueError(
            f"{header.path}: {key} must be one positive number for all layers; other models do not load yet"
        )
    return count


def _norm_eps(header: GGUFHeader) -> float:
    """Of LayerNorm or RMSNorm, whichever the family has."""
    eps = _optional(header, "attention.layer_norm_epsilon")
    return float(_required(header, "attention.layer_norm_rms_epsilon") if eps is None else eps)


def _optional(header: GGUFHeader, key: str) -> Any:
    return header.of_model(key)


def _required(header: GGUFHeader, key: str) -> Any:
    value = _optional(header, key)
    if value is None:
        raise ValueError(f"{header.path} lacks the metadata {header.architecture}.{key}; convert the model again")
    return value


def _required_size(header: GGUFHeader, key: str) -> int:
    return whole_number(f"{header.path}: {header.architecture}.{key}", _required(header, key))


def _vocab_size(header: GGUFHeader) -> int:
    # From the embedding, which may have more rows than there are tokens.
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    return int(_optional(header, "vocab_size") or len(header.values.get("tokenizer.ggml.tokens", ())))


def _torch_dtype(header: GGUFHeader) -> str:
    elements: Counter[str] = Counter()
    for info in header.tensors.values():
        elements[info.type.name] += math.prod(info.shape)
    main = elements.most_common(1)[0][0] if elements else "BF16"
    return {"F32": "float32", "F16": "float16"}.get(main, "bfloat16")


def _rope_scaling(header: GGUFHeader) -> dict[str, Any] | None:
    if ROPE_FREQS in header.tensors:
        return _llama3_rope_scaling(header)
    if ROPE_LONG in header.tensors and ROPE_SHORT in header.tensors:
        return _longrope_scaling(header)
    kind = _optional(header, "rope.scaling.type")
    factor = _optional(header, "rope.scaling.factor") or _optional(header, "rope.scale_linear")
    if (kind in (None, "none") and not factor) or factor == 1.0:
        return None
    kind = kind or "linear"
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"{header.path} specifies rope scaling {kind!r}, which is not supported; supported: linear, yarn"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        optional = {
            "original_max_position_embeddings": _optional(header, "rope.scaling.original_context_length"),
            "beta_fast": _optional(header, "rope.scaling.yarn_beta_fast"),
            "beta_slow": _optional(header, "rope.scaling.yarn_beta_slow"),
        }
        scaling |= {name: value for name, value in optional.items() if value is not None}
    return scaling


def _longrope_scaling(header: GGUFHeader) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": _numbers(header, ROPE_LONG),
        "short_factor": _numbers(header, ROPE_SHORT),
    }
    attention_factor = _optional(header, "rope.scaling.attn_factor")
    return scaling if attention_factor is None else scaling | {"attention_factor": float(attention_factor)}


def _numbers(header: GGUFHeader, name: str) -> list[float]:
    info = header.tensors[name]
    if info.type.name != "F32":
        raise ValueError(f"{header.path}: {name} has type {info.type.name}; only F32 is supported")
    if info.nbytes > 4 * MAX_ROPE_FACTORS:
        raise ValueError(f"{header.path}: {name} has {info.nbytes // 4} factors; at most {MAX_ROPE_FACTORS} are read")
    with header.path.open("rb") as file:
        file.seek(info.offset)
        return array("f", file.read(info.nbytes)).tolist()


def _llama3_rope_scaling(header: GGUFHeader) -> dict[str, Any]:
    """The Llama 3 rope parameters behind the stored factors, accepted only if they reproduce every one of them."""
    stored = _numbers(header, ROPE_FREQS)
    theta = float(_optional(header, "rope.freq_base") or 10000.0)
    factor = round(max(stored), 4)
    for index, value in enumerate(stored):
        wavelength = 2 * math.pi * theta ** (index / len(stored))
        turns = LLAMA3_CONTEXT / wavelength
        blend = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
        expected = 1 / ((1 - blend) / factor + blend)
        if not math.isclose(value, expected, rel_tol=1e-3):
            raise ValueError(f"{header.path} has rope factors that are not those of Llama 3.1, which is not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }
