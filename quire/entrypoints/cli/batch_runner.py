"""Runs a batch with limited concurrency, in this process or against a server."""

import asyncio
import sys
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.entrypoints.cli.api_client import ApiClient, HttpResponse, ServerError, Unreachable
from quire.entrypoints.cli.batch_input import BadLine, BatchRequest
from quire.entrypoints.cli.batch_output import BatchOutput

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from quire.engine.async_engine import AsyncEngine

MAX_BYTES_IN_FLIGHT = 256 << 20  # of request bodies
ATTEMPTS = 6
MAX_BACKOFF = 30.0  # seconds before a retry


class Sender(Protocol):
    async def post(self, url: str, body: bytes, request_id: str) -> HttpResponse:
        """ServerError fails the request; Unreachable ends the batch."""
        ...


class InProcess:
    """Calls the server's application without a socket, so that responses are those of `quire serve`."""

    def __init__(self, app: "ASGIApp", engine: "AsyncEngine") -> None:
        self.app = app
        self.engine = engine

    async def post(self, url: str, body: bytes, request_id: str) -> HttpResponse:
        status, headers, parts = 500, {}, []
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> "Message":
            if given:
                return given.pop()
            return await asyncio.get_running_loop().create_future()  # never disconnects

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
        return HttpResponse(status, headers, b"".join(parts))

    async def _check_engine(self) -> None:
        from quire.engine.async_engine import EngineDeadError, EngineStalledError

        try:
            await self.engine.check_health()
        except EngineDeadError as error:
            raise Unreachable(f"the engine has died: {error}") from error
        except EngineStalledError as error:
            raise Unreachable(str(error)) from error


class OverHttp:
    """Sends requests from threads; retries when the server is busy."""

    def __init__(self, client: ApiClient, num_threads: int) -> None:
        self.client = client
        self.threads = ThreadPoolExecutor(num_threads, "quire-batch")

    async def post(self, url: str, body: bytes, request_id: str) -> HttpResponse:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                result = await self._once(url, body, request_id)
                if result.status not in (429, 503):
                    return result
                pause = self.client.refusal(result).retry_after
            except ServerError:
                if attempt == ATTEMPTS:
                    raise
                pause = None
            if attempt < ATTEMPTS:
                await asyncio.sleep(min(MAX_BACKOFF, 0.5 * 2**attempt if pause is None else pause))
        return result

    async def _once(self, url: str, body: bytes, request_id: str) -> HttpResponse:
        path = url.removeprefix("/v1")

        def send() -> HttpResponse:
            return self.client.request("POST", path, body, **{"X-Request-Id": request_id})

        return await asyncio.get_running_loop().run_in_executor(self.threads, send)

    def close(self) -> None:
        self.client.close()
        self.threads.shutdown(cancel_futures=True)


class InFlightLimit:
    """Limits the requests in flight and the bytes of their bodies, so that a large file is never in memory at once."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.num_requests = self.num_bytes = 0
        self._changed = asyncio.Event()

    async def acquire(self, size: int) -> None:
        while self.num_requests and (self.num_requests >= self.max_requests or self.num_bytes + size > self.max_bytes):
            self._changed.clear()
            await self._changed.wait()
        self.num_requests += 1
        self.num_bytes += size

    def release(self, size: int) -> None:
        self.num_requests -= 1
        self.num_bytes -= size
        self._changed.set()


class BatchRunner:
    def __init__(self, sender: Sender, output: BatchOutput, concurrency: int, total: int) -> None:
        self.sender = sender
        self.output = output
        self.concurrency = concurrency
        self.num_failed = 0
        self.has_invalid_lines = False
        self.first_failure: str | None = None
        self.progress = Progress(total)

    async def run(self, requests: Iterable[BatchRequest | BadLine]) -> None:
        limit = InFlightLimit(self.concurrency, MAX_BYTES_IN_FLIGHT)
        try:
            async with asyncio.TaskGroup() as tasks:
                for request in requests:
                    await limit.acquire(len(request.body))
                    tasks.create_task(self._one(request, limit))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the cause; the others were cancelled
        finally:
            self.progress.close()

    async def _one(self, request: BatchRequest | BadLine, limit: InFlightLimit) -> None:
        id = f"batch_req_{uuid.uuid4().hex}"
        response, error = None, None
        if isinstance(request, BadLine):
            error = {"code": request.code, "message": f"line {request.line}: {request.problem}"}
            self.has_invalid_lines |= not request.is_request
        else:
            try:
                response = as_response(await self.sender.post(request.url, request.body, id), id)
            except Unreachable:
                raise
            except ServerError as problem:
                error = {"code": "request_failed", "message": str(problem)}
        self.output.write(
            request.index, {"id": id, "custom_id": request.custom_id, "response": response, "error": error}
        )
        if error is not None or response is None or response["status_code"] >= 400:
            self._failed(request.line, error["message"] if error else f"status {(response or {}).get('status_code')}")
        self.progress.done(response)
        limit.release(len(request.body))

    def _failed(self, line: int, why: str) -> None:
        self.num_failed += 1
        if self.first_failure is None:
            self.first_failure = why if why.startswith("line ") else f"line {line}: {why}"


def as_response(result: HttpResponse, request_id: str) -> dict[str, Any]:
    try:
        if b"\n" in result.body:
            body: Any = msgspec.json.decode(result.body)  # the output is one line per result
        else:
            msgspec.json.decode(result.body, type=msgspec.Raw)
            body = msgspec.Raw(result.body)
    except ValueError:
        raise ServerError(f"status {result.status} and a body that is not JSON: {result.body[:200]!r}") from None
    server_id = result.headers.get("x-request-id", request_id)
    return {"status_code": result.status, "request_id": server_id, "body": body}


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Usage | None = None


class Progress:
    """A progress bar with tok/s, on terminals only."""

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
