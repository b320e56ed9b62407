"""Parameters of a request that pools: its result is a vector made of the prompt's hidden states, not text."""

import copy
from typing import Any

import msgspec

from quire.messages.checks import check, check_bool, check_int
from quire.messages.sampling_params import MAX_COUNT, check_truncation

TASKS = ("embed",)


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Names and meaning follow vLLM. None means the default of the task or the model."""

    task: str | None = None  # embed: one vector for the prompt
    pooling_type: str | None = None  # LAST, MEAN or CLS, or a registered one; default: LAST
    dimensions: int | None = None  # keep the first ones of the vector
    use_activation: bool | None = None  # embed: scale the vector to length 1; default: true
    normalize: bool | None = None  # a former name of use_activation
    truncate_prompt_tokens: int | None = None  # keep the last N; -1: up to the model's limit
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; default: if pooling_type needs that

    def __post_init__(self) -> None:
        check(self.task is None or self.task in TASKS, "task", self.task, f"None or one of: {', '.join(TASKS)}")
        check(
            self.pooling_type is None or isinstance(self.pooling_type, str),
            "pooling_type",
            self.pooling_type,
            "None or the name of a pooling method",
        )
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, MAX_COUNT)
        for name in ("use_activation", "normalize", "skip_reading_prefix_cache"):
            if getattr(self, name) is not None:
                check_bool(name, getattr(self, name))
        if self.normalize is not None:
            if self.use_activation not in (None, self.normalize):
                raise ValueError("normalize is a former name of use_activation; give only one of them")
            self.use_activation, self.normalize = self.normalize, None
        check_truncation(self.truncate_prompt_tokens)

    def replace_unchecked(self, **changes: Any) -> "PoolingParams":
        """A copy with trusted values."""
        copied = copy.copy(self)
        for name, value in changes.items():
            setattr(copied, name, value)
        return copied
