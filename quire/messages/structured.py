"""Structured-output parameters of a request: exactly one kind of constraint; cheap checks are made here."""

import json
from typing import Any

import msgspec

from quire.config.shown import oversize_reason, shown, shown_keys
from quire.config.structured_outputs import BACKENDS

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
# The HTTP API's structured-output fields; errors name the one that was used.
FIELDS = (
    "structured_outputs",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tool_choice",
)
SWITCHES = ("json_object", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")
MAX_TEXT = 256 * 1024  # bytes of a schema, grammar, structural tag, or all choices together
MAX_REGEX = 8 * 1024
MAX_CHOICES = 4096
MAX_DEPTH = 64  # of nested objects and lists in a schema


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """vLLM's names. `json` is a schema, as an object or as JSON text; `grammar` is EBNF (`root ::= ...`) or Lark
    (`start: ...`)."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None  # between JSON tokens
    structural_tag: Any = None
    backend: str | None = None  # default: the engine's
    disable_fallback: bool = False  # with backend "auto": only the first choice

    field: str = "structured_outputs"  # the request's field, for errors
    checked: bool = False

    def __post_init__(self) -> None:
        if self.checked:  # it was received from another process
            return
        if self.json is False:
            self._refuse("the schema false allows no output")
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            self._refuse(f"exactly one of {', '.join(KINDS)} must be given, got {found}")
        if self.backend is not None and self.backend not in BACKENDS:
            self._refuse(f"backend is {shown(self.backend)}; allowed: {', '.join(BACKENDS)}")
        for name in SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "json_object" and value is None):
                self._refuse(f"{name} is {shown(value)}; it must be true or false")
        if self.json is not None:
            self.json = self._json_text("json", self.json, (dict, bool))
        if self.structural_tag is not None:
            self.structural_tag = self._json_text("structural_tag", self.structural_tag, (dict,))
        for name, longest in (("regex", MAX_REGEX), ("grammar", MAX_TEXT), ("whitespace_pattern", MAX_REGEX)):
            if getattr(self, name) is not None:
                self._check_text(name, getattr(self, name), longest)
        if self.choice is not None:
            self._check_choice(self.choice)
        self.checked = True

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """The source to compile."""
        value = getattr(self, self.kind)
        if self.kind == "json_object":
            return '{"type":"object"}'
        return json.dumps(value, ensure_ascii=False) if self.kind == "choice" else str(value)

    def key(self, backend: str) -> tuple[object, ...]:
        """A cache key: equal if the compiled grammar is."""
        options = (self.whitespace_pattern, self.disable_any_whitespace, self.disable_additional_properties)
        return (backend, self.kind, self.text, *options)

    def _json_text(self, name: str, value: Any, types: tuple[type, ...]) -> str:
        if isinstance(value, str):
            self._check_text(name, value, MAX_TEXT)
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                self._refuse(f"{name} is not valid JSON: {error}")
        if not isinstance(value, types):
            self._refuse(f"{name} must be a JSON object, got {type(value).__name__}")
        if reason := oversize_reason(value, MAX_TEXT, MAX_DEPTH):
            self._refuse(f"{name} {reason}")
        try:
            # The order of properties is the order in which they are generated.
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            self._refuse(f"{name} cannot be written as JSON: {error}")
        self._check_text(name, text, MAX_TEXT)
        return text

    def _check_choice(self, choice: Any) -> None:
        if isinstance(choice, list) and len(choice) > MAX_CHOICES:
            self._refuse(f"choice has {len(choice)} entries; at most {MAX_CHOICES} are allowed")
        if not isinstance(choice, list) or not choice or not all(isinstance(c, str) and c for c in choice):
            self._refuse("choice must be a non-empty list of non-empty strings")
        self._check_text("choice", "".join(choice), MAX_TEXT)

    def _check_text(self, name: str, text: Any, longest: int) -> None:
        if not isinstance(text, str) or not text:
            self._refuse(f"{name} must be a non-empty string")
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            self._refuse(f"{name} is not valid Unicode: it holds half of a surrogate pair")
        if size > longest:
            self._refuse(f"{name} has {size} bytes; at most {longest} are allowed")

    def _refuse(self, reason: str) -> None:
        raise ValueError(f"{self.field}: {reason}")


def as_structured(value: Any) -> StructuredOutputsParams | None:
    """Also accepts a dict with the same keys."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"structured_outputs is {shown(value)}; it must be StructuredOutputsParams or a mapping")
    allowed = [name for name in StructuredOutputsParams.__struct_fields__ if name not in ("field", "checked")]
    if any(key not in allowed for key in value):
        names = shown_keys(key for key in value if key not in allowed)
        raise ValueError(f"structured_outputs has unknown keys {names}; allowed: {', '.join(allowed)}")
    return StructuredOutputsParams(**value)
