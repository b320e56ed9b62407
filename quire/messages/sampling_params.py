"""Sampling parameters of a request."""

import copy
import enum
import itertools
from typing import Any

import msgspec

from quire.config.shown import shown
from quire.messages.checks import (
    check,
    check_bool,
    check_count,
    check_finite,
    check_int,
    check_plain,
    check_text,
    check_tokens,
)
from quire.messages.structured import StructuredOutputsParams, as_structured

GREEDY_EPSILON = 1e-5  # below this a temperature means greedy, as in vLLM
ALL_LOGPROBS = -1  # of the whole vocabulary
MAX_N = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_PATTERN = 512
MAX_TEMPERATURE = 1e4  # a higher one makes all tokens equally likely
MAX_COUNT = 2**31 - 1  # of tokens
MAX_ALLOWED_TOKEN_IDS = 1 << 20  # larger than any vocabulary
MAX_TAG_TOKENS = 256  # of a reasoning tag
MAX_VISIBLE_TOKEN_IDS = 4096
MOST_ENTRIES = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "bad_words": MAX_BAD_WORDS}
SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


class RequestOutputKind(enum.IntEnum):
    CUMULATIVE = 0  # every output holds all tokens so far
    DELTA = 1  # every output holds the new tokens
    FINAL_ONLY = 2  # one output, at the end


