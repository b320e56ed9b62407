"""Parameters of a request that pools: its result is a vector made of the prompt's hidden states, not text."""

import copy
from typing import Any

import msgspec

from quire.config.pooling import REMOVED_TASKS, TASKS
from quire.messages.checks import MAX_TOKEN_ID, check, check_bool, check_int, check_tokens
from quire.messages.sampling_params import MAX_COUNT, check_truncation

MAX_RETURNED = 4096  # token ids
# From this bit on, a token id of a prompt holds the token's segment, for models with token types (BERT's pairs).
TOKEN_TYPE_SHIFT = 28


class PoolingParams(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Names and meaning follow vLLM. None means the default of the task or the model."""

    task: str | None = None  # embed or classify: one result for the prompt; token_embed, token_classify: for each token
    pooling_type: str | None = None  # LAST, MEAN or CLS, or a registered one; default: the model's
    dimensions: int | None = None  # keep the first ones of the vector
    use_activation: bool | None = None  # scale vectors to length 1, make classes probabilities; default: as the model
    normalize: bool | None = None  # a former name of use_activation
    truncate_prompt_tokens: int | None = None  # keep the first N; -1: up to the model's limit
    step_tag_id: int | None = None  # of token_classify: the tokens that get a result
    returned_token_ids: list[int] | None = None  # of token_classify: the columns to return
    skip_reading_prefix_cache: bool | None = None  # compute the whole prompt; default: if pooling_type needs that

    def __post_init__(self) -> None:
        if self.task in REMOVED_TASKS:
            raise ValueError(f"task {self.task!r} is now {REMOVED_TASKS[self.task]}")
        check(self.task is None or self.task in TASKS, "task", self.task, f"None or one of: {', '.join(TASKS)}")
        check(
            self.pooling_type is None or isinstance(self.pooling_type, str),
            "pooling_type",
            self.pooling_type,
            "None or the name of a pooling method",
        )
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1, MAX_COUNT)
        if self.step_tag_id is not None:
            check_int("step_tag_id", self.step_tag_id, 0, MAX_TOKEN_ID)
        if self.returned_token_ids is not None:
            check_tokens("returned_token_ids", self.returned_token_ids, MAX_RETURNED)
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

    def clone(self) -> "PoolingParams":
        return copy.deepcopy(self)
