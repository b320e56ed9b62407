"""outlines-core: one automaton over the vocabulary. Slow to compile; then each mask is a table look-up."""

import importlib
import json
import re
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError, first_line
from quire.structured_output.schema.regexes import expanded_length
from quire.structured_output.schema.supported import unsupported_by_outlines
from quire.structured_output.vocabulary import Vocabulary

MAX_ROLLBACK = 32  # tokens, of rejected drafts
BYTES_PER_TRANSITION = 16
MAX_EXPANDED = 5000  # length of a regex with its repeats expanded; a million takes gigabytes
MAX_LENGTH = 12  # of minLength and maxLength: each further character doubles the compile time


class OutlinesBackend:
    name = "outlines"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("outlines_core")  # lazily: an optional dependency
        self._lib = lib
        by_bytes: dict[bytes, list[int]] = {}
        for i, token in enumerate(vocabulary.tokens):
            if token:
                by_bytes.setdefault(token, []).append(i)
        self._vocabulary = lib.Vocabulary(vocabulary.end_id, by_bytes)

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        if spec.kind not in ("json", "regex", "choice"):
            return f"it does not support {spec.kind}"
        if expanded_length(spec.regex or spec.whitespace_pattern or "") > MAX_EXPANDED:
            return f"repeats that expand it to more than {MAX_EXPANDED} characters are not supported"
        if spec.kind != "json":
            return None
        schema = json.loads(spec.json)
        return unsupported_by_outlines(schema) or _long_strings(schema)

    def compile(self, spec: StructuredOutputsParams) -> "OutlinesCompiled":
        try:
            index = self._lib.Index(self._regex(spec), self._vocabulary)
        except (ValueError, TypeError, OverflowError) as error:
            raise GrammarError(first_line(error)) from None
        return OutlinesCompiled(self._lib, index)

    def _regex(self, spec: StructuredOutputsParams) -> str:
        if spec.kind == "regex":
            return str(spec.regex)
        if spec.kind == "choice":
            assert spec.choice is not None
            return "|".join(re.escape(word) for word in dict.fromkeys(spec.choice))
        space = "" if spec.disable_any_whitespace else spec.whitespace_pattern
        return str(self._lib.json_schema.build_regex_from_schema(spec.json, space))


def _long_strings(schema: Any) -> str | None:
    if isinstance(schema, dict):
        for name in ("minLength", "maxLength"):
            if isinstance(schema.get(name), int) and schema[name] > MAX_LENGTH:
                return f"a {name} of {schema[name]} is not supported: more than {MAX_LENGTH} takes too long"
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return next((reason for part in parts if (reason := _long_strings(part))), None)


class OutlinesCompiled:
    def __init__(self, lib: Any, index: Any) -> None:
        self._lib = lib
        self._index = index
        self.num_bytes = BYTES_PER_TRANSITION * sum(len(t) for t in index.get_transitions().values())

    def matcher(self) -> "OutlinesMatcher":
        return OutlinesMatcher(self._lib.Guide(self._index, MAX_ROLLBACK))


class OutlinesMatcher:
    def __init__(self, guide: Any) -> None:
        self._guide = guide

    def accept(self, token: int) -> bool:
        if not self._guide.accepts_tokens([token]):
            return False
        self._guide.advance(token, return_tokens=False)
        return True

    def rollback(self, count: int) -> None:
        if count:
            self._guide.rollback_state(count)

    def fill(self, row: np.ndarray) -> None:
        self._guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)
