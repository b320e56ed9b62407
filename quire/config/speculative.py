"""Options of speculative decoding."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, require_object, validate

MAX_DRAFTS = 16
METHODS = ("ngram", "suffix")


@dataclass
class SpeculativeConfig:
    """Speculative decoding."""

    speculative_config: dict[str, Any] | None = option(
        None,
        'speculative decoding, as JSON: {"method": "module:Class", "num_speculative_tokens": 3}, with a proposer of '
        "your own",
    )

    def __post_init__(self) -> None:
        validate(self)
        require_object("speculative_config", self.speculative_config)
        given = self.speculative_config or {}
        if not given:
            return
        if not isinstance(self.method, str) or (":" not in self.method and self.method not in METHODS):
            raise ValueError(
                f"speculative_config: method is {self.method!r}, which is not available yet; allowed: a proposer of "
                "your own as 'module:Class'"
            )
        unknown = given.keys() - {"method", "num_speculative_tokens"}
        unknown -= {key for key in given if key.startswith(("prompt_lookup_", "suffix_decoding_"))}
        if unknown:
            raise ValueError(f"speculative_config has {sorted(unknown)}; allowed: method, num_speculative_tokens")
        count = given.get("num_speculative_tokens")
        if not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS:
            raise ValueError(
                f"speculative_config: num_speculative_tokens is {count!r}; it must be between 1 and {MAX_DRAFTS}"
            )

    @property
    def method(self) -> str | None:
        return (self.speculative_config or {}).get("method")

    @property
    def num_drafts(self) -> int:
        """The most drafts that a row verifies in a step."""
        return (self.speculative_config or {}).get("num_speculative_tokens", 0)

    @property
    def prompt_lookup_min(self) -> int:
        given = self.speculative_config or {}
        return given.get("prompt_lookup_min") or given.get("prompt_lookup_max") or 3

    @property
    def prompt_lookup_max(self) -> int:
        given = self.speculative_config or {}
        return given.get("prompt_lookup_max") or given.get("prompt_lookup_min") or 5

    @property
    def suffix_decoding_max_tree_depth(self) -> int:
        return (self.speculative_config or {}).get("suffix_decoding_max_tree_depth", 24)

    @property
    def suffix_decoding_max_cached_requests(self) -> int:
        return (self.speculative_config or {}).get("suffix_decoding_max_cached_requests", 10_000)

    @property
    def suffix_decoding_max_spec_factor(self) -> float:
        return (self.speculative_config or {}).get("suffix_decoding_max_spec_factor", 1.0)

    @property
    def suffix_decoding_min_token_prob(self) -> float:
        return (self.speculative_config or {}).get("suffix_decoding_min_token_prob", 0.1)
