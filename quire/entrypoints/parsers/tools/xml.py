"""Formats that write each argument between tags, without quotes: its type comes from the function's schema."""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_calls import JsonCallParser
from quire.entrypoints.parsers.tools.json_text import loads
from quire.entrypoints.parsers.tools.reader import Malformed, Reading

NAME = re.compile(r"[\w.:/-]*")
KEY = re.compile(r"[^<>\n]*")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class TaggedParser(JsonCallParser):
    opens: ClassVar[tuple[str, ...]]
    closes: str = "</tool_call>"  # where reading resumes after a malformed call

    def steps(self) -> Reading[None]:
        reader = self.reader
        marker = yield from reader.until(*self.opens, emit=self.content)
        while marker:
            before = self.num_calls
            whole = yield from self.attempt(self.marked(marker), marker)
            if not whole and self.num_calls > before:
                marker = yield from reader.until(self.closes, *self.opens, emit=self.content)
                if marker != self.closes:
                    continue
            marker = yield from reader.until(*self.opens, emit=self.content)

    @abstractmethod
    def marked(self, marker: str) -> Reading[None]:
        """The text after an opening marker."""

    def argument(
        self, function: str, key: str, first: bool, closes: Sequence[str], types: set[str] | None = None
    ) -> Reading[None]:
        """A value up to one of `closes`. Strings are streamed; other types are buffered until complete. `types` are
        those that the text itself tells; None: the schema's."""
        self.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        if types is None:
            types = types_of(self.schemas.get(function, {}), key)
        if types == {"string"}:
            self.arguments('"')
            closed = yield from self.reader.until(*closes, emit=self.quoted)
            if closed:
                self.arguments('"')
        else:
            pieces: list[str] = []
            closed = yield from self.reader.until(*closes, emit=pieces.append)
            text = "".join(pieces)
            self.arguments(as_json(text, types) if closed else text)
        if not closed:
            raise Malformed

    def quoted(self, text: str) -> None:
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """The JSON types that a schema allows for an argument; empty if unspecified."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        return set()
    types: set[str] = set()
    alternatives = [found, *_as_list(found.get("anyOf")), *_as_list(found.get("oneOf"))]
    for one in alternatives:
        if not isinstance(one, Mapping):
            continue
        given = one.get("type")
        types.update(name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str))
        values = one.get("enum")
        if given is None and isinstance(values, list) and all(isinstance(value, str) for value in values):
            types.add("string")
    return types


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_json(text: str, types: set[str]) -> str:
    stripped = text.strip()
    stripped = PYTHON_WORDS.get(stripped, stripped)
    if "string" not in types or stripped == "null" or stripped[:1] in ("{", "["):
        try:
            value = loads(stripped)
            known = "string" not in types or value is None or _kind(value) in types
            # Unchanged, except for control characters in strings, which the decoder accepts unescaped.
            if known:
                return json.dumps(value, ensure_ascii=False) if "\n" in stripped else stripped
        except Malformed:
            pass
    return json.dumps(text, ensure_ascii=False)


def _kind(value: Any) -> str:
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else ""


class Qwen3CoderParser(TaggedParser):
    """<tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>: Qwen3-Coder."""

    opens = ("<tool_call>", "<function=")
    markers = ("<tool_call>", "</tool_call>")

    def marked(self, marker: str) -> Reading[None]:
        reader = self.reader
        if marker != "<function=":
            yield from reader.space()
            yield from reader.expect("<function=")
        while True:
            yield from self.function()
            yield from reader.space()
            reader.mark()
            if (yield from reader.has("<function=", self.closes)) != "<function=":
                return

    def function(self) -> Reading[None]:
        reader = self.reader
        name = yield from reader.match(NAME, MAX_NAME)
        if not name:
            raise Malformed
        yield from reader.expect(">")
        yield from reader.space()
        first = True
        while True:
            tag = yield from reader.expect("<parameter=", "</function>")
            if first:
                self.call(name)
            if tag == "</function>":
                self.arguments("{}" if first else "}")
                return
            key = yield from reader.match(KEY, MAX_NAME)
            yield from reader.expect(">")
            yield from reader.has("\n")
            yield from self.argument(name, key.strip(), first, ("\n</parameter>", "</parameter>"))
            yield from reader.space()
            first = False


class SeedOssParser(Qwen3CoderParser):
    """The same in <seed:tool_call>: Seed-OSS."""

    opens = ("<seed:tool_call>", "<function=")
    closes = "</seed:tool_call>"
    markers = ("<seed:tool_call>", closes)
