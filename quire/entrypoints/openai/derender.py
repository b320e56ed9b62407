"""POST /v1/completions/derender and /v1/chat/completions/derender: what /inference/v1/generate has generated, as the
response to the request that /render has rendered."""

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.entrypoints.http.context import LONG_TEXT, ServerContext
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.openai.chat import ChatEndpoint
from quire.entrypoints.openai.chat_response import ChatResponse
from quire.entrypoints.openai.completions import CompletionEndpoint
from quire.entrypoints.openai.endpoint import GenerationEndpoint
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderRequest,
    DerenderState,
    GeneratedChoice,
    GeneratedLogprob,
    GeneratedTokens,
)
from quire.entrypoints.openai.response import ResponseBuilder
from quire.entrypoints.parsers.detect import JSON
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer

R = TypeVar("R", bound=DerenderRequest)


@dataclass
class Generated:
    """A prompt's tokens. `prompt_token_ids` may be the prompt's end alone: its length is the client's to say."""

    response: GeneratedTokens
    prompt_token_ids: list[int]
    num_prompt_tokens: int | None


@dataclass
class Detokenized:
    token_ids: list[int]
    text: str = ""


class DerenderEndpoint(ABC, Generic[R]):
    request_type: type[R]

    def __init__(self, context: ServerContext, endpoint: GenerationEndpoint[Any]) -> None:
        self.context = context
        self.endpoint = endpoint

    @abstractmethod
    def generated(self, request: R) -> list[Generated]:
        """Of a whole response, one for each prompt."""

    @abstractmethod
    def chunk(self, request: R, chunk: GeneratedTokens) -> Generated: ...

    @abstractmethod
    def response(self, request: R, id: str, model: str, generated: list[Generated]) -> ResponseBuilder: ...

    @abstractmethod
    def params(self, request: R) -> SamplingParams:
        """Of the request that was rendered, checked; they say which special tokens the text shows."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        request, size = await context.bodies.read(scope, receive, self.request_type)
        model = context.check_model(request.model)
        context.admit()
        generated = [self._given_chunk(request)] if request.stream else self.generated(request)
        await self.endpoint.admit(len(generated), scope)  # as for /render

        def derender() -> bytes:
            make = self._chunk if request.stream else self._whole
            return msgspec.json.encode(make(request, model, generated))

        body = await context.in_thread_if(size > LONG_TEXT, derender)
        await Response(body, media_type="application/json")(scope, receive, send)

    def _whole(self, request: R, model: str, generated: list[Generated]) -> dict[str, Any]:
        for one in generated:
            self._check(one)
            numbers = sorted(choice.index for choice in one.response.choices)
            if not numbers or numbers != list(range(len(numbers))):
                raise bad_request("choices needs at least one, numbered 0, 1, ... by index", "choices")
            for choice in one.response.choices:
                if not choice.token_ids:
                    raise bad_request(f"choice {choice.index} has no token_ids; give at least one", "token_ids")
        params = self.params(request)
        response = self.response(request, generated[0].response.request_id or "", model, generated)
        shape = response.whole([self._output(params, one) for one in generated])
        response.usage.prompt_tokens = sum(one.num_prompt_tokens or 0 for one in generated)
        shape["usage"] = response.usage.shape()
        if "prompt_logprobs" in shape:
            shape["prompt_logprobs"] = generated[0].response.prompt_logprobs
        return shape

    def _given_chunk(self, request: R) -> Generated:
        if request.generate_chunk is None:
            raise bad_request("generate_chunk is missing; give an event of the stream", "generate_chunk")
        return self.chunk(request, request.generate_chunk)

    def _chunk(self, request: R, model: str, generated: list[Generated]) -> dict[str, Any]:
        """One event, and the state for the next. Parsers keep no state between calls: they read what came before."""
        given, state = generated[0].response, request.stream_state or DerenderState()
        if len(given.choices) > 1:
            raise bad_request(f"choices holds {len(given.choices)} entries; a chunk has one", "choices")
        self._check(generated[0], len(state.output_token_ids))
        self._check_ids(state.output_token_ids)
        params = self.params(request)
        response = self.response(request, given.request_id or "", model, generated)
        events: list[dict[str, Any]] = []
        if given.choices:
            earlier = Detokenized(state.output_token_ids)
            output = self._output(params, generated[0], earlier)
            (new,) = output.outputs
            if state.started:
                before = CompletionOutput(new.index, earlier.text, earlier.token_ids)
                before.logprobs = [{token: Logprob(0.0, 1, None)} for token in earlier.token_ids]  # not read
                response.events([(0, dataclasses.replace(output, outputs=[before]))])
            data = response.events([(0, output)])
            events = [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]
            state = DerenderState(output_token_ids=[*state.output_token_ids, *new.token_ids], started=True)
        chunk = {**response.head, "object": response.chunk_object, "choices": _joined(events), "usage": None}
        if given.usage is not None:
            count, done = generated[0].num_prompt_tokens, given.usage.completion_tokens or 0
            prompt = (given.usage.prompt_tokens or 0) if count is None else count
            chunk["usage"] = {"prompt_tokens": prompt, "completion_tokens": done, "total_tokens": prompt + done}
        return {"chunk": chunk, "stream_state": state}

    def _check(self, generated: Generated, num_before: int = 0) -> None:
        response, most = generated.response, self.context.config.max_n
        if response.output_mode != "tokens":
            raise bad_request(f"output_mode is {shown(response.output_mode)}; it must be tokens", "output_mode")
        if len(response.choices) > most or not all(0 <= choice.index < most for choice in response.choices):
            message = f"choices holds {len(response.choices)} entries; at most {most}, numbered from 0, are allowed"
            raise bad_request(f"{message} (--max-n)", "choices")
        self._check_ids(generated.prompt_token_ids)
        for choice in response.choices:
            tokens, entries = choice.token_ids or [], _entries(choice)
            self._check_ids(tokens, num_before)
            if entries and [one.token_id for one in entries] != tokens:
                message = f"logprobs of choice {choice.index} must have one entry for each of token_ids, in their order"
                raise bad_request(message, "logprobs")
            # The likeliest tokens are of the model's vocabulary, which may be padded beyond the tokenizer's.
            vocab = max(self.endpoint.builder.vocab_size, self.context.tokenizer.vocab_size)
            if any(top.token_id >= vocab for one in entries for top in one.top_logprobs):
                message = f"top_logprobs of choice {choice.index} has ids beyond the vocabulary of {vocab} tokens"
                raise bad_request(message, "top_logprobs")

    def _check_ids(self, ids: Sequence[int], num_before: int = 0) -> None:
        vocab, longest = self.context.tokenizer.vocab_size, self.context.engine.max_model_len
        if num_before + len(ids) > longest:
            message = f"token_ids holds {num_before + len(ids)} ids; at most {longest} are allowed (--max-model-len)"
            raise bad_request(message, "token_ids")
        if ids and max(ids) >= vocab:
            raise bad_request(f"token_ids has {max(ids)}; the vocabulary has {vocab} tokens", "token_ids")

    def _output(
        self, params: SamplingParams, generated: Generated, detokenized: Detokenized | None = None
    ) -> RequestOutput:
        """`detokenized` has the tokens of earlier chunks, and gets their text."""
        tokenizer, ids = self.context.tokenizer, generated.prompt_token_ids
        prompt = tokenizer.decode(ids, skip_special_tokens=False)
        outputs = []
        for choice in generated.response.choices:
            tokens, visible = choice.token_ids or [], frozenset(params.visible_token_ids)
            detokenizer = IncrementalDetokenizer(tokenizer, ids, params.skip_special_tokens, visible=visible)
            if detokenized is not None:
                detokenized.text = detokenizer.add(detokenized.token_ids)
            text = detokenizer.add(tokens)
            if detokenized is None or choice.finish_reason is not None:
                text += detokenizer.flush()
            one = CompletionOutput(choice.index, text, tokens, finish_reason=choice.finish_reason)
            one.stop_reason = choice.stop_reason
            one.logprobs = [_entry(found) for found in _entries(choice)]
            outputs.append(one)
        return RequestOutput(generated.response.request_id or "", prompt, ids, None, outputs, True)


class DerenderChatEndpoint(DerenderEndpoint[DerenderChatRequest]):
    request_type = DerenderChatRequest
    endpoint: ChatEndpoint

    def generated(self, request: DerenderChatRequest) -> list[Generated]:
        if request.generate_response is None:
            raise bad_request("generate_response is missing; give one", "generate_response")
        return [_generated(request.generate_response, request.prompt_token_ids, request.prompt_tokens)]

    def chunk(self, request: DerenderChatRequest, chunk: GeneratedTokens) -> Generated:
        if self._parses and request.prompt_token_ids is None:
            message = "prompt_token_ids is missing; the parser for this model's responses needs them in a stream"
            raise bad_request(message, "prompt_token_ids")
        return _generated(chunk, request.prompt_token_ids, request.prompt_tokens)

    def params(self, request: DerenderChatRequest) -> SamplingParams:
        given = request.chat_request
        if given is None:
            if self._parses:  # else the markup would be shown as content
                message = "chat_request is missing; the parser for this model's responses needs the rendered request"
                raise bad_request(message, "chat_request")
            return SamplingParams()
        if not given.messages:
            raise bad_request("chat_request has no messages; give the request that was rendered", "messages")
        self.endpoint.tools.check(given)
        return self.endpoint.adjusted(given, self.endpoint.params(given), [ParsedPrompt("", [])])

    @property
    def _parses(self) -> bool:
        """Models without a tool format of their own get JSON's, which parses nothing unless a request has tools."""
        names = self.context.parsers
        return names.reasoning is not None or names.tools not in (None, JSON)

    def response(
        self, request: DerenderChatRequest, id: str, model: str, generated: list[Generated]
    ) -> ResponseBuilder:
        choices = generated[0].response.choices
        given, format = request.chat_request, LogprobFormat(self.context.tokenizer, False)
        chat = replace(given or ChatRequest(messages=[]), n=_num_choices(choices), logprobs=_has_logprobs(choices))
        if chat.top_logprobs is None:
            chat.top_logprobs = _num_top(choices)
        if given is None:
            return ChatResponse(id, model, self.endpoint.options, chat, format, self.context.config.response_role)
        format.as_token_ids = self.endpoint.as_token_ids(given)
        return self.endpoint.chat_response(id, model, chat, format)


