"""Endpoints that generate nothing: /v1/models, and vLLM's /tokenize and /detokenize."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.entrypoints.http.context import LONG_TEXT, ServerContext
from quire.entrypoints.http.errors import bad_request, json_response
from quire.entrypoints.openai.chat import render, takes_long
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.protocol import DetokenizeRequest, TokenizeRequest


class ModelEndpoints:
    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.engine = context.engine

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.context.model_names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self.context.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.context.created,
            "owned_by": "quire",
            "root": self.engine.model_name,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }

    async def tokenize(self, http: Request) -> Response:
        context = self.context
        request, size = await context.bodies.read(http.scope, http.receive, TokenizeRequest)
        context.check_model(request.model)
        tokenizer = context.tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("give either prompt or messages", "prompt")

        def encode() -> tuple[list[int], list[str] | None]:
            if request.messages is not None:
                ids = render(context, request, {}, size).token_ids
            else:
                context.check_chars(len(request.prompt or ""), "prompt")
                try:
                    ids = tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
                except ValueError as error:
                    raise refused_value(error, (), "prompt") from None
            return ids, tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None

        ids, strings = await context.in_thread_if(takes_long(request, size), encode)
        shape = {"count": len(ids), "max_model_len": self.engine.max_model_len, "tokens": ids, "token_strs": strings}
        return json_response(shape)

    async def detokenize(self, http: Request) -> Response:
        request, size = await self.context.bodies.read(http.scope, http.receive, DetokenizeRequest)
        self.context.check_model(request.model)
        tokenizer, ids, longest = self.context.tokenizer, request.tokens, self.engine.max_model_len
        if len(ids) > longest:
            raise bad_request(f"tokens holds {len(ids)} ids; at most {longest} are allowed (--max-model-len)", "tokens")
        skip = bool(request.skip_special_tokens)
        text = await self.context.in_thread_if(size > LONG_TEXT, lambda: tokenizer.decode(ids, skip))
        return json_response({"prompt": text})
