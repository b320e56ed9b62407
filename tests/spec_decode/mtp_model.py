"""A worked example of a family with multi-token prediction: Llama with one more layer in DeepSeek's names."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.models.decoder import DECODER_WEIGHTS
from quire.models.draft_head import DraftHead
from quire.models.llama import LlamaForCausalLM
from quire.models.loading.weight_map import WeightMap
from quire.models.mtp import MTPHead, ignoring_mtp, mtp_weights
from quire.models.options import ModelOptions
from quire.spec_decode.mtp import MTPProposer
from tests.spec_decode.heads import Noting, attention, layer_tensors, mlp, rms_norm
from tests.tiny_models import save_tiny

LAYER = "model.layers.4"


class LlamaWithMTP(LlamaForCausalLM):
    def make_mtp_head(self, options: ModelOptions) -> DraftHead:
        c = self.config
        return MTPHead(replace(c, num_layers=1, windows=c.windows[-1:], ropes=c.ropes[-1:]), options, self)

    def mtp_weights(self) -> WeightMap:
        return mtp_weights(self.config.num_layers, DECODER_WEIGHTS.rules)

    def weight_map(self) -> WeightMap:
        return ignoring_mtp(super().weight_map(), self.mtp_weights())


class NotingMTP(Noting, MTPProposer):
    pass


def save_mtp(folder: Path) -> str:
    save_tiny("llama", folder)
    return add_mtp(folder)


def add_mtp(folder: Path) -> str:
    """To a tiny Llama, whose text stays as it is."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(5)
    tensors |= layer_tensors(LAYER, wide=False)
    names = ("input_layernorm", "enorm", "hnorm", "shared_head.norm")
    tensors |= {f"{LAYER}.{name}.weight": torch.rand(64) + 0.5 for name in names}
    tensors[f"{LAYER}.eh_proj.weight"] = torch.randn(64, 128) * 0.15
    tensors[f"{LAYER}.embed_tokens.weight"] = torch.zeros(config["vocab_size"], 64)  # a copy, which is not read
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaWithMTP"]}))
    return str(folder)


def mtp_drafts(folder: str, known: list[int], states: torch.Tensor, count: int) -> list[int]:
    """By a plain forward pass over all positions for each draft."""
    tensors = load_file(f"{folder}/model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    weight = {name: tensors[f"{LAYER}.{name}.weight"] for name in ("input_layernorm", "enorm", "hnorm", "eh_proj")}
    tokens, hidden, drafts = list(known[1:]), states, []
    for _ in range(count):
        embeds = rms_norm(embedding[torch.tensor(tokens)], weight["enorm"])
        x = torch.cat((embeds, rms_norm(hidden, weight["hnorm"])), -1) @ weight["eh_proj"].T
        x = x + attention(tensors, LAYER, rms_norm(x, weight["input_layernorm"]))
        x = x + mlp(tensors, LAYER, rms_norm(x, tensors[f"{LAYER}.post_attention_layernorm.weight"]))
        drafts.append(int((rms_norm(x[-1:], tensors[f"{LAYER}.shared_head.norm.weight"]) @ embedding.T).argmax()))
        tokens.append(drafts[-1])
        hidden = torch.cat((hidden, x[-1:]))
    return drafts
