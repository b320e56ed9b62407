"""A batch on its way: so many requests at once, each answered by the server's own code or by a server."""

import asyncio
import sys
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.entrypoints.cli.api_client import ApiClient, HttpAnswer, ServerError, Unreachable
from quire.entrypoints.cli.batch_input import BadLine, BatchRequest
from quire.entrypoints.cli.batch_output import BatchOutput

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from quire.engine.async_engine import AsyncEngine

MAX_BYTES_AT_ONCE = 256 << 20  # of request bodies
ATTEMPTS = 6
LONGEST_PAUSE = 30.0  # seconds before another attempt


class Sender(Protocol):
    async def post(self, url: str, body: bytes, request_id: str) -> HttpAnswer:
        """ServerError fails the request; Unreachable ends the batch."""
        ...


class InProcess:
    """Calls the server's application without a socket, so that answers are those of `quire serve`."""

    def __init__(self, app: "ASGIApp", engine: "AsyncEngine") -> None:
        self.app = app
        self.engine = engine

    async def post(self, url: str, body: bytes, request_id: str) -> HttpAnswer:
        status, headers, parts = 500, {}, []
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> "Message":
            if given:
                return given.pop()
            return await asyncio.get_running_loop().create_future()  # we never hang up

        async def send(message: "Message") -> None:
            nonlocal status, headers
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            else:
                parts.append(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode())],
            "client": None,
            "server": None,
        }
        await self.app(scope, receive, send)
        if status == 503:
            await self._check_engine()
        return HttpAnswer(status, headers, b"".join(parts))

    async def _check_engine(self) -> None:
        from quire.engine.async_engine import EngineDeadError, EngineStalledError

        try:
            await self.engine.check_health()
        except EngineDeadError as error:
            raise Unreachable(f"the engine has died: {error}") from error
        except EngineStalledError as error:
            raise Unreachable(str(error)) from error


class OverHttp:
    """Threads that wait for a server; what it is too busy for is sent again."""

    def __init__(self, client: ApiClient, num_threads: int) -> None:
        self.client = client
        self.threads = ThreadPoolExecutor(num_threads, "quire-batch")

    async def post(self, url: str, body: bytes, request_id: str) -> HttpAnswer:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = await self._once(url, body, request_id)
                if answer.status not in (429, 503):
                    return answer
                pause = self.client.refusal(answer).retry_after
            except ServerError:
                if attempt == ATTEMPTS:
                    raise
                pause = None
            if attempt < ATTEMPTS:
                await asyncio.sleep(min(LONGEST_PAUSE, 0.5 * 2**attempt if pause is None else pause))
        return answer

    async def _once(self, url: str, body: bytes, request_id: str) -> HttpAnswer:
        path = url.removeprefix("/v1")

        def ask() -> HttpAnswer:
            return self.client.request("POST", path, body, **{"X-Request-Id": request_id})

        return await asyncio.get_running_loop().run_in_executor(self.threads, ask)

    def close(self) -> None:
        self.client.close()
        self.threads.shutdown(cancel_futures=True)


class Room:
    """A place for each request that is under way, and bytes for their bodies: a large file is never in memory."""

    def __init__(self, places: int, bytes: int) -> None:
        self.places, self.bytes = places, bytes
        self.taken = self.taken_bytes = 0
        self._changed = asyncio.Event()

    async def take(self, size: int) -> None:
        while self.taken and (self.taken >= self.places or self.taken_bytes + size > self.bytes):
            self._changed.clear()
            await self._changed.wait()
        self.taken += 1
        self.taken_bytes += size

    def give_back(self, size: int) -> None:
        self.taken -= 1
        self.taken_bytes -= size
        self._changed.set()


class BatchRunner:
    def __init__(self, sender: Sender, output: BatchOutput, concurrency: int, total: int) -> None:
        self.sender = sender
        self.output = output
        self.concurrency = concurrency
        self.num_failed = 0
        self.first_failure: str | None = None
        self.progress = Progress(total)

    async def run(self, requests: Iterable[BatchRequest | BadLine]) -> None:
        room = Room(self.concurrency, MAX_BYTES_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    await room.take(len(request.body))
                    tasks.create_task(self._one(request, room))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the others were cancelled for it
        finally:
            self.progress.close()

    async def _one(self, request: BatchRequest | BadLine, room: Room) -> None:
        id = f"batch_req_{uuid.uuid4().hex}"
        response, error = None, None
        if isinstance(request, BadLine):
            error = {"code": request.code, "message": f"line {request.line}: {request.problem}"}
        else:
            try:
                response = as_response(await self.sender.post(request.url, request.body, id), id)
            except Unreachable:
                raise
            except ServerError as problem:
                error = {"code": "request_failed", "message": str(problem)}
        self.output.write(
            request.place, {"id": id, "custom_id": request.custom_id, "response": response, "error": error}
        )
        if error is not None or response is None or response["status_code"] >= 400:
            self._failed(request.line, error["message"] if error else f"status {(response or {}).get('status_code')}")
        self.progress.done(response)
        room.give_back(len(request.body))

    def _failed(self, line: int, why: str) -> None:
        self.num_failed += 1
        if self.first_failure is None:
            self.first_failure = why if why.startswith("line ") else f"line {line}: {why}"


def as_response(answer: HttpAnswer, request_id: str) -> dict[str, Any]:
    try:
        if b"\n" in answer.body:
            body: Any = msgspec.json.decode(answer.body)  # a result is one line
        else:
            msgspec.json.decode(answer.body, type=msgspec.Raw)
            body = msgspec.Raw(answer.body)
    except ValueError:
        raise ServerError(f"status {answer.status} and a body that is not JSON: {answer.body[:200]!r}") from None
    known_as = answer.headers.get("x-request-id", request_id)
    return {"status_code": answer.status, "request_id": known_as, "body": body}


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


class Progress:
    """A bar with tok/s on a terminal, and nothing elsewhere."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc="Batch", unit="request", dynamic_ncols=True, disable=not sys.stderr.isatty())
        self.began = time.perf_counter()
        self.tokens = 0

    def done(self, response: dict[str, Any] | None) -> None:
        if self.bar.disable:
            return
        self.tokens += _tokens(response)
        rate = self.tokens / max(1e-9, time.perf_counter() - self.began)
        self.bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _tokens(response: dict[str, Any] | None) -> int:
    if response is None:
        return 0
    body = response["body"]
    try:
        given = msgspec.json.decode(body, type=_WithUsage) if isinstance(body, msgspec.Raw) else None
    except ValueError:
        return 0
    usage = given.usage if given is not None else None
    return usage.completion_tokens if usage is not None else 0
