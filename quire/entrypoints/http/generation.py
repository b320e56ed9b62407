"""Running a request's prompts through the engine, for as long as its client is there."""

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
    ErrorKind.NOT_A_NUMBER: "the model's scores are not numbers, or allow no token",
}
BUSY_SECONDS = 5  # after which a client may try again

T = TypeVar("T")
Batch = Sequence[tuple[int, RequestOutput]]  # which prompt, and its news


async def outputs(
    engine: AsyncEngine, job: Job, prompts: Sequence[ParsedPrompt], params: SamplingParams, priority: int
) -> AsyncGenerator[Batch, None]:
    """Everything the engine has for this request, as often as there is something."""
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


async def _merged(streams: list[AsyncIterator[RequestOutput]]) -> AsyncGenerator[Batch, None]:
    # A client that reads slowly fills the queue; the engine then merges what it has for each prompt.
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(2 * len(streams))

    async def pump(place: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                await queue.put((place, output))
            await queue.put((place, None))
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also a panic of a Rust library: whoever waits for the queue must hear of it
            await queue.put((place, error))
        finally:
            await _close(stream)

    tasks = [asyncio.create_task(pump(place, stream)) for place, stream in enumerate(streams)]
    try:
        running = len(streams)
        while running:
            batch: list[tuple[int, RequestOutput]] = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for place, item in items:
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise _of_prompt(place, item)
                else:
                    batch.append((place, item))
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(stream: AsyncIterator[RequestOutput]) -> None:
    """Leaving a stream early aborts its request; closing says so at once instead of when it is collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


def _of_prompt(place: int, error: BaseException) -> BaseException:
    return ValueError(f"prompt[{place}]: {error}") if isinstance(error, ValueError) else error


async def while_connected(work: Coroutine[Any, Any, T], receive: Receive, job: Job, timeout: float | None) -> T:
    """`work`, given up as soon as the client leaves, the time is over, or the server ends its requests."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_disconnect(receive))
    aborted = asyncio.create_task(job.aborted.wait())
    try:
        await asyncio.wait({task, left, aborted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        for one in (task, left, aborted):
            one.cancel()
        await asyncio.gather(task, left, aborted, return_exceptions=True)
    if left.done() and not left.cancelled():
        raise ClientDisconnected
    if job.aborted.is_set():
        if job.engine_died:
            raise engine_dead()
        raise ApiError(503, "the server is shutting down; the request was ended", type=SERVER, code="shutting_down")
    raise ApiError(504, f"the request took more than {timeout:g} seconds", type=SERVER, code="timeout")


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check_outputs(batch: Batch) -> None:
    """The engine failed a request. What was wrong with it, or that there was no room for it, is for the client; any
    other cause is for the log."""
    for _, output in batch:
        if any(choice.finish_reason == "error" for choice in output.outputs):
            message, kind = output.error or "", output.error_kind
            if kind == ErrorKind.INVALID:
                field = message.partition(":")[0]
                raise bad_request(message, field if field in FIELDS else None)
            if kind == ErrorKind.BUSY:
                raise overloaded(message, BUSY_SECONDS)
            logger.error("the engine failed request %s: %s", output.request_id, message)
            cause = PUBLIC_CAUSES.get(kind, "an internal error") if kind is not None else "an internal error"
            where = f"the server's log has more under request id {output.request_id}"
            raise ApiError(500, f"the engine failed this request: {cause}; {where}", type=SERVER, code="engine_error")
