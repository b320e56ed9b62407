"""How a model stretches rotary frequencies over a longer context: one class per `rope_type`.

Frequencies are float32 [pairs], or [positions, pairs] where they differ by position. Every table is fixed when the
model is built: requests share the KV cache and the batch, so a frequency must not depend on other requests.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch

from quire.config.shown import shown
from quire.config.values import finite_number

MAX_NUMBER = 1e6  # of any factor


@dataclass(frozen=True)
class RopeSource:
    """What a scaling may read: its own keys in the config, and lengths from other keys."""

    given: dict[str, Any]
    max_positions: int  # max_position_embeddings
    original_positions: int  # of pretraining
    rotary_dim: int

    def number(self, name: str) -> float:
        """Above 0, since everything here is a factor."""
        value = self.given.get(name)
        if value is None:
            raise ValueError(f"rope parameters of type {self.given.get('rope_type')!r} need a number {name}")
        return finite_number(f"{name} of the rope parameters", value, above=1 / MAX_NUMBER, maximum=MAX_NUMBER)

    def number_or(self, name: str, default: float) -> float:
        return default if self.given.get(name) is None else self.number(name)

    @property
    def extension(self) -> float:
        """`factor`, or how much longer the context is than that of pretraining."""
        return self.number_or("factor", self.max_positions / self.original_positions)


class RopeScaling(Protocol):
    @classmethod
    def read(cls, source: RopeSource) -> Self: ...

    @property
    def attention_factor(self) -> float:
        """Cosines and sines are multiplied by it."""

    def table_length(self, max_positions: int) -> int:
        """How many positions the table covers, from the config's max_position_embeddings."""

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        """[pairs], or [len(positions), pairs]."""


