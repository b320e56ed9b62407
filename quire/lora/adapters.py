"""A worker's adapters: the layers that take one, and loading into and removal from slots."""

from collections.abc import Mapping

import torch
from torch import nn

from quire.config.lora import LoRAConfig
from quire.layers.fused_moe import FusedMoE
from quire.layers.linear import ParallelLinear
from quire.layers.load_slot import ShardId
from quire.layers.packed_experts import PackedExperts
from quire.lora.layers import Factors, Target, adapt_experts, adapt_linear
from quire.lora.state import LoRAState

# By layer and shard, as a model's WeightMap maps names in checkpoints: ("layers.0.self_attn.qkv_proj", "q").
AdapterWeights = Mapping[tuple[str, ShardId], Factors]


class Adapters:
    """Changes the layers of a loaded model so that they add the terms of adapters."""

    def __init__(
        self,
        model: nn.Module,
        config: LoRAConfig,
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`max_rows` and `max_tokens`: the most that a step has."""
        self.state = LoRAState(config.max_loras, max_rows, max_tokens, device)
        self._targets: dict[tuple[str, ShardId], Target] = {}
        rank, inside_experts = config.max_lora_rank, set[nn.Module]()
        for path, module in list(model.named_modules()):
            if isinstance(module, FusedMoE | PackedExperts):
                inside_experts.update(module.modules())
                if config.adapt_experts:
                    for name, shard, target in adapt_experts(module, self.state, rank, dtype):
                        self._targets[f"{path}.{name}", shard] = target
            elif isinstance(module, ParallelLinear) and module not in inside_experts:
                for shard, target in adapt_linear(module, self.state, rank, dtype):
                    self._targets[path, shard] = target
        if not self._targets:
            raise ValueError(f"{type(model).__name__} has no layers that take an adapter; leave out enable_lora")

    @torch.inference_mode()
    def set(self, lora_id: int, weights: AdapterWeights) -> None:
        """Load an adapter. The copies come after all steps that were launched before."""
        for (name, shard), factors in weights.items():
            target = self._targets.get((name, shard))
            if target is None:
                some = ", ".join(str(key) for key in list(self._targets)[:5])
                raise ValueError(f"{name} (shard {shard!r}) takes no adapter; layers that do are {some}, ...")
            target.check(name, factors)
        slot = self.state.take_slot(lora_id)
        try:
            for key, target in self._targets.items():
                target.a[slot].zero_()
                target.b[slot].zero_()
                if key in weights:
                    target.write(slot, weights[key])
        except BaseException:
            self.state.release_slot(lora_id)
            raise

    def remove(self, lora_id: int) -> None:
        self.state.release_slot(lora_id)
