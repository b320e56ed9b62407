"""Sampling parameters of a request."""

import copy
import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.config.shown import shown
from quire.messages.checks import (
    MAX_LOGIT_BIAS,
    as_bias,
    as_list,
    as_rows,
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
MAX_PATTERN = 512
MAX_TEMPERATURE = 1e4  # a higher one makes all tokens equally likely
MAX_COUNT = 2**31 - 1  # of tokens
MAX_ALLOWED_TOKEN_IDS = 1 << 20  # larger than any vocabulary
MAX_TAG_TOKENS = 256  # of a reasoning tag
MAX_VISIBLE_TOKEN_IDS = 4096
MAX_LOGPROB_TOKEN_IDS = 128
MOST_ENTRIES = {"stop": MAX_STOP_STRINGS, "stop_token_ids": MAX_STOP_TOKEN_IDS, "bad_words": MAX_BAD_WORDS}
SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
    "skip_clone",
    "_watermarking_skipped",
)
# Fields of features to come: their neutral values, and the feature.
UNAVAILABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "watermarks"),
    "routed_experts_prompt_start": ((0,), "the experts that tokens were routed to"),
    "trace_decode_token_ids": ((None,), "replayed outputs"),
}
# Fields for which `from_optional` reads None as their default.
NUMBERS = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p")


class RequestOutputKind(enum.IntEnum):
    CUMULATIVE = 0  # every output holds all tokens so far
    DELTA = 1  # every output holds the new tokens
    FINAL_ONLY = 2  # one output, at the end


