"""One spelling for property names.

llguidance tells a name that has a meaning from others by its text, but lets others be written with escapes: "\\u0061"
would be an "a" to which no rule applies. In names, \\u is therefore not allowed.
"""

from typing import NamedTuple

import numpy as np

from quire.structured_output.bits import mask_of
from quire.structured_output.vocabulary import Vocabulary

QUOTE, ESCAPE, COMMA = b'"\\,'
OPEN, CLOSE = b"{[", b"}]"


class Place(NamedTuple):
    """Where in a JSON text we are."""

    objects: tuple[bool, ...] = ()  # what is open: objects or lists
    in_string: bool = False
    escaped: bool = False  # the next character belongs to an escape
    name_next: bool = False  # a string here is a name

    @property
    def in_name(self) -> bool:
        return self.in_string and self.name_next

    def after(self, text: bytes) -> "Place":
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
        return Place(objects, in_string, escaped, name_next)


class NameSpelling:
    """Takes the tokens that would write \\u in a name out of a mask."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = vocabulary.tokens
        self._plain = mask_of(not _escapes_u(token, False) for token in self._tokens)
        self._after_escape = mask_of(not _escapes_u(token, True) for token in self._tokens)
        # A token may close one string, open a name and escape in it at once.
        self._outside = mask_of(b'"' not in token or not _escapes_u(token, False) for token in self._tokens)

    def after(self, place: Place, token: int) -> Place:
        return place.after(self._tokens[token])

    def allowed(self, place: Place) -> np.ndarray:
        if place.in_name:
            return self._after_escape if place.escaped else self._plain
        return self._outside


def _escapes_u(text: bytes, escaped: bool) -> bool:
    if b"\\u" not in text and not (escaped and text[:1] == b"u"):
        return False
    for byte in text:
        if escaped and byte == ord("u"):
            return True
        escaped = byte == ESCAPE and not escaped
    return False
