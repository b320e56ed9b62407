"""POST /v1/completions/render and /v1/chat/completions/render: a request as tokens, as /inference/v1/generate takes
them, without generating anything."""

import uuid
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.context import LONG_TEXT
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.chat import ChatPrompt
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
        request, size = await endpoint.read(scope, receive)
        model = context.check_model(request.model)
        context.admit()
        request_id = endpoint.request_id(request, scope)

        def prepare() -> tuple[SamplingParams, Sequence[Any]]:
            return endpoint.params(request), endpoint.sources(request)

        def render() -> bytes:
            prompts = endpoint.rendered(request, sources, size)
            if any(prompt.features for prompt in prompts):
                raise bad_request("prompt_embeds cannot be rendered: they have no token ids", "prompt_embeds")
            adjusted = endpoint.adjusted(request, params, prompts)
            shared = msgspec.json.encode(self._shared(request, model, adjusted))
            _check_size(len(shared), len(prompts), context.config.max_request_bytes)
            rendered = [self._own(request, request_id, prompt)[:-1] + b"," + shared[1:] for prompt in prompts]
            return rendered[0] if self.single else b"[%b]" % b",".join(rendered)

        params, sources = await context.in_thread_if(size > LONG_TEXT, prepare)
        await endpoint.admit(len(sources), scope)  # each prompt is tokenized, and counts as a request to /tokenize does
        long = endpoint.takes_long(request, size) or not self.single
        body = await context.in_thread_if(long, render)
        await Response(body, media_type="application/json")(scope, receive, send)

    def _own(self, request: R, request_id: str | None, prompt: ParsedPrompt) -> bytes:
        """The fields that differ from prompt to prompt."""
        shape = {
            "request_id": f"{self.endpoint.id_prefix}{request_id or uuid.uuid4().hex}",
            "token_ids": prompt.token_ids,
            "token_offsets": self._offsets(prompt) if request.return_token_offsets else None,
            "assistant_tokens_mask": self._mask(prompt),
        }
        return msgspec.json.encode(shape)

    def _shared(self, request: R, model: str, params: SamplingParams) -> dict[str, Any]:
        sampling = msgspec.to_builtins(params)
        for name in ("type", "output_kind"):  # /inference/v1/generate decides the latter by `stream`
            sampling.pop(name, None)
        for name in ("field", "checked"):  # between this server's processes only
            sampling.get("structured_outputs", {}).pop(name, None)
        return {
            "model": model,
            "sampling_params": sampling | {"max_tokens": params.max_tokens},
            "stream": bool(request.stream),
            "stream_options": request.stream_options,
            "cache_salt": request.cache_salt,
            "priority": request.priority or 0,
            "features": None,
        }

    def _mask(self, prompt: ParsedPrompt) -> list[int] | None:
        """1 for the tokens of the assistant's words, 0 for others."""
        spans = prompt.assistant_spans if isinstance(prompt, ChatPrompt) else None
        offsets = self._offsets(prompt) if spans is not None else None
        if spans is None or offsets is None:
            return None
        ends = [end for _, end in spans]
        next_spans = ((last, bisect_right(ends, first)) for first, last in offsets)
        return [int(at < len(spans) and spans[at][0] < last) for last, at in next_spans]

    def _offsets(self, prompt: ParsedPrompt) -> list[tuple[int, int]] | None:
        """Where each token begins and ends in the text; None where the tokenizer cannot say, or there is no text."""
        if prompt.text is None:
            return None
        for special in (True, False):
            found = self.endpoint.context.tokenizer.encode_with_offsets(prompt.text, special)
            if found is not None and found[0] == prompt.token_ids:
                return found[1]
        return None


def _check_size(size: int, count: int, most: int) -> None:
    """Every prompt repeats the parameters: a small body must not become a huge response."""
    if size * count > most:
        message = f"{size} bytes of parameters for each of {count} prompts; at most {most} bytes are allowed"
        raise bad_request(f"{message} (--max-request-bytes)", "prompt", "response_too_large")
