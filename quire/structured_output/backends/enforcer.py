"""LM Format Enforcer: plain Python, so slow; regular expressions and choices."""

import importlib
from collections import ChainMap
from typing import Any

import numpy as np

from quire.messages.structured import StructuredOutputsParams
from quire.structured_output.backends.base import GrammarError, first_line
from quire.structured_output.schema.regexes import expanded_length
from quire.structured_output.vocabulary import Vocabulary

BYTES_PER_CHARACTER = 4096  # of the text; states are made on the way
MAX_EXPANDED = 2000  # of a regular expression whose repeats are written out: it makes all states in Python
# A mask takes Python up to 0.2 s, which each of n sequences would take of every other request's step.
MAX_SHARED_MASKS = 64


class EnforcerBackend:
    name = "lm-format-enforcer"

    def __init__(self, vocabulary: Vocabulary) -> None:
        lib: Any = importlib.import_module("lmformatenforcer")  # only for who needs it
        self._lib = lib
        regular = []
        for i, token in enumerate(vocabulary.tokens):
            try:
                # Each counts as a word of its own: what it adds to the text is known, whatever stands before.
                regular += [(i, token.decode(), True)] if token else []
            except UnicodeDecodeError:
                continue  # part of a character
        self._characters = {text for _, text, _ in regular if len(text) == 1}
        size = vocabulary.size
        decode = vocabulary.tokenizer.decode
        self._tokens = lib.TokenEnforcerTokenizerData(regular, decode, vocabulary.end_id, True, size)

    def refusal(self, spec: StructuredOutputsParams) -> str | None:
        if spec.kind in ("json", "json_object"):
            # It lets 6e-206 pass as an integer, two items as at least three, and a comma before a closing brace.
            return "its JSON does not always keep to the schema; use another backend"
        if expanded_length(spec.regex or "") > MAX_EXPANDED:
            return f"repeats that make it longer than {MAX_EXPANDED} when written out are not supported"
        return None if spec.kind in ("regex", "choice") else f"it has no {spec.kind}"

    def compile(self, spec: StructuredOutputsParams) -> "EnforcerCompiled":
        missing = {char for char in spec.text if ord(char) > 127} - self._characters
        if missing:
            raise GrammarError(f"it cannot write {min(missing)!r}, which is no token of its own in this vocabulary")
        compiled = EnforcerCompiled(self, spec)
        first = np.zeros(self.mask_bytes // 4, np.int32)
        compiled.matcher().fill(first)  # an error shows here, not in a step
        if not first.any():
            raise GrammarError("no token of this vocabulary can begin it")
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
    """By the parser's state: those that all sequences share, as far as there is room, then this sequence's own."""

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
