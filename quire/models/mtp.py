"""Multi-token prediction: layers of a model's own checkpoint that predict the token after the next."""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from quire.attention.base import ForwardContext
from quire.kernels.add import add
from quire.models.decoder import DecoderModel
from quire.models.decoder_config import DecoderConfig
from quire.models.decoder_layers import MLP, BuildContext, FeedForward
from quire.models.draft_head import DraftHead
from quire.models.loading.weight_map import Rule, WeightMap
from quire.models.options import ModelOptions


@runtime_checkable
class SupportsMTP(Protocol):
    """A family whose checkpoints have such layers. The model itself ignores their tensors (`ignoring_mtp`)."""

    def make_mtp_head(self, options: ModelOptions) -> DraftHead: ...

    def mtp_weights(self) -> WeightMap:
        """From the names in the model's checkpoint to the head's parameters."""
        ...


class MTPHead(DraftHead):
    """One layer: embedding and hidden state, each normed, come together in eh_proj; LM head and embedding are the
    model's. A chain continues its own hidden states."""

    def __init__(
        self,
        config: DecoderConfig,
        options: ModelOptions,
        target: DecoderModel,
        make_mlp: Callable[[BuildContext, int], FeedForward] = MLP,
    ) -> None:
        super().__init__(config, options, target, fc_inputs=2 * config.hidden_size, make_mlp=make_mlp)
        build = BuildContext(config, options)
        self.enorm, self.hnorm, self.norm = build.norm(), build.norm(), build.norm()

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.apply_pair(self.enorm(embeds), self.hnorm(hidden))
        carried = add(*self._run_layers(x, None, 0, self.rotary(positions), ctx))
        return self.norm(carried), carried


def mtp_weights(layer: int, layer_rules: Sequence[Rule]) -> WeightMap:
    """DeepSeek's names: the head is layer number `layer` of the checkpoint, with the tensors of a layer of the model
    (`layer_rules`) and its own."""
    place = f"model.layers.{layer}"
    rules = [
        Rule(rule.checkpoint.replace("model.layers.{i}", place), rule.parameter.replace("{i}", "0"), rule.shard)
        for rule in layer_rules
        if "{i}" in rule.checkpoint
    ]
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "fc", "shared_head.norm": "norm"}
    rules += [Rule(f"{place}.{theirs}.weight", f"{ours}.weight") for theirs, ours in own.items()]
    return WeightMap(tuple(rules), (f"{place}.embed_tokens.weight", f"{place}.shared_head.head.weight"))


def ignoring_mtp(weights: WeightMap, mtp: WeightMap) -> WeightMap:
    """The model's own map, without its prediction layers."""
    return weights.ignoring(*(rule.checkpoint for rule in mtp.rules), *mtp.ignored)
