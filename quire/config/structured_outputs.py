"""How output in a given form is made."""

from dataclasses import dataclass
from typing import Any

from quire.config.fields import option, validate

BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")


@dataclass
class StructuredOutputsConfig:
    """Output in a given form."""

    structured_outputs_backend: str = option(
        "auto", "grammar library; auto takes one that keeps the request exactly", choices=BACKENDS
    )
    structured_outputs_compile_seconds: float = option(
        10.0, "a grammar that takes longer to compile is refused", minimum=0.01
    )
    structured_outputs_max_queue: int | None = option(
        None,
        "most grammars that wait for a compiler, one more is refused as busy; default: 64 for `quire serve`, else none",
        minimum=1,
    )
    structured_outputs_queue_seconds: float | None = option(
        None,
        "seconds that a request waits for a compiler before it is refused as busy; default: 30 for `quire serve`",
        minimum=0.01,
    )
    structured_outputs_cache_bytes: int = option(1 << 28, "memory for compiled grammars", minimum=0)

    def __post_init__(self) -> None:
        validate(self)


def backend_of(config: Any) -> dict[str, Any]:
    """vLLM's structured_outputs_config: a mapping, of which only the backend matters here."""
    given = dict(config or {}) if config is None or isinstance(config, dict) else vars(config)
    unknown = given.keys() - {"backend"}
    if unknown:
        raise ValueError(f"structured_outputs_config has {sorted(unknown)}; only 'backend' is taken")
    return {"structured_outputs_backend": given["backend"]} if given.get("backend") else {}
