"""Rotary embeddings as a model's config describes them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.attention.base import Angles
from quire.layers.rope_scaling import RopeScaling, RopeSource, read_scaling

# Rows of the table computed at a time: float32 temporaries stay small beside a table of a million positions.
TABLE_STEP = 16384


@dataclass(frozen=True)
class RopeParameters:
    """Hashable, so that layers with equal parameters share one table."""

    theta: float
    rotary_dim: int
    max_positions: int  # of the table
    scaling: RopeScaling

    @classmethod
    def from_hf(cls, hf: dict[str, Any], head_dim: int, layer_type: str = "full_attention") -> "RopeParameters":
        """From `rope_parameters` (transformers 5; may hold one dict per layer type) or `rope_scaling`, `rope_theta`.

        `max_model_len` in `hf` is no key of any config: models/loader.py adds it where the user set a limit.
        """
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        given = given.get(layer_type, given)
        rope_type = given.get("rope_type") or given.get("type") or "default"
        theta = float(given.get("rope_theta") or hf.get("rope_theta") or 10000.0)
        rotary_dim = int(head_dim * (given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0))
        max_positions = int(hf.get("max_position_embeddings") or 2048)
        name = "original_max_position_embeddings"  # Phi-3 has it beside the rope parameters, where it wins
        original = int(hf.get(name) or given.get(name) or max_positions)
        source = RopeSource(given | {"rope_type": rope_type}, max_positions, original, hf.get("max_model_len"))
        scaling = read_scaling(rope_type, source)
        return cls(theta, rotary_dim, scaling.table_length(max_positions), scaling)

    def cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """positions float32 [N] -> float32 [N, rotary_dim]: the cosines of all pairs, then the sines."""
        frequencies = self.scaling.frequencies(self.theta, self.rotary_dim, positions).to(positions.device)
        angles = positions[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scaling.attention_factor


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines, [max_positions, rotary_dim], in the compute dtype."""

    cache: torch.Tensor

    def __init__(self, parameters: RopeParameters, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(parameters.max_positions, dtype=torch.float32, device=device)
        # An odd number of dimensions is rounded up to pairs, as in transformers.
        width = parameters.rotary_dim + parameters.rotary_dim % 2
        cache = torch.empty(parameters.max_positions, width, dtype=dtype, device=device)
        for rows, part in zip(cache.split(TABLE_STEP), positions.split(TABLE_STEP), strict=True):
            rows.copy_(parameters.cos_sin(part))
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, positions: torch.Tensor) -> Angles:
        return Angles(self.cache, positions)