class SamplingType(enum.IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RepetitionDetection(msgspec.Struct):
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
    budget_end: list[int] | None = None  # written where a budget ends it; None: `end`

    def __post_init__(self) -> None:
        for name in ("start", "end", *(() if self.budget_end is None else ("budget_end",))):
            check(bool(getattr(self, name)), name, [], "a list of at least one token id")
            check_tokens(name, getattr(self, name), MAX_TAG_TOKENS)
        if self.open is not None:
            check_bool("open", self.open)


class SamplingParams(msgspec.Struct, omit_defaults=True, tag=True):
    """Names, defaults, order and meaning follow vLLM. Every value is checked here, with its range in the error."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: Any = None  # not available yet
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None  # -1: none
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until the model's limit
    min_tokens: int = 0
    logprobs: int | None = None  # -1: all
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None  # candidates by prompt position; -1: none
    prompt_logprob_start: int | None = None  # the position that predicts the first scored token
    logprob_token_ids: list[int] | None = None  # in place of the likeliest
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # new tokens per output; the first and the last are not delayed
    skip_clone: bool = False
    output_text_buffer_length: int = 0  # not used: stop strings hold back no more than they must
    _eos_token_id: int | None = None
    _all_stop_token_ids: list[int] = []
    _watermarking_skipped: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None  # for custom logits processors
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []  # filled in by the front end, which has the tokenizer
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None  # reasoning tokens before the end tag is forced; -1: no limit
    repetition_detection: RepetitionDetection | None = None
    routed_experts_prompt_start: int = 0  # not available yet
    trace_decode_token_ids: list[int] | None = None  # not available yet

    # Not among vLLM's
    truncate_prompt_tokens: int | None = None  # keep the last N; -1: up to the model's limit
    guided_decoding: StructuredOutputsParams | None = None  # vLLM's deprecated name
    visible_token_ids: list[int] = []  # special tokens that are not skipped in the text; filled in by the front end
    reasoning: ReasoningTokens | None = None  # the same

    def __post_init__(self) -> None:
        self._normalize()
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
            value = getattr(self, name)
            if value is not False and value is not True:
                check_bool(name, value)
        if self.skip_reading_prefix_cache is not None:
            check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        self._merge_structured()
        self._check_numbers()
        self._check_tokens()
        self._check_stops()
        if self.n > 1 and self.greedy:
            raise ValueError(f"n is {self.n} with temperature 0: greedy outputs would all be equal; use n=1")

    def _normalize(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        later = (self.watermarking, self.routed_experts_prompt_start, self.trace_decode_token_ids)
        if later != (None, 0, None):
            for name, (neutral, feature) in UNAVAILABLE.items():
                if getattr(self, name) not in neutral:
                    raise ValueError(f"{name} is not available yet: {feature}; leave it out")
        self.routed_experts_prompt_start = 0  # it may have been False

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
        check_int("output_text_buffer_length", self.output_text_buffer_length, 0, MAX_COUNT)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), ALL_LOGPROBS, MAX_COUNT, "0 or more, or -1 for all")
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        if self.stream_interval is not None:
            check_int("stream_interval", self.stream_interval, 1, MAX_COUNT)
        if self.prompt_logprob_start is not None:
            check_int("prompt_logprob_start", self.prompt_logprob_start, 0, MAX_COUNT)
        check_truncation(self.truncate_prompt_tokens)

    def _check_tokens(self) -> None:
        check_tokens("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_tokens("_all_stop_token_ids", self._all_stop_token_ids, 2 * MAX_STOP_TOKEN_IDS)
        if self._eos_token_id is not None:
            check_int("_eos_token_id", self._eos_token_id, 0, MAX_COUNT)
        if self.allowed_token_ids is not None:
            check(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "None or a list of at least one token id")
            check_tokens("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.logprob_token_ids is not None:
            self.logprob_token_ids = as_list("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            check_tokens("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        if self.prompt_logprob_token_ids is not None:
            self.prompt_logprob_token_ids = as_rows("prompt_logprob_token_ids", self.prompt_logprob_token_ids)
        elif self.prompt_logprob_start is not None:
            raise ValueError("prompt_logprob_start says where prompt_logprob_token_ids begin; give those too")
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

    @property
    def num_logprobs(self) -> int | None:
        """How many logprobs each generated token has beside its own; None: not even that."""
        if self.logprob_token_ids:
            return len(self.logprob_token_ids)
        return self.logprobs

    @property
    def reads_prefix_cache(self) -> bool:
        """Logprobs of the prompt need all of it computed."""
        scored = self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None
        return not (self.skip_reading_prefix_cache or scored)

    @property
    def sampling_type(self) -> SamplingType:
        if self.greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        return {*self.stop_token_ids, *self._all_stop_token_ids}

    @staticmethod
    def from_optional(**given: Any) -> "SamplingParams":
        """None means the default where a number is required; biases are clamped to the allowed range."""
        kept = {name: value for name, value in given.items() if value is not None or name not in NUMBERS}
        if kept.get("logit_bias"):
            biases = as_bias(kept["logit_bias"]).items()
            kept["logit_bias"] = {token: min(100.0, max(-100.0, bias)) for token, bias in biases}
        return SamplingParams(**kept)

    @staticmethod
    def for_sampler_warmup() -> "SamplingParams":
        """Parameters that use every part of the sampler."""
        warpers: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "min_p": 0.1}
        penalties: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}
        edits: dict[str, Any] = {"min_tokens": 2, "logit_bias": {0: -1.0, 1: 0.5}, "bad_words_token_ids": [[0], [1, 2]]}
        return SamplingParams(**warpers, **penalties, **edits, logprobs=5, prompt_logprobs=1)

    def clone(self) -> "SamplingParams":
        return copy.copy(self) if self.skip_clone else copy.deepcopy(self)

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
        """Adds the model's end-of-sequence tokens. The engine knows them itself: for users' own code."""
        found = generation_config.get("eos_token_id")
        others = {*([found] if isinstance(found, int) else found or ())} - {eos_token_id}
        self._all_stop_token_ids = sorted({*self._all_stop_token_ids, *others, eos_token_id} - {None})
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
            self.stop_token_ids = list(dict.fromkeys([*self.stop_token_ids, *sorted(others)]))

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Tokenizes bad_words."""
        if self.bad_words:
            encode = functools.partial(tokenizer.encode, add_special_tokens=False)
            self.bad_words_token_ids = bad_word_tokens(self.bad_words, encode)

    def verify(self, model_config: Any, *_: Any) -> None:
        """Checks what depends on the model: token ids and the number of logprobs. The engine does so by itself."""
        self.check_logprobs(model_config.max_logprobs)
        for name in ("logit_bias", "allowed_token_ids", "logprob_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                last = model_config.vocab_size - 1
                check(token <= last, name, token, f"a token id of the model, 0 to {last}")

    def check_logprobs(self, most: int) -> None:
        """At most the engine's max_logprobs; -1: no limit."""
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and most != ALL_LOGPROBS and (count == ALL_LOGPROBS or count > most):
                requested = "all logprobs are requested" if count == ALL_LOGPROBS else f"{name} is {count}"
                raise ValueError(f"{requested}; at most {most} are allowed (--max-logprobs; -1: no limit)")

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


def bad_word_tokens(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Token sequences of each word, at the start of a text and after a space."""
    sequences: list[list[int]] = []
    for word in words:
        plain, spaced = word.lstrip(), " " + word.lstrip()
        for text in (plain, spaced) if plain else (word,):
            ids = encode(text)
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
