"""OpenAI's batch files: a line is a JSON object with custom_id, method, url and body."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_ID = 512


@dataclass
class BatchRequest:
    index: int  # among the non-empty lines
    line: int
    custom_id: str
    url: str
    body: bytes


@dataclass
class BadLine:
    index: int
    line: int
    custom_id: str | None
    code: str
    problem: str
    is_request: bool = False  # though one that cannot be served
    body: bytes = b""


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Id(msgspec.Struct):
    custom_id: str


class _Body(msgspec.Struct):
    """The one field checked here; the server validates the rest."""

    stream: Any = None


def check_file(path: Path, longest: int) -> int:
    """The number of requests in the file. A repeated custom_id is an error: results could not be told apart.

    Ids are kept as digests, so that a file of millions of lines needs little memory.
    """
    seen: dict[bytes, int] = {}
    count = 0
    for line, text in _lines(path, longest):
        count += 1
        custom_id = _custom_id(text) if text is not None else None
        if custom_id is None:
            continue
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = seen.setdefault(digest, line)
        if first != line:
            raise ValueError(
                f"{path} line {line}: custom_id {custom_id!r} repeats that of line {first}; ids must be unique"
            )
    return count


def read_requests(path: Path, longest: int) -> Iterator[BatchRequest | BadLine]:
    for index, (line, text) in enumerate(_lines(path, longest)):
        if text is None:
            problem = f"longer than {longest} bytes (--max-request-bytes)"
            yield BadLine(index, line, None, "line_too_long", problem)
        else:
            yield parse_line(index, line, text)


def parse_line(index: int, line: int, text: bytes) -> BatchRequest | BadLine:
    def bad(code: str, problem: str, is_request: bool = False) -> BadLine:
        return BadLine(index, line, _custom_id(text), code, problem, is_request)

    try:
        given = msgspec.json.decode(text, type=_Line)
        body = msgspec.json.decode(given.body, type=_Body)
    except msgspec.ValidationError as error:
        return bad("invalid_line", f"{error}; a line has custom_id, method, url and body".replace("`", ""))
    except (ValueError, RecursionError) as error:
        return bad("invalid_json", f"not valid JSON: {error}")
    if not 1 <= len(given.custom_id) <= MAX_ID:
        return bad("invalid_line", f"custom_id must have 1 to {MAX_ID} characters")
    if given.method != "POST":
        return bad("invalid_method", f"method is {given.method[:50]!r}; it must be POST")
    if given.url not in URLS:
        return bad("invalid_url", f"url is {given.url[:100]!r}; allowed: {', '.join(URLS)}", is_request=True)
    if body.stream:
        return bad("invalid_body", "a batch cannot stream; leave stream out", is_request=True)
    return BatchRequest(index, line, given.custom_id, given.url, bytes(given.body))


def _custom_id(text: bytes) -> str | None:
    """The id of a line that may be invalid otherwise."""
    try:
        return msgspec.json.decode(text, type=_Id).custom_id or None
    except (ValueError, RecursionError):
        return None


def _lines(path: Path, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """The non-empty lines with their numbers; None for one that is too long."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(longest + 2):
            number += 1
            too_long = len(text.rstrip(b"\r\n")) > longest
            while not text.endswith(b"\n") and (rest := file.readline(1 << 20)):
                too_long, text = True, rest
            text = text.removeprefix(b"\xef\xbb\xbf") if number == 1 else text
            if too_long:
                yield number, None
            elif text.strip():
                yield number, text.strip()
