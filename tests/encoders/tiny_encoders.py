"""Tiny random encoders of each family, saved as users' checkpoints are, and transformers' results for them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny_models import of_transformers

LENGTHS = (1, 2, 7, 16, 33, 60, 100, 128)
COMMON = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_labels": 3,
}
DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 4}
GEMMA = {
    "head_dim": 32,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "use_bidirectional_attention": True,
}
# Class without its last word, differences of the config.
FAMILIES = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTILBERT),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", {"local_attention": 24, "cls_token_id": 2, "sep_token_id": 3}),
    "modernbert-mean": ("ModernBert", {"classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True}),
    "nomic": ("NomicBert", {}),
    "gte": ("Gte", {}),
    "gte-without-types": ("Gte", {"type_vocab_size": 0}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2}),
    "embedding-gemma": ("Gemma3Text", GEMMA),
}


@dataclass
class EncoderReference:
    path: str
    prompts: list[list[int]]
    hidden: list[torch.Tensor]  # [tokens, hidden]
    logits: list[torch.Tensor] | None  # of a head


def prompts(vocab: int = 211) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, vocab, (length,), generator=generator).tolist() for length in LENGTHS]


def save_tiny_encoder(family: str, folder: Path, task: str = "Model"):
    """`task`: the end of the class's name, as in BertForMaskedLM."""
    prefix, differences = FAMILIES[family]
    config, kind = of_transformers(f"{prefix}Config"), of_transformers(prefix + task)
    torch.manual_seed(0)
    model = kind(config(**(COMMON | differences))).eval()
    with torch.no_grad():
        for weight in model.parameters():  # transformers starts biases with zero, norms with one
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    return model


def make_reference(family: str, folder: Path, task: str = "Model") -> EncoderReference:
    model = save_tiny_encoder(family, folder, task)
    given = prompts()
    with torch.inference_mode():
        results = [model(torch.tensor([ids]), output_hidden_states=True) for ids in given]
        base = model.base_model
        hidden = [base(torch.tensor([ids])).last_hidden_state[0].float() for ids in given]
    logits = [r.logits[0].float() for r in results] if "Classification" in task else None
    return EncoderReference(str(folder), given, hidden, logits)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
