"""POST /invocations, SageMaker's one path: the body's fields decide which endpoint serves it."""

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.entrypoints.http.body import BodyReader, fields_of
from quire.entrypoints.http.errors import bad_request


class InvocationsEndpoint:
    def __init__(self, bodies: BodyReader, by_field: Mapping[str, ASGIApp]) -> None:
        self.bodies = bodies
        self.by_field = by_field

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self.bodies.read_bytes(scope, receive)
        endpoint = self._endpoint(body)
        unread = [body]
        del body  # the endpoint decides how long it is kept

        async def again() -> Message:
            return {"type": "http.request", "body": unread.pop(), "more_body": False} if unread else await receive()

        await endpoint(scope, again, send)

    def _endpoint(self, body: bytes) -> ASGIApp:
        fields = fields_of(body)
        for name, endpoint in self.by_field.items():
            if name in fields:
                return endpoint
        raise bad_request(f"the body has none of the fields that requests have: {', '.join(self.by_field)}")
