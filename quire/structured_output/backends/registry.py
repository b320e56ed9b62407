"""Selects the backend that serves a request."""

import importlib
import importlib.util
import json
import logging
import threading
from collections.abc import Callable

import msgspec

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import Backend, CompiledGrammar, GrammarError
from quire.structured_output.schema.metaschema import schema_fault, tag_fault
from quire.structured_output.schema.simplify import simplify, simplify_tag
from quire.structured_output.time_budget import with_time_budget
from quire.structured_output.vocabulary import Vocabulary

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
    """Creates backends on first use: their libraries and the tokenizer are loaded only when needed."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], default: str = "auto") -> None:
        self._load_vocabulary = load_vocabulary
        self._default = default
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:  # outside the lock: the engine's thread must not wait while a backend is created
            with self._lock:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def prepare(self) -> None:
        """Create the configured backend on a background thread: importing XGrammar takes a second or two."""
        if self._default != "auto" and installed(self._default):
            threading.Thread(target=self._get, args=(self._default,), name="quire-grammar", daemon=True).start()

    def backend_name(self, spec: StructuredOutputsParams) -> str:
        return spec.backend or self._default

    def compile(self, spec: StructuredOutputsParams) -> CompiledGrammar:
        """With the requested backend, or for `auto` with the first that enforces the request exactly."""
        requested = self.backend_name(spec)
        if spec.kind in ("json", "structural_tag"):
            spec = _simplified(spec)
        refusals = []
        for name in _automatic(spec.disable_fallback) if requested == "auto" else [requested]:
            if not installed(name):
                refusals.append(f"{name} is not installed (pip install {BACKENDS[name][3]})")
                continue
            backend = self._get(name)
            reason = backend.refusal(spec)
            if reason is None:
                try:
                    compiled = with_time_budget(backend.compile(spec), self.vocabulary)
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
            if name not in self._backends:
                module, cls, *_ = BACKENDS[name]
                self._backends[name] = getattr(importlib.import_module(module), cls)(vocabulary)
            return self._backends[name]


def _simplified(spec: StructuredOutputsParams) -> StructuredOutputsParams:
    given = json.loads(getattr(spec, spec.kind))
    fault = schema_fault(given) if spec.kind == "json" else tag_fault(given)
    if fault is not None:
        raise GrammarError(f"the {spec.kind} is not valid JSON Schema: {fault}")
    try:
        schema = simplify(given) if spec.kind == "json" else simplify_tag(given)
    except (TypeError, ValueError, AttributeError):
        return spec  # an unknown keyword with an unexpected value: the backend will report it
    if schema is False:
        raise GrammarError("the json cannot be enforced (the schema allows no value)")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return msgspec.structs.replace(spec, **{spec.kind: text})


def _automatic(first_only: bool) -> list[str]:
    """The two fast ones; the others only if neither is installed."""
    fast = [name for name in ("xgrammar", "guidance") if installed(name)]
    names = fast or [name for name in BACKENDS if installed(name)] or ["guidance"]
    return names[:1] if first_only else names


def installed(name: str) -> bool:
    return importlib.util.find_spec(BACKENDS[name][2]) is not None
