"""Rules from tensor names of a checkpoint to parameters.

A pattern holds placeholders: `{i}` stands for a layer number, `{e}` for an expert's, `{p}` for the last part of a name
(weight, bias ...), `{rest}` for any number of parts.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from quire.layers.load_slot import ShardId

Transform = Callable[[torch.Tensor], torch.Tensor]

MAX_PREDICTION_LAYERS = 4
_PLACEHOLDERS = {"i": r"\d+", "e": r"\d+", "p": r"\w+", "rest": r".+"}


@functools.cache
def _compile(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", pattern)
    regex = "".join(f"(?P<{p}>{_PLACEHOLDERS[p]})" if n % 2 else re.escape(p) for n, p in enumerate(parts))
    return re.compile(regex)


@dataclass(frozen=True)
class Rule:
    checkpoint: str
    parameter: str
    shard: ShardId | tuple[ShardId, ...] = None  # several: the tensor holds them concatenated
    transform: Transform | None = None  # of the whole tensor, before it is split

    @property
    def shards(self) -> tuple[ShardId, ...]:
        return self.shard if isinstance(self.shard, tuple) else (self.shard,)

    @cached_property
    def _checkpoint_regex(self) -> re.Pattern[str]:
        return _compile(self.checkpoint)

    @cached_property
    def _parameter_regex(self) -> re.Pattern[str]:
        return _compile(self.parameter)

    def parameter_of(self, checkpoint_name: str) -> str | None:
        match = self._checkpoint_regex.fullmatch(checkpoint_name)
        return self.parameter.format(**match.groupdict()) if match else None

    def checkpoint_name_of(self, parameter: str) -> str | None:
        match = self._parameter_regex.fullmatch(parameter)
        return self.checkpoint.format(**match.groupdict()) if match else None


@dataclass(frozen=True)
class Target:
    parameter: str
    shards: tuple[ShardId, ...]
    transform: Transform | None


class WeightNames(Protocol):
    """Which parameters the tensors of a checkpoint are; a WeightMap is one."""

    def target(self, checkpoint_name: str) -> Target | None: ...
    def checkpoint_name(self, parameter: str, shard: ShardId) -> str: ...


@dataclass(frozen=True)
class WeightMap:
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()  # patterns of tensors that the model does not need

    def target(self, checkpoint_name: str) -> Target | None:
        for rule in self.rules:
            parameter = rule.parameter_of(checkpoint_name)
            if parameter is not None:
                return Target(parameter, rule.shards, rule.transform)
        return None

    def is_ignored(self, checkpoint_name: str) -> bool:
        return any(_compile(pattern).fullmatch(checkpoint_name) for pattern in self.ignored)

    def checkpoint_name(self, parameter: str, shard: ShardId) -> str:
        """The checkpoint name of a missing parameter, for error messages."""
        for rule in self.rules:
            name = rule.checkpoint_name_of(parameter)
            if shard in rule.shards and name is not None:
                return name
        return parameter

    def names_of(self, parameter: str) -> tuple[str, ...]:
        """Patterns of all tensors that a parameter is loaded from."""
        return tuple(rule.checkpoint for rule in self.rules if rule.parameter == parameter)

    def with_rules(self, *rules: Rule) -> "WeightMap":
        """With these rules taking precedence."""
        return WeightMap(rules + self.rules, self.ignored)

    def ignoring(self, *patterns: str) -> "WeightMap":
        return WeightMap(self.rules, self.ignored + patterns)

    def ignoring_layers_from(self, first: int) -> "WeightMap":
        """Without the layers that follow a model's own: those of multi-token prediction."""
        return self.ignoring(*(f"model.layers.{i}.{{rest}}" for i in range(first, first + MAX_PREDICTION_LAYERS)))

    def also_without(self, prefix: str) -> "WeightMap":
        """Also accept names without the prefix, as in checkpoints saved from the base model."""
        short = (replace(r, checkpoint=r.checkpoint.removeprefix(prefix)) for r in self.rules if prefix in r.checkpoint)
        ignored = tuple(name.removeprefix(prefix) for name in self.ignored)
        return WeightMap((*self.rules, *short), self.ignored + ignored)
