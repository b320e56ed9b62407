"""MiniMax M3: every tag has a prefix, and nested values are nested tags."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.entrypoints.parsers.tools.base import MAX_NAME
from quire.entrypoints.parsers.tools.json_text import MAX_DEPTH
from quire.entrypoints.parsers.tools.reader import Malformed, Reading
from quire.entrypoints.parsers.tools.xml import KEY, TaggedParser, as_json, types_of

NAMESPACE = "]<]minimax[>["
PIECE = re.compile(re.escape(NAMESPACE) + r"<(/?)([^<>\s]+)>")


class MiniMaxM3Parser(TaggedParser):
    """]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>..., which is written
    below as <a>1</a>. The items of a list are <item> tags."""

    opens = (f"{NAMESPACE}<tool_call>",)
    closes = f"{NAMESPACE}</tool_call>"
    markers = (NAMESPACE, "<tool_call>", "</tool_call>")

    def marked(self, marker: str) -> Reading[None]:
        reader, opening = self.reader, f"{NAMESPACE}<invoke name="
        yield from reader.space()
        yield from reader.expect(opening)
        while True:
            yield from self.one_call()
            yield from reader.space()
            reader.mark()
            if (yield from reader.has(opening, self.closes)) != opening:
                return

    def one_call(self) -> Reading[None]:
        reader = self.reader
        name = (yield from reader.match(KEY, MAX_NAME)).strip("\"' ")
        yield from reader.expect(">")
        if not name:
            raise Malformed
        schema = self.schemas.get(name, {})
        first = True
        while True:
            yield from reader.space()
            tag = yield from reader.expect(f"{NAMESPACE}</invoke>", f"{NAMESPACE}<")
            if first:
                self.call(name)
            if not tag.endswith("<"):
                self.arguments("{}" if first else "}")
                return
            key = yield from reader.match(KEY, MAX_NAME)
            yield from reader.expect(">")
            if types_of(schema, key) == {"string"}:
                yield from self.argument(name, key, first, (f"{NAMESPACE}</{key}>",))
            else:
                self.arguments(("{" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
                self.arguments(element((yield from self.inner_text(key)), property_of(schema, key)))
            first = False

    def inner_text(self, key: str) -> Reading[str]:
        """The text up to the tag that closes `key`, which may occur within itself."""
        opening, closing = f"{NAMESPACE}<{key}>", f"{NAMESPACE}</{key}>"
        pieces: list[str] = []
        depth = 1
        while True:
            tag = yield from self.reader.until(closing, opening, emit=pieces.append)
            if not tag:
                self.arguments("".join(pieces))
                raise Malformed
            depth += 1 if tag == opening else -1
            if not depth:
                return "".join(pieces)
            pieces.append(tag)


def property_of(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        found = schema.get("additionalProperties")
    return found if isinstance(found, Mapping) else {}


def element(text: str, schema: Mapping[str, Any], depth: int = 0) -> str:
    """The JSON of a tag's inner text."""
    types = types_of({"properties": {"it": schema}}, "it")
    if depth > MAX_DEPTH:
        raise Malformed
    if f"{NAMESPACE}<" not in text:
        empty = {"array": "[]", "object": "{}"}
        kinds = types & empty.keys()
        return empty[kinds.pop()] if len(kinds) == 1 and not text.strip() else as_json(text, types)
    children = split(text)
    if "array" in types or ("object" not in types and {name for name, _ in children} == {"item"}):
        items = schema.get("items")
        inner = items if isinstance(items, Mapping) else {}
        return "[" + ", ".join(element(child, inner, depth + 1) for _, child in children) + "]"
    members: dict[str, list[str]] = {}
    for name, child in children:
        members.setdefault(name, []).append(element(child, property_of(schema, name), depth + 1))
    written = (
        f"{json.dumps(name, ensure_ascii=False)}: " + (values[0] if len(values) == 1 else f"[{', '.join(values)}]")
        for name, values in members.items()
    )
    return "{" + ", ".join(written) + "}"


def split(text: str) -> list[tuple[str, str]]:
    """The outermost tags and their inner texts."""
    found: list[tuple[str, str]] = []
    open_tags: list[tuple[str, int]] = []
    for tag in PIECE.finditer(text):
        if not tag[1]:
            open_tags.append((tag[2], tag.end()))
        elif not open_tags or open_tags[-1][0] != tag[2]:
            raise Malformed
        else:
            name, start = open_tags.pop()
            if not open_tags:
                found.append((name, text[start : tag.start()]))
    if open_tags:
        raise Malformed
    return found
