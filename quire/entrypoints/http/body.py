"""A request's body: read and decoded within limits, and checked for unknown fields."""

import asyncio
import difflib
import functools
import logging
import re
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from quire.config.server import ServerConfig
from quire.entrypoints.http.errors import ApiError, bad_request, overloaded
from quire.entrypoints.http.json_scan import JsonCounts, count_json

logger = logging.getLogger("quire")

SMALL_BODY = 1 << 16  # bytes, which are counted and decoded on the event loop without a noticeable delay
DEFAULT_VALUES = 1 << 18
MAX_WARNINGS = 1000  # clients choose the names: bound the memory for them
MAX_HINTS = 4  # in one request
CLIENT_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
JSON_TYPE = re.compile(r"\s*application/([\w.-]+\+)?json\s*(;.*)?", re.IGNORECASE)
UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
MAX_KEYS = 16  # named in one error
SWITCH_WORDS = {"yes": True, "y": True, "on": True, "t": True, "no": False, "n": False, "off": False, "f": False}
SWITCH_BYTES = tuple(f'"{word}"'.encode() for word in SWITCH_WORDS)
FIELD = re.compile(r"`\$\.?([A-Za-z_]\w*)")
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # what msgspec raises for a body that is no JSON

T = TypeVar("T", bound=msgspec.Struct)


class ClientDisconnected(Exception):
    """The client closed its connection: there is no one to respond to."""


class BodyReader:
    """Decodes request bodies, within limits on each body and on all bodies in flight."""

    def __init__(self, config: ServerConfig, max_model_len: int) -> None:
        self.max_bytes = config.max_request_bytes
        self.max_total = config.max_request_bytes_in_all
        self.seconds = config.timeout_request_body
        values = config.max_request_values or max(DEFAULT_VALUES, 2 * max_model_len)
        limits = JsonCounts(values, config.max_request_objects, config.max_request_fields)
        self.decoder = BodyDecoder(config.strict_fields, limits)
        self._held = 0  # bytes received of bodies that are not decoded yet

    async def read(self, scope: Scope, receive: Receive, into: type[T]) -> tuple[T, int]:
        """The request, and the size of its body in bytes."""
        received = bytearray()
        try:
            await self._read(scope, receive, received)
            return await self.decoder.decode(bytes(received), into), len(received)
        finally:
            self._held -= len(received)

    async def read_bytes(self, scope: Scope, receive: Receive) -> bytes:
        """The JSON as it is, within the limits on its size."""
        received = bytearray()
        try:
            await self._read(scope, receive, received)
            return bytes(received)
        finally:
            self._held -= len(received)

    async def _read(self, scope: Scope, receive: Receive, received: bytearray) -> None:
        headers = Headers(scope=scope)
        content_type = headers.get("content-type", "")
        if not JSON_TYPE.fullmatch(content_type):
            raise _wrong_content_type(content_type)
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.max_bytes:
            raise _too_large(self.max_bytes)
        try:
            # A body that stops halfway must not hold its connection forever.
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    received += part
                    self._held += len(part)
                    if len(received) > self.max_bytes:
                        raise _too_large(self.max_bytes)
                    if self._held > self.max_total:
                        full = f"request bodies in flight exceed {self.max_total} bytes (--max-request-bytes-in-all)"
                        raise overloaded(full, 1, {"Connection": "close"})
                    if not message.get("more_body", False):
                        return
        except TimeoutError:
            late = f"the body did not arrive within {self.seconds:g} seconds (--timeout-request-body)"
            raise ApiError(408, late, code="timeout", headers={"Connection": "close"}) from None


def _wrong_content_type(content_type: str) -> ApiError:
    """Also protects from web pages of other origins, which may send anything but JSON without asking first."""
    given = f"is {content_type[:100]!r}" if content_type else "is missing"
    message = f"the header Content-Type {given}; it must be application/json"
    return ApiError(415, message, code="unsupported_media_type", headers={"Connection": "close"})


def _too_large(limit: int) -> ApiError:
    message = f"the request body is larger than {limit} bytes (--max-request-bytes)"
    # The rest of the body is not read, so the connection cannot be reused.
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


