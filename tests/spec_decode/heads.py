"""Tiny random draft heads, saved as published ones are, and what they should propose, computed by plain torch."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.spec_decode.medusa import MedusaProposer
from quire.spec_decode.proposer import DraftStep, Proposer

PROPOSED: list[tuple[list[int], list[int]]] = []  # known tokens and the drafts behind them, of every proposal


class Noting(Proposer):
    """Notes what is proposed for rows that may decode. Reads the device."""

    def propose(self, step: DraftStep) -> None:
        super().propose(step)
        assert step.num_sampled is not None
        state = step.state
        for row, sampled in zip(step.plan.rows.tolist(), step.num_sampled.tolist(), strict=True):
            known = int(state.num_tokens[row])
            if sampled and known < int(state.token_limit[row]):
                ids = state.token_ids[row, : known + self.num_drafts].tolist()
                PROPOSED.append((ids[:known], ids[known:]))


class NotingMedusa(Noting, MedusaProposer):
    pass


def save_medusa(folder: Path, hidden: int, vocab: int, num_heads: int = 3, num_layers: int = 1, names="authors") -> str:
    """In the authors' format or in vLLM's."""
    torch.manual_seed(1)
    tensors = {}
    for i in range(num_heads):
        for j in range(num_layers):
            place = f"{i}.{j}.linear" if names == "authors" else f"medusa_heads.blocks.{i}.layers.{j}"
            tensors[f"{place}.weight"] = torch.randn(hidden, hidden) * 0.2
            if names == "authors":
                tensors[f"{place}.bias"] = torch.randn(hidden) * 0.2
        place = f"{i}.{num_layers}" if names == "authors" else f"medusa_heads.lm_heads.{i}"
        tensors[f"{place}.weight"] = torch.randn(vocab, hidden)
    if names == "authors":
        config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": "x"}
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        config = {"model_type": "medusa", "num_heads": num_heads, "num_hidden_layers": num_layers, "vocab_size": vocab}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def medusa_drafts(tensors: dict[str, torch.Tensor], hidden: torch.Tensor, num_layers: int) -> list[int]:
    """Of heads in the authors' names, from one hidden state."""
    drafts = []
    for i in range(1 + max(int(name.split(".")[0]) for name in tensors)):
        x = hidden
        for j in range(num_layers):
            weight, bias = tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        drafts.append(int((tensors[f"{i}.{num_layers}.weight"] @ x).argmax()))
    return drafts
