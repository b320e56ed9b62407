"""Options of structured output."""

from dataclasses import dataclass

from quire.config.fields import option, validate

BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")


@dataclass
class StructuredOutputsConfig:
    """Structured output."""

    structured_outputs_backend: str = option(
        "auto", "grammar library; auto: one that enforces the request exactly", choices=BACKENDS
    )
    structured_outputs_disable_any_whitespace: bool = option(False, "JSON of all requests without spaces and newlines")
    structured_outputs_disable_additional_properties: bool = option(
        False, "objects of all requests have the properties of their schema only"
    )
    structured_outputs_compile_seconds: float = option(10.0, "limit of a grammar's compile time", minimum=0.01)
    structured_outputs_max_queue: int | None = option(
        None,
        "most grammars queued for a compiler, beyond it a busy error; default: 64 for `quire serve`, else no limit",
        minimum=1,
    )
    structured_outputs_queue_seconds: float | None = option(
        None,
        "seconds that a request may be queued for a compiler before a busy error; default: 30 for `quire serve`",
        minimum=0.01,
    )
    structured_outputs_cache_bytes: int = option(1 << 28, "memory for compiled grammars", minimum=0)

    def __post_init__(self) -> None:
        validate(self)