class DerenderCompletionEndpoint(DerenderEndpoint[DerenderCompletionRequest]):
    request_type = DerenderCompletionRequest
    endpoint: CompletionEndpoint

    def generated(self, request: DerenderCompletionRequest) -> list[Generated]:
        responses, most = request.generate_responses or [], self.context.config.max_prompts
        if not responses:
            raise bad_request("generate_responses is empty; give at least one", "generate_responses")
        if len(responses) > most:
            message = f"generate_responses holds {len(responses)} entries; at most {most} are allowed (--max-prompts)"
            raise bad_request(message, "generate_responses")
        for name in ("prompt_tokens", "prompt_token_ids"):
            given = getattr(request, name)
            if given is not None and (isinstance(given, int) or len(given) != len(responses)):
                raise bad_request(f"{name} must have one entry for each of generate_responses", name)
        ids = request.prompt_token_ids or [None] * len(responses)
        counts: Any = request.prompt_tokens or [None] * len(responses)
        if any(isinstance(one, int) for one in ids):
            raise bad_request("prompt_token_ids must be a list of lists", "prompt_token_ids")
        return [_generated(*one) for one in zip(responses, ids, counts, strict=True)]

    def chunk(self, request: DerenderCompletionRequest, chunk: GeneratedTokens) -> Generated:
        ids, count = request.prompt_token_ids, request.prompt_tokens
        if isinstance(count, list) or (ids is not None and not all(isinstance(id, int) for id in ids)):
            raise bad_request("a chunk has one prompt: prompt_tokens is a number, prompt_token_ids a list of ids", None)
        return _generated(chunk, ids, count)

    def params(self, request: DerenderCompletionRequest) -> SamplingParams:
        given = request.completion_request
        return SamplingParams() if given is None else self.endpoint.params(given)

    def response(
        self, request: DerenderCompletionRequest, id: str, model: str, generated: list[Generated]
    ) -> ResponseBuilder:
        choices = [choice for one in generated for choice in one.response.choices]
        n, num_top = _num_choices(choices), _num_top(choices) if _has_logprobs(choices) else None
        if any(_num_choices(one.response.choices) != n for one in generated):
            raise bad_request("generate_responses must have equally many choices", "generate_responses")
        given = replace(request.completion_request or CompletionRequest(prompt=""), n=n, logprobs=num_top)
        return self.endpoint.response(id, model, given, LogprobFormat(self.context.tokenizer, False))


