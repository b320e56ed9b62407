"""A request's body: read within its limits, decoded, and checked for fields that nobody knows."""

import asyncio
import difflib
import logging
import re
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from quire.entrypoints.openai.errors import ApiError, bad_request

logger = logging.getLogger("quire")

READ_SECONDS = 60.0  # for a whole body; one that stops in the middle must not hold its connection for ever
MAX_WARNINGS = 1000  # names come from outside, so remembering them has to end
FIELD = re.compile(r"`\$\.?([A-Za-z_]\w*)")

T = TypeVar("T", bound=msgspec.Struct)


class ClientDisconnected(Exception):
    """Nobody is left to answer."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    declared = Headers(scope=scope).get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {READ_SECONDS:g} seconds", code="timeout") from None


def _too_large(limit: int) -> ApiError:
    message = f"the request body is larger than {limit} bytes (--max-request-bytes)"
    # What is left of the body will not be read, so the connection cannot be used again.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class BodyDecoder:
    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._warned: set[str] = set()

    def decode(self, body: bytes, into: type[T]) -> T:
        try:
            names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
            request = msgspec.json.decode(body, type=into)
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
        except RecursionError:
            raise bad_request("the body is nested too deeply", code="invalid_json") from None
        known = into.__struct_fields__
        for name in names:
            if name not in known:
                self._unknown(name, known)
        return request

    def _unknown(self, name: str, known: tuple[str, ...]) -> None:
        shown = name[:64]
        near = difflib.get_close_matches(shown, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if self.strict:
            raise bad_request(f"unknown field {shown!r}{hint}", param=shown, code="unknown_field")
        if shown not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(shown)
            logger.warning("a request has the unknown field %r, which is ignored%s", shown, hint)


def _wrong_type(message: str) -> ApiError:
    """msgspec says: Expected `int`, got `str` - at `$.max_tokens`."""
    missing = re.search(r"missing required field `(\w+)`", message)
    if missing:
        return bad_request(f"{missing[1]} is required", missing[1], "missing_field")
    found = FIELD.search(message)
    what, _, where = message.partition(" - at ")
    if found is None:
        if where in ("", "`$`"):
            return bad_request(f"the body must be a JSON object; {what}", code="invalid_json")
        return bad_request(message)
    place = where.strip("`").removeprefix("$.")
    return bad_request(f"{place}: {what[:1].lower()}{what[1:]}".replace("`", ""), found[1], "invalid_type")
