"""Medusa: heads beside the target's own, each of which guesses a token further ahead from the same hidden state."""

from typing import Any

import torch
from torch import nn

from quire.config import EngineConfig
from quire.config.values import whole_number
from quire.kernels.activation import SILU, activate
from quire.kernels.add import add
from quire.kernels.transfer import to_device
from quire.layers.embedding import LMHead
from quire.layers.linear import ColumnParallelLinear
from quire.layers.parallel import SINGLE, TensorParallel
from quire.models.base import FINAL, LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.loading.weight_map import Rule, WeightMap
from quire.spec_decode.head_checkpoint import head_hf_config, head_tensors, load_head, open_head
from quire.spec_decode.proposer import DraftStep, Proposer, write_drafts

MAX_HEADS, MAX_LAYERS = 64, 16


class MedusaHead(nn.Module):
    """[n, hidden] -> logits [n, vocab]: residual layers, then a head."""

    def __init__(
        self,
        num_layers: int,
        hidden: int,
        vocab: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
    ) -> None:
        """Ranks share the vocabulary; the layers are small, and each rank has them whole."""
        super().__init__()
        self.layers = nn.ModuleList(
            ColumnParallelLinear(hidden, hidden, bias, dtype, device) for _ in range(num_layers)
        )
        self.lm_head = LMHead(vocab, hidden, dtype, device, tp=tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = add(x, activate(layer(x), SILU))
        logits: torch.Tensor = self.lm_head(x)
        return logits


class MedusaProposer(Proposer):
    """Drafts are each head's likeliest token."""

    hidden_outputs = (FINAL,)
    agrees = True

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.config, self.device = config, device

    def prepare(self, model: LanguageModel) -> None:
        if not isinstance(model, DecoderModel):
            return  # refused by the worker, for its hidden states
        checkpoint = open_head(self.config)
        hf = head_hf_config(self.config, checkpoint)
        num_heads, num_layers = _counts(hf)
        if self.num_drafts > num_heads:
            raise ValueError(
                f"speculative_config: num_speculative_tokens is {self.num_drafts}, but {checkpoint.name} has "
                f"{num_heads} Medusa heads, each for one token"
            )
        tensors = head_tensors(checkpoint)
        c, dtype = model.config, getattr(torch, self.config.model.dtype)
        bias = any(tensor.name.endswith(".bias") for tensor in tensors)
        self.heads = nn.ModuleList(
            MedusaHead(num_layers, c.hidden_size, c.vocab_size, bias, dtype, self.device, self.tp)
            for _ in range(num_heads)
        )
        load_head(self.heads, checkpoint, tensors, _names(num_layers))
        for head in self.heads:
            for module in (*head.layers, head.lm_head):  # type: ignore[misc]
                module.process_after_loading()

    def propose(self, step: DraftStep) -> None:
        assert step.hidden is not None and step.num_sampled is not None
        rows = step.rows[: len(step.plan.rows)].long()
        (first,) = to_device(self.device, step.first_logits)
        hidden = step.hidden[(first + step.num_sampled - 1).clamp(min=0)]
        drafts = [head(hidden).float().argmax(dim=-1) for head in self.heads[: self.num_drafts]]
        write_drafts(step.state, rows, torch.stack(drafts, dim=1))


def _counts(hf: dict[str, Any]) -> tuple[int, int]:
    """Heads, and residual layers of each, from a config in the authors' or in vLLM's keys."""
    if (hf.get("truncated_vocab_size") or hf.get("vocab_size")) != hf.get("vocab_size"):
        raise ValueError(
            "Medusa heads with a truncated_vocab_size are not supported; use heads of the whole vocabulary"
        )
    if hf.get("original_lm_head"):
        raise ValueError("Medusa heads with original_lm_head are not supported; use heads with an lm_head each")
    heads = hf.get("medusa_num_heads", hf.get("num_heads"))
    layers = hf.get("medusa_num_layers", hf.get("num_hidden_layers", 1))
    return whole_number("medusa_num_heads", heads, 1, MAX_HEADS), whole_number(
        "medusa_num_layers", layers, 1, MAX_LAYERS
    )


def _names(num_layers: int) -> WeightMap:
    """The authors' names (the blocks of a head, then its linear) and vLLM's, with and without a prefix."""
    rules = [Rule("blocks.{i}.layers.{e}.{p}", "{i}.layers.{e}.{p}"), Rule("lm_heads.{i}.weight", "{i}.lm_head.weight")]
    rules += [Rule(f"{{i}}.{j}.linear.{{p}}", f"{{i}}.layers.{j}.{{p}}") for j in range(num_layers)]
    rules.append(Rule(f"{{i}}.{num_layers}.weight", "{i}.lm_head.weight"))
    prefixes = ("medusa_heads.", "medusa_head.")
    prefixed = [Rule(prefix + rule.checkpoint, rule.parameter) for prefix in prefixes for rule in rules]
    return WeightMap((*rules, *prefixed))
