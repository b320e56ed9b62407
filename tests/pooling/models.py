"""Tiny models for pooling, saved as users' checkpoints are, with transformers' model beside each."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tiny_models import COMMON

LABELS = {0: "sad", 1: "glad", 2: "mad"}


def save(name: str, folder: Path, **config: Any) -> Any:
    """transformers' class of this name, such as Qwen3ForSequenceClassification, with random weights."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(5)
    model = kind(kind.config_class(**COMMON | {"head_dim": 16} | config)).eval()
    model.save_pretrained(folder)
    return model


def rename(folder: Path, change: Any) -> None:
    """Other names for the tensors of a checkpoint; a tensor without one is left out."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in tensors.items() if change(name) is not None}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def configure(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add_modules(folder: Path, pooling: str = "mean_tokens", dense: int | None = None, normalize: bool = True) -> Any:
    """sentence-transformers' files; the Dense layer if there is one."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "1_Pooling").mkdir()
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    config = {"word_embedding_dimension": width, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    layer = None
    if dense is not None:
        torch.manual_seed(6)
        layer = nn.Linear(width, dense)
        (folder / "2_Dense").mkdir()
        config = {"in_features": width, "out_features": dense, "bias": True}
        config["activation_function"] = "torch.nn.modules.activation.Tanh"
        (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": value.detach() for name, value in layer.named_parameters()}
        save_file(tensors, folder / "2_Dense" / "model.safetensors")
        modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    if normalize:
        modules.append({"idx": 3, "name": "3", "path": "3_Norm", "type": "sentence_transformers.models.Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return layer


def add_tokenizer(folder: Path, chat_template: str | None = None) -> Any:
    """Words w4 to w210, with BERT's tokens around texts and between pairs."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    special = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3}
    backend = Tokenizer(WordLevel(special | {f"w{i}": i for i in range(4, 211)}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def text(length: int, seed: int = 0) -> str:
    """Words of that tokenizer."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return " ".join(f"w{i}" for i in torch.randint(4, 211, (length,), generator=generator).tolist())
