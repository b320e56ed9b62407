"""XGrammar: the fastest masks; serves schemas and regexes that it enforces exactly."""

import importlib
import json
import re
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError, first_line
from quire.structured_output.bitmask import is_set, make_bitmask
from quire.structured_output.schema.regexes import regex_unsupported_by_xgrammar, without_anchors
from quire.structured_output.schema.supported import schema_unsupported_by_xgrammar
from quire.structured_output.vocabulary import Vocabulary

COMPILE_THREADS = 1  # leave the cores to the engine's steps
# XGrammar accepts half of a surrogate pair, which is not UTF-8: tokens that contain or complete one are masked.
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
SURROGATE_START = b"\xed"
SURROGATE_SECOND_BYTES = range(0xA0, 0xC0)


class XGrammarBackend:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("xgrammar")  # lazily: an optional dependency
        self._lib = lib
        self._tokens = [b"" if SURROGATE.search(token) else token for token in vocabulary.tokens]
        self._known = make_bitmask([True] * vocabulary.size)  # XGrammar sets bits beyond the vocabulary
        # XGrammar accepts control characters other than line breaks in strings of limited length.
        self._printable = make_bitmask(CONTROL.search(token) is None for token in self._tokens)
        self._no_surrogate = make_bitmask(not token or token[0] not in SURROGATE_SECOND_BYTES for token in self._tokens)
        info = lib.TokenizerInfo(
            self._tokens,
            lib.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=[vocabulary.end_id],
            add_prefix_space=False,
        )
        self._compiler = lib.GrammarCompiler(info, max_threads=COMPILE_THREADS, cache_enabled=False)

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        if spec.whitespace_pattern is not None:
            return "it does not support whitespace_pattern"
        if spec.kind == "json":
            return schema_unsupported_by_xgrammar(json.loads(spec.json))
        if spec.kind == "regex":
            assert spec.regex is not None
            return regex_unsupported_by_xgrammar(spec.regex)
        if spec.kind == "structural_tag":
            return _tag_unsupported(json.loads(spec.structural_tag))
        return None

    def compile(self, spec: StructuredOutputsParams) -> "XGrammarCompiled":
        try:
            lengths = spec.kind in ("json", "structural_tag") and "Length" in spec.text
            return XGrammarCompiled(self, self._compile(spec), self._printable if lengths else self._known)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(first_line(error)) from None

    def matcher(self, grammar: Any, known: np.ndarray) -> "XGrammarMatcher":
        return XGrammarMatcher(self._lib.GrammarMatcher(grammar), self._tokens, known, self._no_surrogate)

    def _compile(self, spec: StructuredOutputsParams) -> Any:
        match spec.kind:
            case "json" | "json_object":
                text = '{"type":"object"}' if spec.kind == "json_object" else spec.json
                return self._compiler.compile_json_schema(text, any_whitespace=not spec.disable_any_whitespace)
            case "regex":
                assert spec.regex is not None
                return self._compiler.compile_regex(without_anchors(spec.regex))
            case "choice":
                assert spec.choice is not None
                words = (json.dumps(word, ensure_ascii=False) for word in dict.fromkeys(spec.choice))
                return self._compiler.compile_grammar("root ::= " + " | ".join(words))
            case "grammar":
                assert spec.grammar is not None
                if "::=" in spec.grammar:
                    return self._compiler.compile_grammar(spec.grammar)
                return self._compiler.compile_lark(spec.grammar)
            case _:
                return self._compiler.compile_structural_tag(spec.structural_tag)


class XGrammarCompiled:
    def __init__(self, backend: XGrammarBackend, grammar: Any, known: np.ndarray) -> None:
        self._backend = backend
        self._grammar = grammar
        self._known = known
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        return self._backend.matcher(self._grammar, self._known)


class XGrammarMatcher:
    def __init__(self, matcher: Any, tokens: list[bytes], known: np.ndarray, no_surrogate: np.ndarray) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._known, self._no_surrogate = known, no_surrogate
        self._accepted: list[int] = []

    def accept(self, token: int) -> bool:
        if not is_set(self._known, token) or (self._after_surrogate_start and not is_set(self._no_surrogate, token)):
            return False
        if not self._matcher.accept_token(token):
            return False
        self._accepted.append(token)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            del self._accepted[-count:]

    def fill(self, row: np.ndarray) -> None:
        self._matcher.fill_next_token_bitmask(row[None], 0)
        row &= self._known
        if self._after_surrogate_start:
            row &= self._no_surrogate

    @property
    def _after_surrogate_start(self) -> bool:
        return bool(self._accepted) and self._tokens[self._accepted[-1]].endswith(SURROGATE_START)


def _tag_unsupported(part: Any) -> str | None:
    """Check the schemas and regexes in a structural tag."""
    if isinstance(part, list):
        return next((reason for each in part if (reason := _tag_unsupported(each))), None)
    if not isinstance(part, dict):
        return None
    if part.get("type") == "json_schema":
        return schema_unsupported_by_xgrammar(part.get("json_schema"))
    if part.get("type") == "regex":
        return regex_unsupported_by_xgrammar(str(part.get("pattern", "")))
    return _tag_unsupported(list(part.values()))