def base_frequencies(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** _exponents(dim)


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim


@dataclass(frozen=True)
class Unscaled:
    attention_factor: ClassVar[float] = 1.0

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        return cls()

    def table_length(self, max_positions: int) -> int:
        return max_positions

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        return base_frequencies(theta, dim)


@dataclass(frozen=True)
class Linear:
    factor: float
    attention_factor: ClassVar[float] = 1.0

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        return cls(source.number("factor"))

    def table_length(self, max_positions: int) -> int:
        return math.ceil(max_positions * self.factor)

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        return base_frequencies(theta, dim) / self.factor


@dataclass(frozen=True)
class DynamicNTK:
    factor: float
    trained_positions: int
    attention_factor: ClassVar[float] = 1.0

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        if source.rotary_dim <= 2:
            raise ValueError(f"rope parameters of type 'dynamic' need more than {source.rotary_dim} rotary dimensions")
        return cls(source.number("factor"), source.max_positions)

    def table_length(self, max_positions: int) -> int:
        return math.ceil(max_positions * self.factor)

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        # transformers takes the frequencies of the longest sequence so far, vLLM those of the longest possible one for
        # all. Here position p has those of a sequence that ends with it: equal to transformers up to the trained
        # length, and beyond it to transformers' token-by-token generation, whose cached keys keep their old angles.
        lengths = (positions.double() + 1).clamp(min=self.trained_positions)
        growth = self.factor * lengths / self.trained_positions - (self.factor - 1)
        bases = theta * growth ** (dim / (dim - 2))
        return (1.0 / bases[:, None] ** _exponents(dim).to(positions.device)).float()


@dataclass(frozen=True)
class Yarn:
    """Fast pairs keep their frequency, slow ones are stretched, those between blended (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        factor, given = source.extension, source.given
        if given.get("attention_factor") is not None:
            attention_factor = source.number("attention_factor")
        elif given.get("mscale") and given.get("mscale_all_dim"):
            magnitudes = [yarn_magnitude(factor, source.number(name)) for name in ("mscale", "mscale_all_dim")]
            attention_factor = magnitudes[0] / magnitudes[1]
        else:
            attention_factor = yarn_magnitude(factor)
        return cls(
            factor,
            source.original_positions,
            attention_factor,
            # Zero means the default, as in transformers.
            beta_fast=source.number("beta_fast") if given.get("beta_fast") else 32.0,
            beta_slow=source.number("beta_slow") if given.get("beta_slow") else 1.0,
            truncate=bool(given.get("truncate", True)),
        )

    def table_length(self, max_positions: int) -> int:
        return max(max_positions, math.ceil(self.original_positions * self.factor))

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        base = base_frequencies(theta, dim)
        first, last = self._pair_turning(self.beta_fast, theta, dim), self._pair_turning(self.beta_slow, theta, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        width = last - first or 0.001
        stretched = ((torch.arange(len(base), dtype=torch.float32) - first) / width).clamp(0, 1)
        return base / self.factor * stretched + base * (1 - stretched)

    def _pair_turning(self, turns: float, theta: float, dim: int) -> float:
        """The (fractional) pair that makes this many turns within the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Of attention's queries and keys in a context that is `factor` times as long (mscale)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3:
    """Long waves are stretched by the factor, short ones kept, those between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    attention_factor: ClassVar[float] = 1.0

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor is {low:g} and high_freq_factor {high:g}; the second must be greater")
        return cls(source.number("factor"), low, high, source.original_positions)

    def table_length(self, max_positions: int) -> int:
        return max_positions

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        base = base_frequencies(theta, dim)
        turns = self.original_positions * base / (2 * math.pi)  # within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return base * kept + base / self.factor * (1.0 - kept)


@dataclass(frozen=True)
class LongRope:
    """One factor per pair, found by search (arXiv 2402.13753): a list for the original context, another beyond it."""

    short_factor: tuple[float, ...] | None
    long_factor: tuple[float, ...] | None
    attention_factor: float
    original_positions: int
    max_length: int  # of any sequence

    def __post_init__(self) -> None:
        if self.factors is None:
            raise ValueError(f"rope parameters of type 'longrope' need a list {self._list_in_use}")

    @classmethod
    def read(cls, source: RopeSource) -> Self:
        if source.given.get("attention_factor") is None:
            extension = source.extension
            logs = math.log(extension) / math.log(source.original_positions) if extension > 1 else 0.0
            attention_factor = math.sqrt(1 + logs)
        else:
            attention_factor = source.number("attention_factor")
        short, long = _factors(source, "short_factor"), _factors(source, "long_factor")
        return cls(short, long, attention_factor, source.original_positions, source.max_positions)

    def limited_to(self, max_model_len: int) -> "LongRope":
        return replace(self, max_length=max_model_len)

    @property
    def _list_in_use(self) -> str:
        # transformers switches from the short to the long factors when a sequence outgrows the original length, which
        # makes its cached keys wrong. As in vLLM, the choice is made once, by the longest sequence that may come: with
        # max_model_len up to the original length all sequences equal transformers', else those beyond it do.
        return "long_factor" if self.max_length > self.original_positions else "short_factor"

    @property
    def factors(self) -> tuple[float, ...] | None:
        return getattr(self, self._list_in_use)

    def table_length(self, max_positions: int) -> int:
        return max_positions

    def frequencies(self, theta: float, dim: int, positions: torch.Tensor) -> torch.Tensor:
        return base_frequencies(theta, dim) / torch.tensor(self.factors, dtype=torch.float32)


def _factors(source: RopeSource, name: str) -> tuple[float, ...] | None:
    factors, pairs = source.given.get(name), -(-source.rotary_dim // 2)
    if factors is None:
        return None
    if not isinstance(factors, list | tuple):
        raise ValueError(f"rope parameters of type 'longrope' need a list {name}: {shown(factors)}")
    if len(factors) != pairs:
        raise ValueError(
            f"the config's longrope {name} has {len(factors)} factors; {source.rotary_dim} rotary dimensions need "
            f"{pairs}"
        )
    return tuple(finite_number(name, factor, above=1 / MAX_NUMBER, maximum=MAX_NUMBER) for factor in factors)


ROPE_SCALINGS: dict[str, type[RopeScaling]] = {
    "default": Unscaled,
    "linear": Linear,
    "dynamic": DynamicNTK,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
}
# Names in Phi-3's first configs, and in Qwen2-VL's, whose sections (rotary.py) leave frequencies as they are.
ALIASES = {"su": "longrope", "mrope": "default"}


def read_scaling(rope_type: str, source: RopeSource) -> RopeScaling:
    scaling = ROPE_SCALINGS.get(ALIASES.get(rope_type, rope_type)) if isinstance(rope_type, str) else None
    if scaling is None:
        raise ValueError(f"rope type {shown(rope_type)} is not supported; supported: {', '.join(ROPE_SCALINGS)}")
    return scaling.read(source)
