"""How a request wants its tokens chosen."""

import enum
import math
from typing import Any

import msgspec

GREEDY_EPSILON = 1e-5  # below this a temperature means greedy, as in vLLM
MAX_STOP_TOKEN_IDS = 256
MAX_N = 1024


class RequestOutputKind(enum.IntEnum):
    CUMULATIVE = 0  # every output holds all tokens so far
    DELTA = 1  # every output holds the new tokens
    FINAL_ONLY = 2  # one output, at the end


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Names, defaults and meaning follow vLLM. Every value is checked here, with its range in the error."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16  # None: until the model's limit
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        self.stop_token_ids = list(self.stop_token_ids or [])
        check_int("n", self.n, 1, MAX_N)
        check(self.temperature >= 0, "temperature", self.temperature, "0 or more (0 is greedy)")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        check_int("top_k", self.top_k, -1, None, "-1 or 0 (all tokens), or 1 and more")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, None)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS}")
        for token in self.stop_token_ids:
            check_int("stop_token_ids", token, 0, 2**31 - 1, "token ids of 0 or more")
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} with temperature 0: greedy outputs would all be equal; use n=1")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    def replace(self, **changes: Any) -> "SamplingParams":
        return msgspec.structs.replace(self, **changes)


def check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")


def check_int(name: str, value: Any, low: int, high: int | None, allowed: str | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    default = f"a whole number of {low} or more" if high is None else f"a whole number between {low} and {high}"
    check(ok, name, value, allowed or default)
