"""POST /invocations, SageMaker's one path: the body's fields decide which endpoint serves it."""

from collections.abc import Mapping

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.http.body import BodyReader, decoded
from quire.entrypoints.http.errors import bad_request


class Fields(msgspec.Struct):
    """The fields that tell requests apart; their values are not decoded."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class InvocationsEndpoint:
    def __init__(self, bodies: BodyReader, by_field: Mapping[str, ASGIApp]) -> None:
        self.bodies = bodies
        self.by_field = by_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self.bodies.read_bytes(scope, receive)
        fields = decoded(body, Fields)
        found = [name for name in self.by_field if getattr(fields, name) is not msgspec.UNSET]
        if not found:
            raise bad_request(f"the body has none of the fields that requests have: {', '.join(self.by_field)}")
        unread = True

        async def again() -> Message:
            nonlocal unread
            if not unread:
                return await receive()
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}

        await self.by_field[found[0]](scope, again, send)
