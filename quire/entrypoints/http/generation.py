"""Runs a request's prompts through the engine while its client is connected."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from quire.engine.async_engine import AsyncEngine
from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import RequestOutput
from quire.entrypoints.http.body import ClientDisconnected
from quire.entrypoints.http.context import Job
from quire.entrypoints.http.errors import SERVER, ApiError, bad_request, engine_dead, overloaded
from quire.messages.requests import ErrorKind
from quire.messages.sampling_params import SamplingParams
from quire.messages.structured import FIELDS

logger = logging.getLogger("quire")

PUBLIC_CAUSES = {
    ErrorKind.OUT_OF_MEMORY: "out of memory",
    ErrorKind.NOT_A_NUMBER: "the logits are NaN, or mask every token",
}
BUSY_SECONDS = 5  # Retry-After

T = TypeVar("T")
Batch = Sequence[tuple[int, RequestOutput]]  # prompt index and its new output


async def outputs(
    engine: AsyncEngine, job: Job, prompts: Sequence[ParsedPrompt], params: SamplingParams, priority: int
) -> AsyncGenerator[Batch, None]:
    """The engine's outputs for all prompts of this request, as they arrive."""
    streams = [
        engine.generate(prompt, params, id, priority=priority)
        for prompt, id in zip(prompts, job.engine_ids(), strict=True)
    ]
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                yield ((0, output),)
        finally:
            await _close(streams[0])
        return
    async with aclosing(_merged(streams)) as merged:
        async for batch in merged:
            yield batch


async def until_first(outputs: AsyncGenerator[Batch, None], job: Job) -> AsyncGenerator[Batch, None]:
    """Passes outputs through; with the first one the job's prompts wait no longer."""
    async with aclosing(outputs):
        async for batch in outputs:
            job.queued_tokens = 0
            yield batch


async def _merged(streams: list[AsyncIterator[RequestOutput]]) -> AsyncGenerator[Batch, None]:
    # A slow client fills the queue; the engine then merges the outputs of each prompt.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(2 * len(streams))

    async def pump(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
            await queue.put((index, None))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also panics of Rust libraries: the consumer must receive it
            await queue.put((index, error))
        finally:
            await _close(stream)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            batch: list[tuple[int, RequestOutput]] = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for index, item in items:
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise _of_prompt(index, item)
                else:
                    batch.append((index, item))
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    """Closing an unfinished stream aborts its request now, not at garbage collection."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def _of_prompt(index: int, error: BaseException) -> BaseException:
    return ValueError(f"prompt[{index}]: {error}") if isinstance(error, ValueError) else error


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, job: Job, timeout: float | None) -> T:
    """`work`, cancelled when the client disconnects, the timeout expires, or the server aborts its requests."""
    task = asyncio.create_task(work)
    disconnected = asyncio.create_task(_disconnect(receive))
    aborted = asyncio.create_task(job.aborted.wait())
    try:
        await asyncio.wait({task, disconnected, aborted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        for one in (task, disconnected, aborted):
            one.cancel()
        await asyncio.gather(task, disconnected, aborted, return_exceptions=True)
    if disconnected.done() and not disconnected.cancelled():
        raise ClientDisconnected
    if job.aborted.is_set():
        if job.engine_died:
            raise engine_dead()
        raise ApiError(503, "the server is shutting down; the request was aborted", type=SERVER, code="shutting_down")
    raise ApiError(504, f"the request took more than {timeout:g} seconds", type=SERVER, code="timeout")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check_outputs(batch: Batch) -> None:
    """Raise the error of a request that the engine failed. Clients see invalid input and overload; other causes are
    logged."""
    for _, output in batch:
        if any(choice.finish_reason == "error" for choice in output.outputs):
            raise failure(output.request_id, output.error or "", output.error_kind)


def failure(request_id: str, message: str, kind: ErrorKind | None) -> ApiError:
    if kind == ErrorKind.INVALID:
        field = message.partition(":")[0]
        return bad_request(message, field if field in FIELDS else None)
    if kind == ErrorKind.BUSY:
        return overloaded(message, BUSY_SECONDS)
    logger.error("the engine failed request %s: %s", request_id, message)
    cause = PUBLIC_CAUSES.get(kind, "internal error") if kind is not None else "internal error"
    where = f"see the server's log for request id {request_id}"
    return ApiError(500, f"the engine failed this request: {cause}; {where}", type=SERVER, code="engine_error")
