"""Which backend serves a request."""

import importlib
import importlib.util
import json
import logging
import threading
from collections.abc import Callable

import msgspec

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import Backend, Compiled, GrammarError
from quire.structured_output.schema.metaschema import schema_fault, tag_fault
from quire.structured_output.schema.simplify import simpler, simpler_tag
from quire.structured_output.vocabulary import Vocabulary
from quire.structured_output.watched import watched

logger = logging.getLogger("quire")

# name -> our module and class, the library's module, and the package to install
BACKENDS = {
    "xgrammar": ("quire.structured_output.backends.xgrammar", "XGrammarBackend", "xgrammar", "xgrammar"),
    "guidance": ("quire.structured_output.backends.guidance", "GuidanceBackend", "llguidance", "llguidance"),
    "outlines": ("quire.structured_output.backends.outlines", "OutlinesBackend", "outlines_core", "outlines_core"),
    "lm-format-enforcer": (
        "quire.structured_output.backends.enforcer",
        "EnforcerBackend",
        "lmformatenforcer",
        "lm-format-enforcer",
    ),
}


class BackendRegistry:
    """Backends are made on first use: their libraries, and the tokenizer, are loaded only for who needs them."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], default: str = "auto") -> None:
        self._load_vocabulary = load_vocabulary
        self._default = default
        self._vocabulary: Vocabulary | None = None
        self._made: dict[str, Backend] = {}
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:  # the engine's thread asks too, and must not wait while a backend is made
            with self._lock:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def prepare(self) -> None:
        """Make the backend that was named, on a thread of its own: importing XGrammar takes a second or two."""
        if self._default != "auto" and installed(self._default):
            threading.Thread(target=self._get, args=(self._default,), name="quire-grammar", daemon=True).start()

    def asked(self, spec: StructuredOutputsParams) -> str:
        return spec.backend or self._default

    def compile(self, spec: StructuredOutputsParams) -> Compiled:
        """By the backend that was asked for, or with `auto` by the first that keeps the request exactly."""
        asked = self.asked(spec)
        if spec.kind in ("json", "structural_tag"):
            spec = _simplified(spec)
        refusals = []
        for name in _automatic(spec.disable_fallback) if asked == "auto" else [asked]:
            if not installed(name):
                refusals.append(f"{name} is not installed (pip install {BACKENDS[name][3]})")
                continue
            backend = self._get(name)
            reason = backend.refusal(spec)
            if reason is None:
                try:
                    compiled = watched(backend.compile(spec), self.vocabulary)
                except GrammarError as error:
                    reason = str(error)
                else:
                    logger.debug("structured output: %s serves a request's %s", name, spec.kind)
                    return compiled
            refusals.append(f"{name}: {reason}")
        raise GrammarError(f"the {spec.kind} cannot be enforced ({'; '.join(refusals)})")

    def _get(self, name: str) -> Backend:
        vocabulary = self.vocabulary
        with self._lock:
            if name not in self._made:
                module, cls, *_ = BACKENDS[name]
                self._made[name] = getattr(importlib.import_module(module), cls)(vocabulary)
            return self._made[name]


def _simplified(spec: StructuredOutputsParams) -> StructuredOutputsParams:
    given = json.loads(getattr(spec, spec.kind))
    fault = schema_fault(given) if spec.kind == "json" else tag_fault(given)
    if fault is not None:
        raise GrammarError(f"the {spec.kind} is not valid JSON Schema: {fault}")
    try:
        schema = simpler(given) if spec.kind == "json" else simpler_tag(given)
    except (TypeError, ValueError, AttributeError):
        return spec  # an unknown keyword's value got in the way: a library will say which
    if schema is False:
        raise GrammarError("the json cannot be enforced (the schema allows no value)")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return msgspec.structs.replace(spec, **{spec.kind: text})


def _automatic(first_only: bool) -> list[str]:
    """The two that are quick; the others where neither is installed."""
    quick = [name for name in ("xgrammar", "guidance") if installed(name)]
    names = quick or [name for name in BACKENDS if installed(name)] or ["xgrammar"]
    return names[:1] if first_only else names


def installed(name: str) -> bool:
    return importlib.util.find_spec(BACKENDS[name][2]) is not None
