"""POST /v1/responses, whole, as a stream, or in the background."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http import generation
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.errors import ApiError, as_api_error, bad_request, overloaded
from quire.entrypoints.http.shared_store import Append, Delete, Follow, Get, Put
from quire.entrypoints.openai.chat import count_chars
from quire.entrypoints.openai.endpoint import EVENT_STREAM_HEADERS, Answer, Run
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.response import encode
from quire.entrypoints.openai.translated import TranslatedEndpoint
from quire.entrypoints.responses.answer import RUNNING, ResponsesAnswer
from quire.entrypoints.responses.protocol import CountRequest, ResponsesRequest
from quire.entrypoints.responses.request import ResponsesChat, chat_request
from quire.tokenizer.chat_template import Marks

LARGE_RESPONSE = 1 << 20  # bytes; decoding them on the event loop would stall every stream
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "thinking_token_budget": "reasoning",
}


class StoredResponse(msgspec.Struct):
    """What the store has: the response, and the items that it continued, of which the first are of earlier ones."""

    response: msgspec.Raw
    items: list[dict[str, Any]]
    num_earlier: int


class ResponsesEndpoint(TranslatedEndpoint[ResponsesRequest]):
    source_type = ResponsesRequest
    id_prefix = "resp_"
    names = NAMES

    def __init__(self, context: ServerContext, params: ParamsBuilder) -> None:
        super().__init__(context, params)
        self._tasks: set[asyncio.Task[None]] = set()  # of responses in the background

    # The request

    async def translated(self, source: ResponsesRequest, scope: Scope) -> ResponsesChat:
        if source.background and source.store is False:
            raise bad_request("background can only be used when `store` is true", "background")
        keeps = self.context.config.max_stored_responses > 0
        if source.background and not keeps:
            raise bad_request("background needs the store, which is off on this server (--max-stored-responses)")
        if not keeps:
            source.store = False
        return await self.continued(source, scope)

    async def continued(self, source: CountRequest, scope: Scope) -> ResponsesChat:
        """With the items of the response that this one continues, and of those before."""
        id = source.previous_response_id
        if id is None:
            return chat_request(source, [])
        if not id.startswith(self.id_prefix):
            raise bad_request(f"previous_response_id must begin with {self.id_prefix}", "previous_response_id")
        stored = await self.stored(id, scope, "previous_response_id")
        shape = msgspec.json.decode(stored.response)
        if shape["status"] not in ("completed", "incomplete"):
            raise bad_request(f"the response {id[:64]} is {shape['status']}; wait for it", "previous_response_id")
        earlier, most = [*stored.items, *shape["output"]], self.context.config.max_request_bytes
        if count_chars(earlier) > most:  # no more than a request could bring itself
            message = f"the conversation so far is larger than {most} bytes; begin a new one (--max-request-bytes)"
            raise bad_request(message, "previous_response_id", "context_length_exceeded")
        request = chat_request(source, earlier)
        request.more_bytes = count_chars(request.items)
        return request

    async def stored(self, id: str, scope: Scope, param: str = "response_id") -> StoredResponse:
        result = await self.context.store.call(Get(owner(scope), id))
        if not result.done:
            raise not_found(id, param)
        large = len(result.data) > LARGE_RESPONSE
        return await self.context.in_thread_if(large, lambda: msgspec.json.decode(result.data, type=StoredResponse))

    def request_id(self, request: ChatRequest, scope: Scope) -> str | None:
        return None  # the store's keys are ours

    def marked_prompts(self, request: ChatRequest, size: int, marks: Marks | None) -> list[ParsedPrompt]:
        """With truncation "auto", without as many of the oldest messages as do not fit."""
        assert isinstance(request, ResponsesChat)
        all_messages = request.messages
        first = int(bool(request.source.instructions))
        starts = [first, *(i for i in range(first + 1, len(all_messages)) if all_messages[i]["role"] != "tool")]
        low, high = 0, len(starts) - 1  # of the shortest prompt, which has the last message only
        try:
            return super().marked_prompts(request, size, marks)
        except ApiError as error:
            if not request.drops_oldest or error.code != "context_length_exceeded":
                raise
            while low < high:
                middle = (low + high) // 2
                if self._fits(request, all_messages, first, starts[middle], size):
                    high = middle
                else:
                    low = middle + 1
            request.messages = [*all_messages[:first], *all_messages[starts[low] :]]
            return super().marked_prompts(request, size, marks)

    def _fits(self, request: ResponsesChat, all_messages: list[Any], first: int, start: int, size: int) -> bool:
        request.messages = [*all_messages[:first], *all_messages[start:]]
        try:
            super().marked_prompts(request, size, None)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return False
            raise
        return True

    def takes_long(self, request: ChatRequest, size: int) -> bool:
        assert isinstance(request, ResponsesChat)
        return request.num_earlier > 0 or request.drops_oldest or super().takes_long(request, size)

    def response(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> Answer:
        assert isinstance(request, ResponsesChat)
        return ResponsesAnswer(id, model, request, logprobs, self.parsing(request), self.builder.defaults)

    # The response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, size = await self.read(scope, receive)
        assert isinstance(request, ResponsesChat)
        if request.source.background:
            await self._in_background(request, size, scope, receive, send)
        else:
            await self.respond(request, size, scope, receive, send)

    async def finished(self, run: Run[ChatRequest], scope: Scope) -> None:
        answer = run.answer
        assert isinstance(answer, ResponsesAnswer)
        if answer.stored and answer.error is None:
            answer.stored = await self._put(answer, scope, final=True, new=True)

    async def _put(self, answer: ResponsesAnswer, scope: Scope, final: bool, new: bool = False) -> bool:
        request = answer.request
        stored = StoredResponse(msgspec.Raw(answer.encoded()), request.items, request.num_earlier)
        result = await self.context.store.call(Put(owner(scope), answer.id, encode(stored), final, new))
        if result.full and not new and final:
            # Its output does not fit: what is kept says so.
            answer.failed(overloaded("the response is too large for the store", 5))
            answer.blocks.clear()
            answer.request.items = []
            return bool(stored.items) and await self._put(answer, scope, final=True)
        return result.done

    # In the background

    async def _in_background(
        self, request: ResponsesChat, size: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """What is wrong with the request is this request's error; then it runs without a client."""
        stack = AsyncExitStack()
        async with stack:
            run = await stack.enter_async_context(self.running(request, size, scope))
            answer = run.answer
            assert isinstance(answer, ResponsesAnswer)
            queued = answer.queued() if request.stream else b""
            first = answer.encoded()
            if not await self._put(answer, scope, final=False, new=True):
                raise overloaded("the store of responses is full of unfinished ones (--max-stored-responses)", 5)
            try:
                await self._append(answer, queued, scope)
            except BaseException:  # nobody will know its id
                await self.context.store.call(Delete(owner(scope), answer.id))
                raise
            task = asyncio.create_task(self._generate(run, stack.pop_all(), scope))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if request.stream:
            await self.follow(answer.id, 0, scope, receive, send)
        else:
            await Response(first, media_type="application/json")(scope, receive, send)

    async def _generate(self, run: Run[ChatRequest], stack: AsyncExitStack, scope: Scope) -> None:
        answer = run.answer
        assert isinstance(answer, ResponsesAnswer)
        async with stack:
            try:
                async with asyncio.timeout(self.context.config.request_timeout):
                    async with aclosing(run.outputs) as outputs:
                        batch = await self.first(outputs) if not run.job.aborted_by_admin else []
                        while batch and not run.job.aborted_by_admin:
                            generation.check_outputs(batch)
                            began = answer.status != RUNNING
                            await self._append(answer, answer.events(batch), scope)
                            if began and answer.request.stream:
                                await self._put(answer, scope, final=False)
                            batch = await anext(outputs, [])
                last = answer.end()
            except TimeoutError:
                last = answer.failed(ApiError(504, "the response took too long", code="timeout"))
            except Exception as error:
                last = answer.failed(as_api_error(error, scope))
            with suppress(ApiError):  # the store is full
                await self._append(answer, last, scope)
            await self._put(answer, scope, final=True)

    async def _append(self, answer: ResponsesAnswer, events: bytes, scope: Scope) -> None:
        if not answer.request.stream or not events:
            return
        parts = [part + b"\n\n" for part in events.split(b"\n\n")[:-1]]
        result = await self.context.store.call(Append(owner(scope), answer.id, parts))
        if result.full:
            raise overloaded("the response is too large for the store", 5)

    async def follow(self, id: str, start: int, scope: Scope, receive: Receive, send: Send) -> None:
        """The stream of a response in the background, from event `start` on."""

        async def events() -> AsyncIterator[bytes]:
            at = start
            while True:
                result = await self.context.store.call(Follow(owner(scope), id, at))
                at += len(result.events)
                yield b"".join(result.events)
                if not result.done or (result.final and not result.events):
                    return

        async def copy() -> None:
            async for data in events():
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
        with self.context.job("follow-", None, 0, 0) as job, suppress(ApiError):  # the stream has begun
            await self._while_connected(copy(), receive, job)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def owner(scope: Scope) -> bytes:
    """Whose responses they are: the API key's digest, or the same for all without keys."""
    key: bytes | None = scope.get("quire.key")
    return key or b""


def not_found(id: str, param: str = "response_id") -> ApiError:
    """In vLLM's words, which clients look for."""
    return ApiError(404, f"Response with id '{id[:64]}' not found.", param=param, code="not_found")
