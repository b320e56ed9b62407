"""Stored responses: read, followed, cancelled, deleted, and what they were given."""

import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.shown import shown
from quire.entrypoints.http.errors import bad_request, json_response
from quire.entrypoints.http.shared_store import Delete, Put
from quire.entrypoints.openai.response import encode
from quire.entrypoints.responses.answer import CANCELLED, with_status
from quire.entrypoints.responses.endpoint import ResponsesEndpoint, StoredResponse, not_found, owner

MAX_PAGE = 100
PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


class StoredEndpoints:
    def __init__(self, endpoint: ResponsesEndpoint) -> None:
        self.endpoint = endpoint
        self.context = endpoint.context

    async def one(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET, also as a stream, and DELETE."""
        request = Request(scope, receive)
        id = request.path_params["response_id"]
        if request.method == "DELETE":
            response = await self._delete(request, id)
        else:
            stored = await self.endpoint.stored(id, scope)
            if _switch(request, "stream"):
                start = _number(request, "starting_after", -1, -1, 2**31 - 1) + 1
                if not msgspec.json.decode(stored.response)["background"]:
                    raise bad_request("only responses that were started with background can be streamed", "stream")
                await self.endpoint.follow(id, start, scope, receive, send)
                return
            response = Response(bytes(stored.response), media_type="application/json")
        await response(scope, receive, send)

    async def cancel(self, request: Request) -> Response:
        id, scope = request.path_params["response_id"], request.scope
        stored = await self.endpoint.stored(id, scope)
        if not msgspec.json.decode(stored.response)["background"]:
            raise bad_request("Cannot cancel a synchronous response.", "response_id")
        cancelled = with_status(bytes(stored.response), CANCELLED)
        kept = StoredResponse(msgspec.Raw(cancelled), stored.items, stored.num_earlier)
        # Refused if it has ended in the meantime: then that is the answer.
        await self.context.store.call(Put(owner(scope), id, encode(kept), final=True, new=False))
        await self._abort(id)
        stored = await self.endpoint.stored(id, scope)
        return Response(bytes(stored.response), media_type="application/json")

    async def _delete(self, request: Request, id: str) -> Response:
        result = await self.context.store.call(Delete(owner(request.scope), id))
        if not result.done:
            raise not_found(id)
        if not result.final:
            await self._abort(id)
        return json_response({"id": id, "object": "response.deleted", "deleted": True})

    async def _abort(self, id: str) -> None:
        """It may run in any of the API processes."""
        if not await self.context.abort([id]):
            await self.context.peers.abort([id])

    async def input_items(self, request: Request) -> Response:
        id = request.path_params["response_id"]
        stored = await self.endpoint.stored(id, request.scope)
        own = stored.items[stored.num_earlier :]
        items = [_listed(item, f"{id.removeprefix('resp_')}_{index}") for index, item in enumerate(own)]
        if _choice(request, "order", ("asc", "desc"), "desc") == "desc":
            items.reverse()
        limit = _number(request, "limit", 20, 1, MAX_PAGE)
        after = request.query_params.get("after")
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if after is not None and not places:
            raise bad_request(f"after is {shown(after)}, which is none of the items", "after")
        first = places[0] + 1 if places else 0
        page = items[first : first + limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return json_response({"object": "list", "data": page, **ends, "has_more": len(items) > first + limit})


def _listed(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    shape = {"id": PREFIXES[kind] + suffix, "type": kind, "status": "completed", **item}
    if isinstance(shape.get("content"), str):
        part = "output_text" if shape.get("role") == "assistant" else "input_text"
        shape["content"] = [{"type": part, "text": shape["content"]}]
    return shape


def _switch(request: Request, name: str) -> bool:
    return _choice(request, name, ("true", "false", "1", "0"), "false") in ("true", "1")


def _choice(request: Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    given = request.query_params.get(name, default).lower()
    if given not in allowed:
        raise bad_request(f"{name} is {shown(given)}; allowed: {', '.join(allowed)}", name)
    return given


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query_params.get(name, str(default))
    if not re.fullmatch(r"-?[0-9]{1,12}", given) or not least <= int(given) <= most:
        raise bad_request(f"{name} is {shown(given)}; it must be between {least} and {most}", name)
    return int(given)
