"""Rotary embeddings as a model's config describes them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quire.attention.base import Angles
from quire.config.shown import shown
from quire.config.values import finite_number, whole_number
from quire.layers.rope_scaling import LongRope, RopeScaling, RopeSource, read_scaling

# Rows of the table computed at a time, which keeps float32 temporaries small.
TABLE_STEP = 16384
# Such a table takes gigabytes; the longest contexts of today's models are ten million.
MAX_POSITIONS = 2**24
MAX_THETA = 1e15


@dataclass(frozen=True)
class RopeParameters:
    """Hashable, so that layers with equal parameters share one table."""

    theta: float
    rotary_dim: int
    max_positions: int  # of the table
    scaling: RopeScaling
    sections: tuple[int, ...] = ()  # pairs turned by each of three axes of positions; (): there is one axis
    interleaved: bool = False  # pairs of the axes alternate

    @classmethod
    def from_hf(cls, hf: dict[str, Any], head_dim: int, layer_type: str = "full_attention") -> "RopeParameters":
        """From `rope_parameters` (transformers 5; may hold one dict per layer type) or `rope_scaling`, `rope_theta`."""
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        given = given.get(layer_type, given) if isinstance(given, dict) else given
        if not isinstance(given, dict):
            raise ValueError(f"rope_parameters or rope_scaling is {shown(given)}; it must be an object")
        rope_type = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or hf.get("rope_theta") or 10000.0
        part = given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
        rotary_dim = int(head_dim * finite_number("partial_rotary_factor", part, above=0.0, maximum=1.0))
        if rotary_dim < 1:
            raise ValueError(f"partial_rotary_factor is {part}, which leaves nothing to rotate of a head of {head_dim}")
        name = "max_position_embeddings"
        max_positions = whole_number(name, hf.get(name) or 2048, maximum=MAX_POSITIONS)
        name = "original_max_position_embeddings"  # Phi-3 has it beside the rope parameters, where it wins
        original = whole_number(name, hf.get(name) or given.get(name) or max_positions, 2, MAX_POSITIONS)
        source = RopeSource(given | {"rope_type": rope_type}, max_positions, original, rotary_dim)
        scaling = read_scaling(rope_type, source)
        length = whole_number(
            "max_position_embeddings, stretched by its rope parameters,",
            scaling.table_length(max_positions),
            maximum=MAX_POSITIONS,
        )
        theta = finite_number("rope_theta", theta, above=1.0, maximum=MAX_THETA)
        sections = _sections(given.get("mrope_section"), rotary_dim)
        return cls(theta, rotary_dim, length, scaling, sections, bool(given.get("mrope_interleaved", False)))

    def limited_to(self, max_model_len: int) -> "RopeParameters":
        """The same for sequences of at most `max_model_len` tokens, by which longrope chooses its factors."""
        if not isinstance(self.scaling, LongRope):
            return self
        return replace(self, scaling=self.scaling.limited_to(max_model_len))

    @property
    def table_width(self) -> int:
        """An odd number of dimensions is rounded up to pairs, as in transformers."""
        return self.rotary_dim + self.rotary_dim % 2

    def axes(self) -> torch.Tensor:
        """[pairs]: the axis of positions that turns each."""
        if not self.interleaved:
            return torch.repeat_interleave(torch.arange(len(self.sections)), torch.tensor(self.sections))
        axes = torch.zeros(sum(self.sections), dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes

    def cos_sin(self, positions: torch.Tensor) -> torch.Tensor:
        """positions float32 [N] -> float32 [N, rotary_dim]: the cosines of all pairs, then the sines."""
        frequencies = self.scaling.frequencies(self.theta, self.rotary_dim, positions).to(positions.device)
        angles = positions[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1) * self.scaling.attention_factor


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines, [max_positions, rotary_dim], in the compute dtype."""

    cache: torch.Tensor
    axes: torch.Tensor | None

    def __init__(self, parameters: RopeParameters, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(parameters.max_positions, dtype=torch.float32, device=device)
        cache = torch.empty(parameters.max_positions, parameters.table_width, dtype=dtype, device=device)
        for rows, part in zip(cache.split(TABLE_STEP), positions.split(TABLE_STEP), strict=True):
            rows.copy_(parameters.cos_sin(part))
        self.register_buffer("cache", cache, persistent=False)
        self.register_buffer("axes", parameters.axes().to(device) if parameters.sections else None, persistent=False)

    def forward(self, positions: torch.Tensor) -> Angles:
        return Angles(self.cache, positions) if positions.dim() == 1 else self._by_axes(positions)

    def _by_axes(self, positions: torch.Tensor) -> Angles:
        """positions [3, N]: a table of the step's own, with a row for each token."""
        assert self.axes is not None
        of_pairs = positions[self.axes].T.long()  # [N, pairs]
        cos, sin = (half.gather(0, of_pairs) for half in self.cache.chunk(2, dim=-1))
        rows = torch.arange(positions.shape[1], dtype=positions.dtype, device=positions.device)
        return Angles(torch.cat((cos, sin), dim=-1), rows)


def _sections(given: Any, rotary_dim: int) -> tuple[int, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or len(given) != 3:
        raise ValueError(f"mrope_section of the rope parameters is {shown(given)}; it must be a list of three numbers")
    sections = tuple(whole_number("mrope_section of the rope parameters", each, 0, rotary_dim) for each in given)
    if 2 * sum(sections) != rotary_dim:
        raise ValueError(f"mrope_section is {shown(given)}, which must add up to half of {rotary_dim} dimensions")
    return sections
