"""Rotary embeddings as a model's config describes them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.kernels.rope import gather_cos_sin

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeParameters:
    """Hashable, so that layers with equal parameters share one table."""

    rope_type: str
    theta: float
    rotary_dim: int
    max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0

    @classmethod
    def from_hf(cls, hf: dict[str, Any], head_dim: int, layer_type: str = "full_attention") -> "RopeParameters":
        """From `rope_parameters` (transformers 5; may hold one dict per layer type) or `rope_scaling`, `rope_theta`."""
        given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        given = given.get(layer_type, given)
        rope_type = given.get("rope_type") or given.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        theta = float(given.get("rope_theta") or hf.get("rope_theta") or 10000.0)
        rotary_dim = int(head_dim * (given.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0))
        max_positions = int(hf.get("max_position_embeddings") or 2048)
        if rope_type == "default":
            return cls(rope_type, theta, rotary_dim, max_positions)
        factor = float(given["factor"])
        if rope_type == "linear":
            return cls(rope_type, theta, rotary_dim, math.ceil(max_positions * factor), factor)
        return cls(
            rope_type,
            theta,
            rotary_dim,
            max_positions,
            factor,
            low_freq_factor=float(given["low_freq_factor"]),
            high_freq_factor=float(given["high_freq_factor"]),
            original_max_positions=int(given.get("original_max_position_embeddings") or max_positions),
        )

    def inverse_frequencies(self) -> torch.Tensor:
        """[rotary_dim / 2] float32, on the CPU."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32, device="cpu") / self.rotary_dim
        frequencies = 1.0 / self.theta**exponents
        if self.rope_type == "linear":
            return frequencies / self.factor
        return self._llama3(frequencies) if self.rope_type == "llama3" else frequencies

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Long waves are stretched by the factor, short ones kept, those between blended."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)  # within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * kept + frequencies / self.factor * (1.0 - kept)


class RotaryEmbedding(nn.Module):
    """The table of cosines and sines, [max_positions, rotary_dim], in the compute dtype."""

    cache: torch.Tensor

    def __init__(self, parameters: RopeParameters, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        positions = torch.arange(parameters.max_positions, dtype=torch.float32, device=device)
        angles = positions[:, None] * parameters.inverse_frequencies().to(device)
        cache = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [N] -> cos and sin for kernels.rope.apply_rope."""
        return gather_cos_sin(self.cache, positions)