class RepetitionDetection(msgspec.Struct, kw_only=True):
    """Finish a request whose last tokens repeat one pattern of min_pattern_size to max_pattern_size tokens min_count
    times."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        check_int("min_pattern_size", self.min_pattern_size, 1, MAX_PATTERN)
        check_int("max_pattern_size", self.max_pattern_size, self.min_pattern_size, MAX_PATTERN)
        check_int("min_count", self.min_count, 2, MAX_COUNT)


class ReasoningTokens(msgspec.Struct, kw_only=True):
    """The tokens of a model's reasoning tags."""

    start: list[int]
    end: list[int]
    open: bool | None = None  # whether the output starts inside the reasoning; None: it may begin with `start`

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            check(bool(getattr(self, name)), name, [], "a list of at least one token id")
            check_tokens(name, getattr(self, name), MAX_TAG_TOKENS)
        if self.open is not None:
            check_bool("open", self.open)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, tag=True):
    """Names, defaults and meaning follow vLLM. Every value is checked here, with its range in the error."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    bad_words: list[str] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until the model's limit
    min_tokens: int = 0
    logprobs: int | None = None  # -1: all
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep the last N; -1: up to the model's limit
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    extra_args: dict[str, Any] | None = None  # for custom logits processors

    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None  # vLLM's deprecated name

    thinking_token_budget: int | None = None  # reasoning tokens before the end tag is forced

    # Filled in by the front end, which has the tokenizer and the model's format
    bad_words_token_ids: list[list[int]] = []
    visible_token_ids: list[int] = []  # special tokens that are not skipped in the text
    reasoning: ReasoningTokens | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name, most in MOST_ENTRIES.items():
            setattr(self, name, as_list(name, getattr(self, name) or [], most))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = as_list("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if isinstance(self.repetition_detection, dict):
            check_count("repetition_detection", self.repetition_detection, len(RepetitionDetection.__struct_fields__))
            try:
                self.repetition_detection = RepetitionDetection(**self.repetition_detection)
            except TypeError:
                names = "max_pattern_size, min_pattern_size and min_count"
                raise ValueError(f"repetition_detection has {names}; the first is required") from None
        for name, kind in (("repetition_detection", RepetitionDetection), ("reasoning", ReasoningTokens)):
            value = getattr(self, name)
            check(value is None or isinstance(value, kind), name, value, f"None or {kind.__name__}")
        if self.logit_bias is not None:
            self.logit_bias = as_bias(self.logit_bias)
        if self.extra_args is not None:
            check(isinstance(self.extra_args, dict), "extra_args", self.extra_args, "a mapping of names to values")
            check_plain("extra_args", self.extra_args)
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise ValueError(f"output_kind is {shown(self.output_kind)}; it must be a RequestOutputKind") from None
        for name in SWITCHES:
            check_bool(name, getattr(self, name))
        self._merge_structured()
        self._check_numbers()
        self._check_tokens()
        self._check_stops()
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} with temperature 0: greedy outputs would all be equal; use n=1")

    def _merge_structured(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise ValueError("guided_decoding is a deprecated name of structured_outputs; give only one of them")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self.structured_outputs = as_structured(self.structured_outputs)
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids cannot be combined with structured_outputs: no token might be left")

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            check_finite(name, getattr(self, name))
        check_int("n", self.n, 1, MAX_N)
        hottest = f"between 0 (greedy) and {MAX_TEMPERATURE:g}"
        check(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, hottest)
        check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "between -2 and 2")
        ok = 0.01 <= self.repetition_penalty <= 100
        check(ok, "repetition_penalty", self.repetition_penalty, "between 0.01 and 100 (1 is none)")
        check_int("top_k", self.top_k, -1, MAX_COUNT, "-1 or 0 (all tokens), or 1 and more")
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), ALL_LOGPROBS, MAX_COUNT, "0 or more, or -1 for all")
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        check_truncation(self.truncate_prompt_tokens)

    def _check_tokens(self) -> None:
        check_tokens("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "None or a list of at least one token id")
            check_tokens("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        check_tokens("visible_token_ids", self.visible_token_ids, MAX_VISIBLE_TOKEN_IDS)
        check(isinstance(self.bad_words_token_ids, list), "bad_words_token_ids", self.bad_words_token_ids, "a list")
        check_count("bad_words_token_ids", self.bad_words_token_ids, 2 * MAX_BAD_WORDS)
        for word in self.bad_words_token_ids:
            check_tokens("bad_words_token_ids", word, 4 * MAX_BAD_WORD_LENGTH)
        if self.logit_bias:
            check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            for token, bias in self.logit_bias.items():
                check_int("logit_bias", token, 0, MAX_COUNT, "token ids of 0 or more")
                check_finite("logit_bias", bias)
                check(-100 <= bias <= 100, "logit_bias", bias, "between -100 and 100")

    def _check_stops(self) -> None:
        for name, most, longest in (
            ("stop", MAX_STOP_STRINGS, MAX_STOP_LENGTH),
            ("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
        ):
            texts = getattr(self, name)
            check_count(name, texts, most)
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{name} has {shown(text)}; its entries must be non-empty strings")
                if len(text) > longest:
                    raise ValueError(f"{name} has an entry of {len(text)} characters; at most {longest} are allowed")
                check_text(name, text, longest)
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are matched in the text: they need detokenize=True")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    def replace(self, **changes: Any) -> "SamplingParams":
        """A copy with other values, validated."""
        return msgspec.structs.replace(self, **changes)

    def replace_unchecked(self, **changes: Any) -> "SamplingParams":
        """A copy with trusted values: validating a long list of tokens again would cost milliseconds."""
        copied = copy.copy(self)
        for name, value in changes.items():
            setattr(copied, name, value)
        return copied


def check_truncation(count: Any) -> None:
    if count is not None:
        allowed = "1 or more, or -1 for the model's limit"
        check_int("truncate_prompt_tokens", count, -1, MAX_COUNT, allowed)
        check(count != 0, "truncate_prompt_tokens", 0, allowed)


def as_list(name: str, values: Any, most: int) -> list[Any]:
    """A copy as a list of at most `most` entries."""
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} is {shown(values)}; it must be a list")
    if not hasattr(values, "__len__"):
        values = list(itertools.islice(values, most + 1))
    check_count(name, values, most)
    return list(values)


def as_bias(values: Any) -> dict[int, float]:
    """JSON keys are strings: "5" counts as 5."""
    if not isinstance(values, dict):
        raise ValueError(f"logit_bias is {shown(values)}; it must be a mapping of token ids to numbers")
    check_count("logit_bias", values, MAX_LOGIT_BIAS)
    try:
        return {int(token) if isinstance(token, str) else token: bias for token, bias in values.items()}
    except ValueError:
        raise ValueError("logit_bias has a key that is not a token id; it must map token ids to numbers") from None