def _generated(response: GeneratedTokens, ids: Any, count: int | None) -> Generated:
    return Generated(response, ids if ids is not None else response.prompt_token_ids or [], count)


def _num_choices(choices: Sequence[GeneratedChoice]) -> int:
    return 1 + max((choice.index for choice in choices), default=0)


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choice of several events as one."""
    if not events:
        return []
    first, *others = [event["choices"][0] for event in events]
    for other in others:
        for name in ("text", "logprobs", "finish_reason", "stop_reason", "token_ids"):
            _add(first, name, other.get(name))
        for name, value in other.get("delta", {}).items():
            _add(first["delta"], name, value)
    return [first]


def _add(shape: dict[str, Any], name: str, value: Any) -> None:
    if value is not None:
        before = shape.get(name)
        shape[name] = before + value if isinstance(before, str | list) and name != "finish_reason" else value


def _entries(choice: GeneratedChoice) -> list[GeneratedLogprob]:
    return choice.logprobs.content or [] if choice.logprobs is not None else []


def _has_logprobs(choices: Sequence[GeneratedChoice]) -> bool:
    return bool(choices) and all(_entries(choice) for choice in choices)


def _num_top(choices: Sequence[GeneratedChoice]) -> int:
    return max((len(one.top_logprobs) for choice in choices for one in _entries(choice)), default=0)


def _entry(found: GeneratedLogprob) -> dict[int, Logprob]:
    """The sampled token first, then the likeliest."""
    return {one.token_id: Logprob(one.logprob, one.rank, None) for one in (found, *found.top_logprobs)}
