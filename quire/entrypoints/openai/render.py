"""POST /v1/completions/render and /v1/chat/completions/render: a request as tokens, as /inference/v1/generate takes
them, without generating anything."""

import uuid
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.errors import json_response
from quire.entrypoints.openai.endpoint import GenerationEndpoint
from quire.entrypoints.openai.protocol import GenerationRequest
from quire.messages.sampling_params import SamplingParams

R = TypeVar("R", bound=GenerationRequest)


class RenderEndpoint(Generic[R]):
    """`single`: one prompt, as chat has; else a list."""

    def __init__(self, endpoint: GenerationEndpoint[R], single: bool) -> None:
        self.endpoint = endpoint
        self.single = single

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint, context = self.endpoint, self.endpoint.context
        request, size = await context.bodies.read(scope, receive, endpoint.request_type)
        model = context.check_model(request.model)
        offsets = bool(request.return_token_offsets)

        def render() -> list[dict[str, Any]]:
            params = endpoint.params(request)
            prompts = endpoint.prompts(request, endpoint.sources(request), size)
            params = endpoint.adjusted(request, params, prompts)
            return [self._tokens_request(request, model, params, prompt, offsets) for prompt in prompts]

        rendered = await context.in_thread_if(endpoint.takes_long(request, size), render)
        await json_response(rendered[0] if self.single else rendered)(scope, receive, send)

    def _tokens_request(
        self, request: R, model: str, params: SamplingParams, prompt: ParsedPrompt, offsets: bool
    ) -> dict[str, Any]:
        sampling = msgspec.to_builtins(params)
        sampling.pop("output_kind", None)  # /inference/v1/generate decides by `stream`
        return {
            "request_id": f"{self.endpoint.id_prefix}{request.request_id or uuid.uuid4().hex}",
            "model": model,
            "token_ids": prompt.token_ids,
            "token_offsets": self._offsets(prompt) if offsets else None,
            "sampling_params": sampling | {"max_tokens": params.max_tokens},
            "stream": bool(request.stream),
            "stream_options": request.stream_options,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
            "features": None,
            "assistant_tokens_mask": None,
        }

    def _offsets(self, prompt: ParsedPrompt) -> list[tuple[int, int]] | None:
        """Where each token begins and ends in the text; None where the tokenizer cannot say, or there is no text."""
        if prompt.text is None:
            return None
        for special in (True, False):
            found = self.endpoint.context.tokenizer.encode_with_offsets(prompt.text, special)
            if found is not None and found[0] == prompt.token_ids:
                return found[1]
        return None
