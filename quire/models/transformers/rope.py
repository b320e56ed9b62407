"""Fixes rotary frequencies that depend on the longest sequence of a batch: a step batches many sequences."""

from typing import Any

import torch
from torch import nn

from quire.models.transformers.attention import Unsupported

FIXED = "fixed"  # unknown to transformers, so that it does not recompute frequencies


def freeze_rope(model: nn.Module, longest: int | None) -> None:
    """longrope uses its long factors if sequences of up to `longest` tokens exceed the original context."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _frozen(module, kinds, None, longest)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _frozen(module, kind, layer, longest) for layer, kind in kinds.items()}


def _frozen(module: Any, kind: str, layer_type: str | None, longest: int | None) -> str:
    if "dynamic" not in kind and kind != "longrope":
        return kind
    config = module.config
    longest = longest or config.max_position_embeddings
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if kind != "longrope":
        if longest > module.original_max_seq_len:
            raise Unsupported(
                "its rotary embedding (dynamic) changes with the length of a sequence beyond "
                f"{module.original_max_seq_len} tokens; --max-model-len {module.original_max_seq_len} serves it"
            )
        return FIXED
    original = parameters["original_max_position_embeddings"]
    if longest > original:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        prefix = "" if layer_type is None else f"{layer_type}_"
        current: torch.Tensor = getattr(module, f"{prefix}inv_freq")
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, current.device, seq_len=original + 1, **options)
        module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    return FIXED
