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
        info = [Route("/tokenizer_info", self.tokenizer_info, methods=["GET"])]
        return [
            *(info if self.context.config.enable_tokenizer_info_endpoint else []),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        names = (*self.context.model_names, *(lora.lora_name for lora in self.context.adapters.all))
        return json_response({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._card(self.context.check_model(request.path_params["name"])))

    def _card(self, name: str) -> dict[str, Any]:
        lora = None if name in self.context.model_names else self.context.adapters.get(name)
        return {
            "id": name,
            "object": "model",
            "created": self.context.created,
            "owned_by": "quire",
            "root": self.engine.model_name if lora is None else lora.lora_path,
            "parent": None if lora is None else lora.base_model_name,
            "max_model_len": self.engine.max_model_len,
            "permission": [self._permission(name)],
        }

    def _permission(self, name: str) -> dict[str, Any]:
        """OpenAI's old schema, which some clients still read."""
        allowed = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
        return {
            "id": f"modelperm-{name}",
            "object": "model_permission",
            "created": self.context.created,
            **{f"allow_{what}": what in ("sampling", "logprobs", "view") for what in allowed},
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }

    async def tokenizer_info(self, request: Request) -> Response:
        """What tokenizer_config.json would say, as far as the tokenizer knows it."""
        tokenizer = self.context.tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()

        def text(token_id: int | None) -> str | None:
            return None if token_id is None else tokenizer.token_text(token_id)

        shape = {
            "tokenizer_class": type(tokenizer.backend).__name__,
            "model_max_length": self.engine.max_model_len,
            "vocab_size": tokenizer.vocab_size,
            "bos_token": text(tokenizer.bos_token_id),
            "eos_token": text(tokenizer.eos_token_id),
            "chat_template": self.context.renderer.template,
            "additional_special_tokens": [added[id].content for id in sorted(tokenizer.special_ids)],
            "added_tokens_decoder": {
                str(id): {"content": token.content, "special": token.special} for id, token in sorted(added.items())
            },
        }
        return json_response(shape)

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
