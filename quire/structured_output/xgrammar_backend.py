"""XGrammar: the fastest masks; takes schemas and regexes whose meaning it keeps exactly."""

import importlib
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.base import GrammarError, first_line
from quire.structured_output.regexes import outside_xgrammar, without_anchors
from quire.structured_output.schemas import outside_xgrammar as schema_outside_xgrammar
from quire.structured_output.vocabulary import Vocabulary

COMPILE_THREADS = 1  # a step needs the cores more
# XGrammar takes half a surrogate pair for a character, which is not UTF-8: no token may write one, nor complete one.
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
BEGINS = b"\xed"
COMPLETES = range(0xA0, 0xC0)


class XGrammarBackend:
    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("xgrammar")  # only for who needs it
        self._lib = lib
        self._tokens = [b"" if SURROGATE.search(token) else token for token in vocabulary.tokens]
        self._known = _mask(vocabulary, range(vocabulary.size))  # bits beyond come set
        completing = {i for i, token in enumerate(self._tokens) if token and token[0] in COMPLETES}
        self._complete = _mask(vocabulary, (i for i in range(vocabulary.size) if i not in completing))
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
            return "it has no whitespace_pattern"
        if spec.kind == "json":
            return schema_outside_xgrammar(json.loads(spec.json))
        if spec.kind == "regex":
            assert spec.regex is not None
            return outside_xgrammar(spec.regex)
        return None

    def compile(self, spec: StructuredOutputsParams) -> "XGrammarCompiled":
        try:
            return XGrammarCompiled(self, self._compile(spec))
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(first_line(error)) from None

    def matcher(self, grammar: Any) -> "XGrammarMatcher":
        return XGrammarMatcher(self._lib.GrammarMatcher(grammar), self._tokens, self._known, self._complete)

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
    def __init__(self, backend: XGrammarBackend, grammar: Any) -> None:
        self._backend = backend
        self._grammar = grammar
        self.num_bytes = int(grammar.memory_size_bytes)

    def matcher(self) -> "XGrammarMatcher":
        return self._backend.matcher(self._grammar)


class XGrammarMatcher:
    def __init__(self, matcher: Any, tokens: list[bytes], known: np.ndarray, complete: np.ndarray) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._known, self._complete = known, complete
        self._accepted: list[int] = []

    def accept(self, token: int) -> bool:
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
        row[-1] &= self._known[-1]
        if self._accepted and self._tokens[self._accepted[-1]].endswith(BEGINS):
            row &= self._complete


def _mask(vocabulary: Vocabulary, tokens: Iterable[int]) -> np.ndarray:
    bits = np.zeros(vocabulary.num_words * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
