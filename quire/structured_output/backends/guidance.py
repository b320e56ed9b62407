"""llguidance: rejects what it does not implement instead of ignoring it, and compiles in microseconds."""

import importlib
import json
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError, first_line
from quire.structured_output.bitmask import is_set
from quire.structured_output.schema.property_names import JsonPosition, PropertyNameMask
from quire.structured_output.schema.supported import closed_objects, has_open_names, unsupported_by_guidance
from quire.structured_output.vocabulary import Vocabulary

BYTES_PER_CHARACTER = 512  # of a grammar's text: an estimate, llguidance does not report its memory


class GuidanceBackend:
    name = "guidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("llguidance")  # lazily: an optional dependency
        self._lib = lib
        self._vocabulary = vocabulary
        tokenizer = vocabulary.tokenizer

        def encode(text: bytes) -> list[int]:
            return tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)

        # Every token needs distinct bytes; special tokens and unused ids get placeholders, never generated as text.
        named = [token or f"<|id_{i}|>".encode() for i, token in enumerate(vocabulary.tokens)]
        unused = [i for i, token in enumerate(vocabulary.tokens) if not token]
        wrapped = _Encode(encode, vocabulary.end_id, named, unused)
        self._tokenizer = lib.LLTokenizer(
            lib.TokenizerWrapper(wrapped), n_vocab=vocabulary.size, eos_token=[vocabulary.end_id]
        )

    @cached_property
    def _names(self) -> PropertyNameMask:
        return PropertyNameMask(self._vocabulary)

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        if spec.kind == "structural_tag":
            return "it does not support structural tags"
        if spec.kind == "json":
            return unsupported_by_guidance(json.loads(spec.json))
        return None  # the compiler itself rejects what it does not support

    def compile(self, spec: StructuredOutputsParams) -> "GuidanceCompiled":
        try:
            matcher = self._lib.LLMatcher(self._tokenizer, self._grammar(spec), log_level=0)
        except Exception as error:  # the library also raises bare Exception
            raise GrammarError(first_line(error)) from None
        if matcher.is_error():
            raise GrammarError(first_line(matcher.get_error()))
        warnings = matcher.get_grammar_warnings()
        if warnings:
            raise GrammarError(first_line(warnings[0]))
        names = self._names if spec.kind == "json" and has_open_names(json.loads(spec.json)) else None
        return GuidanceCompiled(matcher, len(spec.text) * BYTES_PER_CHARACTER, names)

    def _grammar(self, spec: StructuredOutputsParams) -> str:
        make = self._lib.LLMatcher
        match spec.kind:
            case "json" | "json_object":
                schema: Any = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.json)
                if spec.disable_additional_properties:
                    schema = closed_objects(schema)
                if isinstance(schema, bool):
                    schema = {} if schema else {"enum": []}
                options: dict[str, Any] = {"lenient": False}
                if spec.disable_any_whitespace:
                    options["whitespace_flexible"] = False
                if spec.whitespace_pattern is not None:
                    options["whitespace_pattern"] = spec.whitespace_pattern
                return str(make.grammar_from_json_schema(json.dumps(schema), overrides=options))
            case "regex":
                return str(make.grammar_from_regex(spec.regex))
            case "choice":
                assert spec.choice is not None
                words = (json.dumps(word, ensure_ascii=False) for word in dict.fromkeys(spec.choice))
                return str(make.grammar_from_lark("start: " + " | ".join(words)))
            case _:
                from llguidance.gbnf_to_lark import any_to_lark

                return str(make.grammar_from_lark(any_to_lark(str(spec.grammar))))


class _Encode(SimpleNamespace):
    """The tokenizer interface that llguidance wraps."""

    def __init__(self, encode: Any, end_id: int, tokens: list[bytes], special: list[int]) -> None:
        super().__init__(eos_token_id=end_id, bos_token_id=None, tokens=tokens, special_token_ids=special)
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        return list(self._encode(text))


class GuidanceCompiled:
    def __init__(self, matcher: Any, num_bytes: int, names: PropertyNameMask | None) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes
        self._names = names

    def matcher(self) -> "GuidanceMatcher":
        return GuidanceMatcher(self._matcher.deep_copy(), self._names)


class GuidanceMatcher:
    def __init__(self, matcher: Any, names: PropertyNameMask | None) -> None:
        self._matcher = matcher
        self._names = names
        self._positions = [JsonPosition()]  # after each token; only used with `names`

    def accept(self, token: int) -> bool:
        # consume_token() of a disallowed token would leave the matcher in an error state for good.
        if self._names is not None:
            position = self._positions[-1]
            if not is_set(self._names.allowed(position), token) or self._matcher.try_consume_tokens([token]) != 1:
                return False
            self._positions.append(self._names.after(position, token))
            return True
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise GrammarError(first_line(self._matcher.get_error()))
        if count and self._names is not None:
            del self._positions[-count:]

    def fill(self, row: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            raise GrammarError(f"the grammar became too complex: {first_line(self._matcher.get_error())}")
        if self._names is not None:
            row &= self._names.allowed(self._positions[-1])