class BodyDecoder:
    """Decodes bytes into a request, without building more objects than the limits allow."""

    def __init__(self, strict: bool, limits: JsonCounts) -> None:
        self.strict = strict
        self.limits = limits
        self._warned: set[str] = set()

    async def decode(self, body: bytes, into: type[T]) -> T:
        if len(body) > SMALL_BODY:
            self._check(await asyncio.to_thread(count_json, body, self.limits))
        elif self._may_exceed(body):
            self._check(count_json(body, self.limits))
        unknown = None
        for strict in (True, False):
            try:
                return msgspec.json.decode(body, type=_without_unknown(into), strict=strict)
            except UNREADABLE as error:
                unknown = UNKNOWN.search(str(error))
        request = decoded(body, into)
        names: Collection[str] = (unknown[1],) if unknown is not None else ()  # the first; enough for a large body
        if len(body) <= SMALL_BODY:
            names = fields_of(body)
        self._unknown([name for name in names if name not in into.__struct_fields__], into.__struct_fields__)
        return request

    def _may_exceed(self, body: bytes) -> bool:
        """A bound that costs microseconds: also counts what is inside strings."""
        commas, opening = body.count(b","), body.count(b"[") + body.count(b"{")
        most = JsonCounts(1 + commas + opening, opening, 1 + commas)
        limits = self.limits
        return most.values > limits.values or most.containers > limits.containers or most.fields > limits.fields

    def _check(self, found: JsonCounts) -> None:
        for count, limit, what, flag in (
            (found.fields, self.limits.fields, "fields", "--max-request-fields"),
            (found.containers, self.limits.containers, "lists and objects", "--max-request-objects"),
            (found.values, self.limits.values, "values", "--max-request-values"),
        ):
            if count > limit:
                raise bad_request(f"the body holds more than {limit} {what} ({flag})", code="request_too_large")

    def _unknown(self, names: list[str], known: tuple[str, ...]) -> None:
        new = [name[:64] for name in names if name[:64] not in self._warned]
        hints = {name: _hint(name, known) for name in new[:MAX_HINTS]}  # each costs a millisecond
        if self.strict and names:
            shown = names[0][:64]
            hint = hints.get(shown) or _hint(shown, known)
            raise bad_request(f"unknown field {shown!r}{hint}", param=shown, code="unknown_field")
        for name, hint in hints.items():
            if len(self._warned) < MAX_WARNINGS:
                self._warned.add(name)
                logger.warning("a request has the unknown field %r, which is ignored%s", name, hint)


def decoded(body: bytes, into: type[T]) -> T:
    """The request, where strings that spell numbers and booleans count as those."""
    try:
        try:
            return msgspec.json.decode(body, type=into, strict=False)
        except msgspec.ValidationError:
            if len(body) > SMALL_BODY or not any(word in body.lower() for word in SWITCH_BYTES):
                raise
            return msgspec.convert(_with_switches(msgspec.json.decode(body), into), into, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), body) from None
    except UNREADABLE as error:
        raise _not_json(error) from None


def _not_json(error: Exception) -> ApiError:
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply", code="invalid_json")
    return bad_request(f"the body is not valid JSON: {error}", code="invalid_json")


def fields_of(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """An object's keys, and their values undecoded; a key that is no UTF-8 may have been skipped until here."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE as error:
        raise _not_json(error) from None


def _with_switches(body: Any, into: type[T]) -> Any:
    """Words such as "yes" and "off" as booleans, in the fields that are."""
    if not isinstance(body, dict):
        return body
    switches = {field.name for field in msgspec.structs.fields(into) if field.type == bool | None}
    words = {name: SWITCH_WORDS.get(value.lower(), value) for name, value in body.items() if isinstance(value, str)}
    return body | {name: value for name, value in words.items() if name in switches}


@functools.cache
def _without_unknown(into: type[T]) -> type[T]:
    return msgspec.defstruct(f"Known{into.__name__}", [], bases=(into,), forbid_unknown_fields=True)  # type: ignore[return-value]


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _wrong_keys(field: str, body: bytes) -> ApiError:
    """Keys of an object that must be token ids; a message should name all that are not."""
    keys = [key[:64] for key in fields_of(fields_of(body)[field]) if not key.isdecimal()]
    named = ", ".join(map(repr, keys[:MAX_KEYS]))
    return bad_request(f"{field}: the keys must be token ids; these are not: {named or 'those too large'}", field)


def _wrong_type(message: str, body: bytes) -> ApiError:
    """msgspec says: Expected `int`, got `str` - at `$.max_tokens`."""
    key = re.search(r"at `key` in `\$\.(\w+)`", message)
    if key:
        return _wrong_keys(key[1], body)
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
