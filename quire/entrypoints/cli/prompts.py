"""The prompts of `quire generate`: from flags, lines of text, or JSON lines."""

import difflib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMATS = ("auto", "text", "jsonl")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
OTHER_KEYS = ("id", "tools", "cache_salt")


@dataclass
class Task:
    """One prompt and the other fields of its line."""

    where: str  # for error messages
    prompt: str | list[int] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    cache_salt: str | None = None
    id: Any = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class BadLine:
    where: str
    problem: str


def read_tasks(prompts: list[str] | None, files: list[Path] | None, format: str) -> list[Task | BadLine]:
    if prompts and files:
        raise ValueError("both --prompt and --prompts-file are given; give one of them")
    if prompts:
        return [Task(f"prompt {text!r}", text) for text in prompts]
    if files:
        named = [(str(file), _read(file)) for file in files]
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt; give --prompt TEXT, --prompts-file FILE, or lines on standard input")
    else:
        named = [("standard input", sys.stdin.read())]
    tasks = [task for name, text in named for task in _parse(name, text, format)]
    if not tasks:
        raise ValueError(f"{named[0][0]} holds no prompt; write one per line, or give --prompt TEXT")
    return tasks


def _read(file: Path) -> str:
    if str(file) == "-":
        return sys.stdin.read()
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(name: str, text: str, format: str) -> Iterator[Task | BadLine]:
    # Not splitlines(): JSON may contain U+2028 and other characters that it treats as line ends.
    lines = [(i, line.rstrip("\r")) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    as_json = format == "jsonl" or (format == "auto" and _looks_like_json(name, lines))
    for number, line in lines:
        where = f"{name} line {number}"
        if not as_json:
            yield Task(where, line)
            continue
        try:
            yield parse_line(where, line)
        except ValueError as error:
            yield BadLine(where, str(error))


def _looks_like_json(name: str, lines: list[tuple[int, str]]) -> bool:
    if name.endswith((".jsonl", ".ndjson")):
        return True
    try:
        first = json.loads(lines[0][1]) if lines else None
    except ValueError:
        return False
    return isinstance(first, dict) and any(key in first for key in PROMPT_KEYS)


def parse_line(where: str, line: str) -> Task:
    """A JSON object with a prompt in one of its forms; other fields are sampling parameters."""
    from quire.entrypoints.cli.sampling_flags import fields

    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"a line must be a JSON object with {', '.join(PROMPT_KEYS[:-1])} or {PROMPT_KEYS[-1]}")
    forms = [key for key in PROMPT_KEYS if key in given]
    if len(forms) != 1:
        raise ValueError(f"give one of {', '.join(PROMPT_KEYS)}; this line has {', '.join(forms) or 'none'}")
    known = fields()
    for name in given:
        if name not in known and name not in PROMPT_KEYS and name not in OTHER_KEYS:
            near = difflib.get_close_matches(name, [*PROMPT_KEYS, *OTHER_KEYS, *known], n=1)
            raise ValueError(f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    if "prompt" in given and not isinstance(given["prompt"], str):
        raise ValueError("prompt must be a string; token ids go into prompt_token_ids")
    return Task(
        where,
        prompt=given.get("prompt", given.get("prompt_token_ids")),
        messages=given.get("messages"),
        tools=given.get("tools"),
        cache_salt=given.get("cache_salt"),
        id=given.get("id"),
        params={name: value for name, value in given.items() if name in known},
    )
