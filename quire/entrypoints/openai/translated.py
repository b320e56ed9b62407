"""Requests of other APIs as chat requests: rendered, limited, sampled and parsed as those are."""

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from quire.config.shown import shown
from quire.entrypoints.http.errors import ApiError, bad_request, json_response
from quire.entrypoints.openai.chat import ChatEndpoint
from quire.entrypoints.openai.endpoint import Run
from quire.entrypoints.openai.protocol import ChatRequest

S = TypeVar("S", bound=msgspec.Struct)


class TranslatedRequest(ChatRequest, kw_only=True):
    source: Any = None  # the request as the client sent it
    more_bytes: int = 0  # of the prompt, beside the body's


class TranslatedEndpoint(ChatEndpoint, Generic[S]):
    """`source_type` is the API's own body; `names` are its names for what chat requests call otherwise."""

    source_type: type[S]
    names: ClassVar[Mapping[str, str]]

    @abstractmethod
    async def translated(self, source: S, scope: Scope) -> TranslatedRequest: ...

    async def read(self, scope: Scope, receive: Receive) -> tuple[ChatRequest, int]:
        source, size = await self.context.bodies.read(scope, receive, self.source_type)
        with self.own_names():
            request = await self.translated(source, scope)
            return request, size + request.more_bytes

    @asynccontextmanager
    async def running(self, request: ChatRequest, size: int, scope: Scope) -> AsyncIterator[Run[ChatRequest]]:
        with self.own_names():
            async with super().running(request, size, scope) as run:
                yield run

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors name the fields that the client has sent."""
        try:
            yield
        except ApiError as error:
            raise renamed(error, self.names) from None


class CountEndpoint:
    """How many tokens a prompt has, of a body with what the prompt is made of."""

    def __init__(
        self,
        endpoint: TranslatedEndpoint[Any],
        source_type: type[msgspec.Struct],
        translate: Callable[[Any, Scope], Awaitable[TranslatedRequest]],
        shape: Callable[[int], dict[str, Any]],
    ) -> None:
        self.endpoint, self.source_type, self.translate, self.shape = endpoint, source_type, translate, shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, context = self.endpoint, self.endpoint.context
        source, size = await context.bodies.read(scope, receive, self.source_type)
        with endpoint.own_names():
            request = await self.translate(source, scope)
            context.check_model(request.model)
            context.admit()
            size += request.more_bytes
            long = endpoint.takes_long(request, size)
            (prompt,) = await context.in_thread_if(long, lambda: endpoint.prompts(request, [request.messages], size))
        await json_response(self.shape(len(prompt.token_ids)))(scope, receive, send)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    old = error.param
    new = names.get(old, old) if old is not None else None
    if old is None or new is None or old == new:
        return error
    message = new + error.message[len(old) :] if error.message.startswith(old) else error.message
    return ApiError(error.status, message, type=error.type, param=new, code=error.code, headers=error.headers)


def kind_of(value: Any, where: str, allowed: str, default: str | None = None) -> tuple[Mapping[str, Any], str]:
    """An object, and its type."""
    if not isinstance(value, Mapping):
        raise bad_request(f"{where} must be an object, not {type(value).__name__}", param_of(where))
    kind = value.get("type", default)
    if not isinstance(kind, str):
        raise bad_request(f"{where}.type is {shown(kind)}; allowed: {allowed}", param_of(where))
    return value, kind


def string(value: Mapping[str, Any], name: str, where: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise bad_request(f"{where}.{name} must be a string, not {type(found).__name__}", param_of(where))
    return found


def param_of(where: str) -> str:
    """The request's field, of a place such as input[2].content."""
    return where.partition("[")[0].partition(".")[0]
