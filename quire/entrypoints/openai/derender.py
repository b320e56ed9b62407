"""POST /v1/completions/derender and /v1/chat/completions/derender: what /inference/v1/generate has generated, as the
response to the request that /render has rendered."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.entrypoints.http.context import LONG_TEXT, ServerContext
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.openai.chat import ChatEndpoint
from quire.entrypoints.openai.chat_response import ChatResponse
from quire.entrypoints.openai.completions import CompletionEndpoint
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderRequest,
    GeneratedChoice,
    GeneratedLogprob,
    GeneratedTokens,
)
from quire.entrypoints.openai.response import ResponseBuilder
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer

R = TypeVar("R", bound=DerenderRequest)


@dataclass
class Generated:
    """A prompt's tokens. `num_prompt_tokens`: the client's count, if it gives one."""

    response: GeneratedTokens
    prompt_token_ids: list[int]
    num_prompt_tokens: int


class DerenderEndpoint(ABC, Generic[R]):
    request_type: type[R]

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    @abstractmethod
    def generated(self, request: R) -> list[Generated]: ...

    @abstractmethod
    def response(self, request: R, id: str, model: str, generated: list[Generated]) -> ResponseBuilder: ...

    @abstractmethod
    def params(self, request: R, prompt: str, prompt_token_ids: list[int]) -> SamplingParams:
        """They say which special tokens the text shows."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        request, size = await context.bodies.read(scope, receive, self.request_type)
        model = context.check_model(request.model)
        if request.stream:
            raise not_available("stream", "streams of detokenized chunks")

        def derender() -> bytes:
            generated = self.generated(request)
            if not generated:
                raise bad_request("generate_responses is empty; give at least one", "generate_responses")
            for one in generated:
                self._check(one)
            id = generated[0].response.request_id or ""
            response = self.response(request, id, model, generated)
            shape = response.whole([self._output(request, one) for one in generated])
            num_prompt = sum(one.num_prompt_tokens for one in generated)
            response.usage.prompt_tokens = num_prompt
            shape["usage"] = response.usage.shape()
            if "prompt_logprobs" in shape:
                shape["prompt_logprobs"] = generated[0].response.prompt_logprobs
            return msgspec.json.encode(shape)

        body = await context.in_thread_if(size > LONG_TEXT, derender)
        await Response(body, media_type="application/json")(scope, receive, send)

    def _check(self, generated: Generated) -> None:
        response, config = generated.response, self.context.config
        if response.output_mode != "tokens":
            raise bad_request(f"output_mode is {shown(response.output_mode)}; it must be tokens", "output_mode")
        if not 1 <= len(response.choices) <= config.max_n:
            message = f"choices holds {len(response.choices)} entries; 1 to {config.max_n} are allowed (--max-n)"
            raise bad_request(message, "choices")
        if sorted(choice.index for choice in response.choices) != list(range(len(response.choices))):
            raise bad_request("choices must be numbered 0, 1, ... by index", "choices")
        vocab, longest = self.context.tokenizer.vocab_size, self.context.engine.max_model_len
        named: list[Sequence[int]] = [choice.token_ids or () for choice in response.choices]
        for ids in [*named, generated.prompt_token_ids]:
            if len(ids) > longest:
                message = f"token_ids holds {len(ids)} ids; at most {longest} are allowed (--max-model-len)"
                raise bad_request(message, "token_ids")
            if ids and max(ids) >= vocab:
                raise bad_request(f"token_ids has {max(ids)}; the vocabulary has {vocab} tokens", "token_ids")
        for choice in response.choices:
            if not choice.token_ids:
                raise bad_request(f"choice {choice.index} has no token_ids; give at least one", "token_ids")
            if len(_entries(choice) or choice.token_ids) != len(choice.token_ids):
                raise bad_request(f"logprobs of choice {choice.index} are not one for each token", "logprobs")

    def _output(self, request: R, generated: Generated) -> RequestOutput:
        tokenizer, ids = self.context.tokenizer, generated.prompt_token_ids
        prompt = tokenizer.decode(ids, skip_special_tokens=False)
        params = self.params(request, prompt, ids)
        outputs = []
        for choice in generated.response.choices:
            tokens, visible = choice.token_ids or [], frozenset(params.visible_token_ids)
            detokenizer = IncrementalDetokenizer(tokenizer, ids, params.skip_special_tokens, visible=visible)
            text = detokenizer.add(tokens) + detokenizer.flush()
            one = CompletionOutput(choice.index, text, tokens, finish_reason=choice.finish_reason)
            one.stop_reason = choice.stop_reason
            one.logprobs = [_entry(found) for found in _entries(choice)]
            outputs.append(one)
        return RequestOutput(generated.response.request_id or "", prompt, ids, None, outputs, True)


