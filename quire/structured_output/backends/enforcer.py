"""LM Format Enforcer: pure Python, so slow; serves regular expressions and choices."""

import importlib
from collections import ChainMap
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError, first_line
from quire.structured_output.schema.regexes import expanded_length
from quire.structured_output.vocabulary import Vocabulary

BYTES_PER_CHARACTER = 4096  # of the grammar's text: an estimate, states are created while matching
MAX_EXPANDED = 2000  # length of a regex with its repeats expanded: all states are created in Python
# A mask takes up to 0.2 s; without sharing, each of n sequences would delay every other request's step by that.
MAX_SHARED_MASKS = 64


class EnforcerBackend:
    name = "lm-format-enforcer"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("lmformatenforcer")  # lazily: an optional dependency
        self._lib = lib
        regular = []
        for i, token in enumerate(vocabulary.tokens):
            try:
                # Each is marked as the start of a word: the text it adds does not depend on what precedes it.
                regular += [(i, token.decode(), True)] if token else []
            except UnicodeDecodeError:
                continue  # an incomplete UTF-8 character
        self._characters = {text for _, text, _ in regular if len(text) == 1}
        size = vocabulary.size
        decode = vocabulary.tokenizer.decode
        self._tokens = lib.TokenEnforcerTokenizerData(regular, decode, vocabulary.end_id, True, size)

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        if spec.kind in ("json", "json_object"):
            # It accepts 6e-206 as an integer, two items where minItems is 3, and a comma before a closing brace.
            return "its JSON does not always follow the schema; use another backend"
        if expanded_length(spec.regex or "") > MAX_EXPANDED:
            return f"repeats that expand it to more than {MAX_EXPANDED} characters are not supported"
        return None if spec.kind in ("regex", "choice") else f"it does not support {spec.kind}"

    def compile(self, spec: StructuredOutputsParams) -> "EnforcerCompiled":
        missing = {char for char in spec.text if ord(char) > 127} - self._characters
        if missing:
            raise GrammarError(f"it cannot generate {min(missing)!r}, which is not a single token in this vocabulary")
        compiled = EnforcerCompiled(self, spec)
        first = np.zeros(self.mask_bytes // 4, np.int32)
        compiled.matcher().fill(first)  # raise errors here, not in a step
        if not first.any():
            raise GrammarError("no token of this vocabulary can start it")
        return compiled

    def parser(self, spec: StructuredOutputsParams) -> Any:
        lib = self._lib
        try:
            if spec.kind == "regex":
                return lib.RegexParser(spec.regex)
            return lib.UnionParser([lib.StringParser(word) for word in dict.fromkeys(spec.choice or ())])
        except Exception as error:  # the library raises many kinds
            raise GrammarError(first_line(error)) from None

    def enforcer(self, parser: Any) -> Any:
        return self._lib.TokenEnforcer(self._tokens, parser)

    @property
    def mask_bytes(self) -> int:
        return (self._tokens.vocab_size + 31) // 32 * 4


class Masks(ChainMap[Any, Any]):
    """Masks by parser state: a shared map for all sequences up to MAX_SHARED_MASKS, beyond it one per sequence."""

    def __setitem__(self, state: Any, mask: Any) -> None:
        own, shared = self.maps
        (shared if len(shared) < MAX_SHARED_MASKS else own)[state] = mask


class EnforcerCompiled:
    def __init__(self, backend: EnforcerBackend, spec: StructuredOutputsParams) -> None:
        self._backend = backend
        self._parser = backend.parser(spec)
        self._masks: dict[Any, Any] = {}
        self.num_bytes = BYTES_PER_CHARACTER * len(spec.text) + MAX_SHARED_MASKS * backend.mask_bytes

    def matcher(self) -> "EnforcerMatcher":
        enforcer = self._backend.enforcer(self._parser)
        enforcer.allowed_token_cache = Masks({}, self._masks)
        return EnforcerMatcher(enforcer)


class EnforcerMatcher:
    def __init__(self, enforcer: Any) -> None:
        self._enforcer = enforcer
        self._tokens: list[int] = []

    def accept(self, token: int) -> bool:
        if not self._allowed().is_token_allowed(token):
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def fill(self, row: np.ndarray) -> None:
        row[:] = self._allowed().allowed_tokens.numpy()

    def _allowed(self) -> Any:
        try:
            return self._enforcer.get_allowed_tokens(self._tokens)
        except Exception as error:  # the library raises many kinds
            raise GrammarError(first_line(error)) from None
