"""Masks \\u escapes in property names.

llguidance recognizes a declared property by its literal text, but allows escapes in other names: "\\u0061" would be an
"a" to which its schema does not apply. So \\u is not allowed in names.
"""

from typing import NamedTuple

import numpy as np

from quire.structured_output.bitmask import make_bitmask
from quire.structured_output.vocabulary import Vocabulary

QUOTE, ESCAPE, COMMA = b'"\\,'
OPEN, CLOSE = b"{[", b"}]"


class JsonPosition(NamedTuple):
    """Lexer state within a JSON text."""

    objects: tuple[bool, ...] = ()  # open brackets: True for an object, False for a list
    in_string: bool = False
    escaped: bool = False  # after a backslash
    name_next: bool = False  # the next string is a property name

    @property
    def in_name(self) -> bool:
        return self.in_string and self.name_next

    def after(self, text: bytes) -> "JsonPosition":
        objects, in_string, escaped, name_next = self
        for byte in text:
            if in_string:
                if escaped:
                    escaped = False
                elif byte == ESCAPE:
                    escaped = True
                elif byte == QUOTE:
                    in_string = name_next = False
            elif byte == QUOTE:
                in_string = True
            elif byte in OPEN:
                name_next = byte == OPEN[0]
                objects = (*objects, name_next)
            elif byte in CLOSE:
                objects, name_next = objects[:-1], False
            elif byte == COMMA:
                name_next = bool(objects) and objects[-1]
        return JsonPosition(objects, in_string, escaped, name_next)


class PropertyNameMask:
    """Bitmasks without the tokens that would write \\u in a property name."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._plain = make_bitmask(not _escapes_u(token, False) for token in self._tokens)
        self._after_escape = make_bitmask(not _escapes_u(token, True) for token in self._tokens)
        # One token may close a string, open a name and escape in it.
        self._outside = make_bitmask(b'"' not in token or not _escapes_u(token, False) for token in self._tokens)

    def after(self, position: JsonPosition, token: int) -> JsonPosition:
        return position.after(self._tokens[token])

    def allowed(self, position: JsonPosition) -> np.ndarray:
        if position.in_name:
            return self._after_escape if position.escaped else self._plain
        return self._outside


def _escapes_u(text: bytes, escaped: bool) -> bool:
    if b"\\u" not in text and not (escaped and text[:1] == b"u"):
        return False
    for byte in text:
        if escaped and byte == ord("u"):
            return True
        escaped = byte == ESCAPE and not escaped
    return False
