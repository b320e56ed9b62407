"""Which linears of a transformers model take adapters, and their names in adapters' files."""

from collections.abc import Callable
from typing import Any

from torch import nn

from quire.layers.load_slot import ShardId
from quire.models.loading.weight_map import Target
from quire.models.transformers.replace_modules import Linear

MEMBERS = ("gate_proj", "up_proj")  # of a GatedMLP's gate_up_proj


class ModuleNames:
    """Of the linears under `root`, which is `prefix` in our module tree; peft has the model's own names."""

    def __init__(self, root: nn.Module, prefix: str) -> None:
        self.prefix = prefix
        self.linears = {path for path, module in root.named_modules() if isinstance(module, Linear)}

    def target(self, checkpoint_name: str) -> Target | None:
        path = checkpoint_name.removesuffix(".weight")
        parent, _, name = path.rpartition(".")
        fused = f"{parent}.gate_up_proj"
        if path not in self.linears and name in MEMBERS and fused in self.linears:
            return Target(self._parameter(fused), (MEMBERS.index(name),), None)
        return Target(self._parameter(path), (None,), None) if path in self.linears else None

    def checkpoint_name(self, parameter: str, shard: ShardId) -> str:
        path = parameter.removeprefix(f"{self.prefix}.").removesuffix(".holder.weight")
        if isinstance(shard, int):
            path = f"{path.rpartition('.')[0]}.{MEMBERS[shard]}"
        return f"{path}.weight"

    def _parameter(self, path: str) -> str:
        return f"{self.prefix}.{path}.holder.weight"


def find_adaptable(model: Any, run: Callable[[], object], num_tokens: int) -> None:
    """Note which linears multiply all tokens of a step, once: not those of experts, nor those whose weights the model's
    own code reads. `run` runs that many tokens."""
    calls: dict[Linear, list[int]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Linear)
        calls.setdefault(module, []).append(args[0].numel() // module.in_features)

    linears = [module for module in model.modules() if isinstance(module, Linear)]
    hooks = [linear.register_forward_pre_hook(note) for linear in linears]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    head = model.get_output_embeddings()
    for linear in linears:
        linear.holder.takes_adapters = calls.get(linear) == [num_tokens]
        linear.holder.makes_logits = linear is head
