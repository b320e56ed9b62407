"""Options of speculative decoding."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.fields import internal, option, require_object, validate
from quire.config.shown import shown
from quire.config.values import finite_number, whole_number
from quire.config.vllm.draft_keys import METHODS_NOT_YET, settle_keys

MAX_DRAFTS = 32
# By method, the drafts of a row where nothing says how many. Matches are long or none, and cost next to nothing to
# find, so the most that a step verifies cheaply; a draft model or head pays for each of its drafts, and of the fourth
# and later ones few are right. Adaptivity plans fewer where these do not pay.
DEFAULT_DRAFTS = {
    "ngram": 8,
    "suffix": 16,
    "draft_model": 4,
    "medusa": 4,
    "eagle": 3,
    "eagle3": 3,
    "mtp": 1,
}
OWN_DRAFTS = 3  # of a proposer of the user's own
NEED_MODEL = ("draft_model", "medusa", "eagle", "eagle3")
SAMPLE_METHODS = ("greedy", "probabilistic")
KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
    "quantization",
    "max_model_len",
    "revision",
    "draft_sample_method",
)


@dataclass
class SpeculativeConfig:
    """Speculative decoding."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4}; methods: '
        f"{', '.join(DEFAULT_DRAFTS)}, or a proposer of your own as module:Class",
    )
    spec_method: str | None = option(None, "the method of --speculative-config; on by this flag alone")
    spec_model: str | None = option(None, "the draft model or head of --speculative-config: a folder, or a hub id")
    spec_tokens: int | None = option(
        None, "drafts that a row verifies in a step, at most; default: by the method", minimum=1, maximum=MAX_DRAFTS
    )
    spec_adaptive: bool = option(
        True, "fewer drafts, or none, where measured acceptance and the cost of a step say that they do not pay"
    )

    # What follows is filled in from the options.
    method: str | None = internal()
    num_drafts: int = internal(0)  # the most that a row verifies in a step
    model: str | None = internal()
    prompt_lookup_min: int = internal(0)
    prompt_lookup_max: int = internal(0)
    suffix_decoding_max_tree_depth: int = internal(0)
    suffix_decoding_max_cached_requests: int = internal(0)
    suffix_decoding_max_spec_factor: float = internal(0.0)
    suffix_decoding_min_token_prob: float = internal(0.0)
    quantization: str | None = internal()
    max_model_len: int | None = internal()
    revision: str | None = internal()
    draft_sample_method: str = internal("greedy")
    # Of the draft model, when it is resolved.
    hf_config: dict[str, Any] = internal({})

    def __post_init__(self) -> None:
        validate(self)
        require_object("speculative_config", self.speculative_config)
        given = settle_keys(self._merged(), KEYS)
        if not given:
            return
        self.model, self.method = _text(given, "model"), _text(given, "method")
        if self.method is None and self.model in ("ngram", "[ngram]", "suffix"):
            self.method, self.model = self.model.strip("[]"), None
        self.method = _canonical(self.method)
        self._check_method()
        count = given.get("num_speculative_tokens")
        if count is not None:
            self.num_drafts = _whole("num_speculative_tokens", count, 1, MAX_DRAFTS)
        elif self.method is not None:
            self.num_drafts = DEFAULT_DRAFTS.get(self.method, OWN_DRAFTS)
        self._read_lookup(given)
        self.quantization, self.revision = _text(given, "quantization"), _text(given, "revision")
        if "max_model_len" in given:
            self.max_model_len = _whole("max_model_len", given["max_model_len"])
        self.draft_sample_method = given.get("draft_sample_method", "greedy")
        if self.draft_sample_method not in SAMPLE_METHODS:
            raise ValueError(
                f"speculative_config: draft_sample_method is {shown(self.draft_sample_method)}; "
                f"allowed: {', '.join(SAMPLE_METHODS)}"
            )

    @property
    def adaptive(self) -> bool:
        return self.spec_adaptive

    @property
    def num_is_given(self) -> bool:
        return self._merged().get("num_speculative_tokens") is not None

    def resolved(self, method: str, num_drafts: int, hf_config: dict[str, Any]) -> "SpeculativeConfig":
        """With what the draft model's config says."""
        given = self._merged() | {"method": method, "num_speculative_tokens": num_drafts}
        return dataclasses.replace(
            self, speculative_config=given, spec_method=None, spec_model=None, spec_tokens=None, hf_config=hf_config
        )

    def _merged(self) -> dict[str, Any]:
        """speculative_config, and the flags of single keys."""
        given = dict(self.speculative_config or {})
        flags = {
            "method": self.spec_method,
            "model": self.spec_model,
            "num_speculative_tokens": self.spec_tokens,
        }
        for key, value in flags.items():
            if value is not None and given.get(key) not in (None, value):
                raise ValueError(f"speculative_config has {key} {given[key]!r}, a flag has {value!r}; give one of them")
        given |= {key: value for key, value in flags.items() if value is not None}
        if any(value is not None for value in given.values()) and not (given.get("method") or given.get("model")):
            raise ValueError(
                f"speculative_config has {shown(given)}; it needs a method ({', '.join(DEFAULT_DRAFTS)}, or your own "
                "as module:Class) or a model (--spec-method, --spec-model)"
            )
        return given

    def _check_method(self) -> None:
        method = self.method
        if method is None:
            return  # the model's config says it
        if method in METHODS_NOT_YET:
            raise ValueError(f"not available yet: the method {method}; allowed: {', '.join(DEFAULT_DRAFTS)}")
        if method not in DEFAULT_DRAFTS and ":" not in method:
            raise ValueError(
                f"speculative_config: method is {shown(method)}; allowed: {', '.join(DEFAULT_DRAFTS)}, or a proposer "
                "of your own as 'module:Class'"
            )
        if method in NEED_MODEL and self.model is None:
            raise ValueError(f"speculative_config: method {method} needs a model: a folder or a hub id (--spec-model)")

    def _read_lookup(self, given: Mapping[str, Any]) -> None:
        low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        # As in vLLM one of them alone is both. Two tokens are enough: rows of chance matches soon get fewer drafts.
        low, high = low or high or 2, high or low or 4
        self.prompt_lookup_min = _whole("prompt_lookup_min", low)
        self.prompt_lookup_max = _whole("prompt_lookup_max", high)
        if low > high:
            raise ValueError(f"speculative_config: prompt_lookup_min is {low}; at most prompt_lookup_max, {high}")
        suffix = {key: value for key, value in given.items() if key.startswith("suffix_")}
        depth, requests = "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"
        factor, probability = "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"
        self.suffix_decoding_max_tree_depth = _whole(depth, suffix.get(depth, 24))
        self.suffix_decoding_max_cached_requests = _whole(requests, suffix.get(requests, 10_000), 0)
        self.suffix_decoding_max_spec_factor = finite_number(
            f"speculative_config: {factor}", suffix.get(factor, 1.0), 0
        )
        least = finite_number(f"speculative_config: {probability}", suffix.get(probability, 0.1), maximum=1)
        if least < 0:
            raise ValueError(f"speculative_config: {probability} is {least}; it must be between 0 and 1")
        self.suffix_decoding_min_token_prob = least


def _text(given: Mapping[str, Any], key: str) -> str | None:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"speculative_config: {key} is {shown(value)}; it must be a text")
    return value


def _whole(key: str, value: Any, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
    return whole_number(f"speculative_config: {key}", value, minimum, maximum)


def _canonical(method: str | None) -> str | None:
    """vLLM's names of the same: by place, and by family."""
    if method == "ngram_gpu":
        return "ngram"
    return "mtp" if method is not None and method.endswith("_mtp") else method