class DerenderChatEndpoint(DerenderEndpoint[DerenderChatRequest]):
    request_type = DerenderChatRequest

    def __init__(self, context: ServerContext, endpoint: ChatEndpoint) -> None:
        super().__init__(context)
        self.endpoint = endpoint

    def generated(self, request: DerenderChatRequest) -> list[Generated]:
        return [_generated(request.generate_response, request.prompt_token_ids, request.prompt_tokens)]

    def params(self, request: DerenderChatRequest, prompt: str, prompt_token_ids: list[int]) -> SamplingParams:
        given = request.chat_request
        if given is None:
            return SamplingParams()
        return self.endpoint.adjusted(given, self.endpoint.params(given), [ParsedPrompt(prompt, prompt_token_ids)])

    def response(
        self, request: DerenderChatRequest, id: str, model: str, generated: list[Generated]
    ) -> ResponseBuilder:
        choices = generated[0].response.choices
        given, format = request.chat_request, LogprobFormat(self.context.tokenizer, False)
        if given is not None and not given.messages:
            raise bad_request("chat_request has no messages; give the request that was rendered", "messages")
        chat = given or ChatRequest(messages=[])
        chat.n = len(choices)
        chat.logprobs = all(_entries(choice) for choice in choices)
        if chat.top_logprobs is None:
            chat.top_logprobs = _num_top(choices)
        if given is None:
            return ChatResponse(id, model, self.endpoint.options, chat, format, self.context.config.response_role)
        self.endpoint.tools.check(given)
        format.as_token_ids = self.endpoint.as_token_ids(given)
        return self.endpoint.response(id, model, given, format)


class DerenderCompletionEndpoint(DerenderEndpoint[DerenderCompletionRequest]):
    request_type = DerenderCompletionRequest

    def __init__(self, context: ServerContext, endpoint: CompletionEndpoint) -> None:
        super().__init__(context)
        self.endpoint = endpoint

    def generated(self, request: DerenderCompletionRequest) -> list[Generated]:
        responses, most = request.generate_responses, self.context.config.max_prompts
        if len(responses) > most:
            message = f"generate_responses holds {len(responses)} entries; at most {most} are allowed (--max-prompts)"
            raise bad_request(message, "generate_responses")
        for name in ("prompt_tokens", "prompt_token_ids"):
            given = getattr(request, name)
            if given is not None and len(given) != len(responses):
                message = f"{name} has {len(given)} entries; generate_responses has {len(responses)}"
                raise bad_request(message, name)
        ids = request.prompt_token_ids or [None] * len(responses)
        counts: Sequence[int | None] = request.prompt_tokens or [None] * len(responses)
        return [_generated(*one) for one in zip(responses, ids, counts, strict=True)]

    def params(self, request: DerenderCompletionRequest, prompt: str, prompt_token_ids: list[int]) -> SamplingParams:
        given = request.completion_request
        return SamplingParams() if given is None else self.endpoint.params(given)

    def response(
        self, request: DerenderCompletionRequest, id: str, model: str, generated: list[Generated]
    ) -> ResponseBuilder:
        given = request.completion_request or CompletionRequest(prompt="")
        choices = [choice for one in generated for choice in one.response.choices]
        given.n = len(generated[0].response.choices)
        if any(len(one.response.choices) != given.n for one in generated):
            raise bad_request("generate_responses must have equally many choices", "generate_responses")
        given.logprobs = _num_top(choices) if all(_entries(choice) for choice in choices) else None
        return self.endpoint.response(id, model, given, LogprobFormat(self.context.tokenizer, False))


def _generated(response: GeneratedTokens, ids: list[int] | None, count: int | None) -> Generated:
    known = ids if ids is not None else response.prompt_token_ids or []
    return Generated(response, known, len(known) if count is None else count)


def _entries(choice: GeneratedChoice) -> list[GeneratedLogprob]:
    return choice.logprobs.content or [] if choice.logprobs is not None else []


def _num_top(choices: Sequence[GeneratedChoice]) -> int:
    return max((len(one.top_logprobs) for choice in choices for one in _entries(choice)), default=0)


def _entry(found: GeneratedLogprob) -> dict[int, Logprob]:
    """The sampled token first, then the likeliest."""
    return {one.token_id: Logprob(one.logprob, one.rank, None) for one in (found, *found.top_logprobs)}
