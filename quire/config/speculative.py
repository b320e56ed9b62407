"""Options of speculative decoding."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, require_object, validate

MAX_DRAFTS = 16
HEADS = ("medusa", "eagle", "eagle3", "mtp")
DRAFT_MODEL_KEYS = ("model", "quantization", "max_model_len", "revision", "draft_sample_method")


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
        if not isinstance(self.method, str) or (":" not in self.method and self.method not in (*HEADS, "draft_model")):
            raise ValueError(
                f"speculative_config: method is {self.method!r}, which is not available yet; allowed: a proposer of "
                "your own as 'module:Class'"
            )
        unknown = given.keys() - {"method", "num_speculative_tokens", *DRAFT_MODEL_KEYS}
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
    def model(self) -> str | None:
        return (self.speculative_config or {}).get("model")

    @property
    def quantization(self) -> str | None:
        return (self.speculative_config or {}).get("quantization")

    @property
    def max_model_len(self) -> int | None:
        return (self.speculative_config or {}).get("max_model_len")

    @property
    def revision(self) -> str | None:
        return (self.speculative_config or {}).get("revision")

    @property
    def draft_sample_method(self) -> str:
        return (self.speculative_config or {}).get("draft_sample_method", "greedy")

    @property
    def hf_config(self) -> dict[str, Any]:
        return {}
