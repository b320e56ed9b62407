"""Tiny random models of each family, saved as users' checkpoints are, and transformers' own greedy output for them."""

from dataclasses import dataclass
from pathlib import Path

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

FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-mixed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
}

PROMPT_LENGTHS = (1, 5, 16, 17, 33, 50, 64, 100)
NUM_TOKENS = 64


@dataclass
class Reference:
    """Greedy continuation of each prompt and the log-probability of each of its tokens."""

    path: str
    prompts: list[list[int]]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    num_groups: int  # of the KV cache: one per kind of attention


def save_tiny(family: str, folder: Path, **overrides: object):
    import transformers

    name, differences = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **differences, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)  # initialised to zero, they would test nothing
    model.save_pretrained(folder)
    return model


def prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, vocab: int = COMMON["vocab_size"]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]


def make_reference(family: str, folder: Path) -> Reference:
    model = save_tiny(family, folder)
    reference = Reference(str(folder), prompts(), [], [], num_groups=2 if family == "qwen2-mixed" else 1)
    for prompt in reference.prompts:
        tokens, logprobs = greedy(model, prompt, NUM_TOKENS)
        reference.token_ids.append(tokens)
        reference.logprobs.append(logprobs)
    return reference


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
