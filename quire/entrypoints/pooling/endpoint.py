"""A request that pools, from its body to its response; shared by all routes of the dialect."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.config.pooling import CLASSIFY, EMBED, TASKS, TOKEN_EMBED, TOKEN_TASKS
from quire.engine.input_processor import MAX_PRIORITY, ParsedPrompt
from quire.entrypoints.http import generation
from quire.entrypoints.http.context import LONG_TEXT, ServerContext
from quire.entrypoints.http.errors import SERVER, ApiError, bad_request
from quire.entrypoints.http.load_report import load_report
from quire.entrypoints.openai.chat import render
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.protocol import TokenizeRequest
from quire.entrypoints.pooling.inputs import PoolingInputs, Truncation, joined, split_long
from quire.entrypoints.pooling.protocol import CohereEmbedRequest, InputRequest, PooledRequest
from quire.messages.pooling_params import PoolingParams
from quire.pooling.inputs import embedding_size
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput

MANY_NUMBERS = 20_000  # in a response: encoding them on the event loop would stall other requests
ROUTES = {EMBED: "/v1/embeddings", CLASSIFY: "/classify"}

R = TypeVar("R", bound=PooledRequest | CohereEmbedRequest)
Outputs = list[PoolingRequestOutput[PoolingOutput]]


@dataclass
class Answer:
    """What a response is made of."""

    id: str
    model: str
    created: int
    outputs: Outputs

    @property
    def num_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def usage(self) -> dict[str, Any]:
        count = self.num_tokens
        return {
            "prompt_tokens": count,
            "total_tokens": count,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }

    def envelope(self, data: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.model,
            "data": data,
            "usage": self.usage,
        }


def json_body(shape: Any) -> Response:
    return Response(msgspec.json.encode(shape), media_type="application/json")


class PoolingEndpoint(ABC, Generic[R]):
    request_type: type[R]
    id_prefix: str
    input_field = "input"
    max_numbers = 1 << 26  # of a vector for each token

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.setup = context.engine_config.pooling.setup
        self.inputs = PoolingInputs(context.engine_config, lambda: context.tokenizer, context.engine.max_model_len)

    @abstractmethod
    def sources(self, request: R) -> Sequence[Any]:
        """The unprocessed inputs, checked as far as that is cheap."""

    @abstractmethod
    def prompts(self, request: R, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        """`size` is the body's, in bytes."""

    @abstractmethod
    def params(self, request: R) -> PoolingParams: ...

    @abstractmethod
    def response(self, request: R, answer: Answer) -> Response: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self.context
        request, size = await context.bodies.read(scope, receive, self.request_type)
        model = context.check_model(request.model)
        self.check_pools(scope["path"])
        context.admit()

        def tokenize() -> list[ParsedPrompt]:
            try:
                return self.prompts(request, sources, size)
            except ValueError as error:
                raise self._refused(error) from None

        try:
            params, sources = self.params(request), self.sources(request)
            self._check_priority(request.priority)
        except ValueError as error:
            raise self._refused(error) from None
        request_id = context.request_id(request.request_id, scope)
        await context.admit_sequences(len(sources), scope, context.config.max_inputs, "inputs", self.input_field)
        with context.job(self.id_prefix, request_id, len(sources), len(sources)) as job:
            whole = await context.in_thread_if(size > LONG_TEXT or len(sources) > 16, tokenize)
            salt, lora = context.cache_salt(scope, request.cache_salt), context.adapter(model)
            for prompt in whole:
                prompt.cache_salt, prompt.lora = salt, lora
            self._check_numbers(params, whole)
            try:
                prompts, counts = split_long(whole, self.setup, params.task, self.inputs.longest)
            except ValueError as error:
                raise self._refused(error) from None
            context.admit_tokens(job, prompts)
            job.num_prompts = len(prompts)
            if context.request_log is not None:
                context.request_log.received(job.engine_ids(), prompts, params)
            try:
                work = self._pooled(prompts, params, job.engine_ids(), request.priority or 0)
                outputs = await generation.while_connected(work, receive, job, context.config.request_timeout)
                answer = Answer(job.id, model, int(time.time()), outputs if counts is None else joined(outputs, counts))
                large = sum(output.outputs.data.size for output in outputs) > MANY_NUMBERS
                response = await context.in_thread_if(large, lambda: self.response(request, answer))
                response.headers.update(load_report(scope, context.engine.stats) or {})
                await response(scope, receive, send)
            finally:
                charge = scope.get("quire.charge")
                if charge is not None:
                    charge(sum(len(prompt.token_ids) for prompt in prompts))

    async def _pooled(
        self, prompts: list[ParsedPrompt], params: PoolingParams, ids: list[str], priority: int
    ) -> Outputs:
        try:
            outputs = await self.context.engine.encode_many(prompts, params, ids, priority=priority)
        except ValueError as error:
            raise self._refused(error) from None
        for output in outputs:
            if output.finish_reason == "error":
                raise generation.failure(output.request_id, output.error or "", output.error_kind)
            if output.finish_reason != "stop":
                raise ApiError(503, "the request was aborted", type=SERVER, code="aborted")
        return outputs

    def check_pools(self, path: str) -> None:
        if self.setup is None:
            raise bad_request(
                f"{path}: this model generates text; start the server with a model that embeds or classifies, or with "
                "--runner pooling",
                code="model_generates",
            )

    def check_task(self, task: str) -> None:
        """400 with the route that the model has for what it does."""
        assert self.setup is not None
        if task not in self.setup.tasks:
            can = ", ".join(f"{one} ({ROUTES.get(one, '/pooling')})" for one in TASKS if one in self.setup.tasks)
            raise bad_request(f"this model cannot {task}; it can: {can}", code="unsupported_task")

    def _check_numbers(self, params: PoolingParams, prompts: Sequence[ParsedPrompt]) -> None:
        """Those of every token are kept until the response: a small body may ask for more than memory holds."""
        if self.setup is None or params.task not in TOKEN_TASKS:
            return
        width = max(1, self.setup.num_labels)
        if params.task == TOKEN_EMBED:
            whole = embedding_size(self.context.engine_config.model.hf_config, self.setup)
            width = params.dimensions or self.setup.dimensions or whole or 1
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if num_tokens * width > self.max_numbers:
            message = f"{num_tokens} tokens have vectors of {width} numbers; at most {self.max_numbers} numbers"
            raise bad_request(f"{message} are computed for a request; send fewer inputs", self.input_field)

    def _check_priority(self, priority: int | None) -> None:
        if priority is not None and abs(priority) > MAX_PRIORITY:
            raise bad_request(
                f"priority is {priority}; it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}", "priority"
            )

    def _refused(self, error: ValueError) -> ApiError:
        return refused_value(error, self.request_type.__struct_fields__, self.input_field)


T = TypeVar("T", bound=InputRequest)


class InputEndpoint(PoolingEndpoint[T]):
    """Of requests with `input` or `messages`."""

    def sources(self, request: T) -> Sequence[Any]:
        if (request.input is None) == (request.messages is None):
            raise bad_request("give either input or messages", "input")
        if request.continue_final_message and request.add_generation_prompt:
            raise bad_request(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "add_generation_prompt"
            )
        if request.messages is not None:
            return conversations(request.messages, "messages")
        given = request.input
        if isinstance(given, list) and given and isinstance(_first_of(given), dict):
            return conversations(given, "input")
        return as_inputs(given)

    def prompts(self, request: T, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        cut = Truncation(request.truncate_prompt_tokens, request.truncation_side)
        cut.check(self.inputs.longest)
        first = sources[0]
        if isinstance(first, str):
            for text in sources:
                self._check_chars(len(text))
            prefix = self.inputs.named_prompt(request.prompt_name)
            found = self.inputs.texts(sources, request.add_special_tokens is not False, cut, prefix)
        elif isinstance(first, list) and first and isinstance(first[0], dict):
            found = [self._rendered(request, messages, size, cut) for messages in sources]
        else:
            found = self.inputs.ids(sources, cut)
        self._check_lengths(found)
        return found

    def _check_chars(self, count: int) -> None:
        if self.setup is None or not self.setup.chunked:
            self.context.check_chars(count, "input")

    def _check_lengths(self, prompts: list[ParsedPrompt]) -> None:
        longest = self.inputs.longest
        chunked = self.setup is not None and self.setup.chunked
        for place, prompt in enumerate(prompts):
            count = len(prompt.token_ids)
            which = "the input" if len(prompts) == 1 else f"input[{place}]"
            if count == 0:
                raise bad_request(f"{which} is empty; it must have at least one token", "input")
            if count > longest and not chunked:
                raise bad_request(
                    f"{which} has {count} tokens; at most {longest} are allowed (max_model_len). Please reduce the "
                    "length of the input prompt, or truncate it (truncate_prompt_tokens)",
                    "input",
                    "context_length_exceeded",
                )

    def _rendered(self, request: T, messages: list[dict[str, Any]], size: int, cut: Truncation) -> ParsedPrompt:
        asked = TokenizeRequest(
            messages=messages,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        prompt = render(self.context, asked, {}, size)
        if request.add_special_tokens:
            prompt.token_ids = self.context.tokenizer.encode(prompt.text or "", add_special_tokens=True)
        (cut_to,) = self.inputs.ids([prompt.token_ids], cut)
        return ParsedPrompt(prompt.text, cut_to.token_ids)


def _first_of(given: Any) -> Any:
    """Of a list of lists, the first of the first."""
    first = given[0]
    return first[0] if isinstance(first, list) and first else first


def as_inputs(given: Any) -> list[str] | list[list[int]]:
    """One text or list of token ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("input is an empty list; give at least one text", "input")
    kinds = {type(one) for one in given}
    if len(kinds) > 1 or kinds == {dict}:
        raise bad_request("input mixes texts, token ids and messages; send one kind", "input")
    if kinds == {int}:
        return [given]
    if kinds == {list} and any(type(token) is not int for ids in given for token in ids):
        raise bad_request("input holds a list that is not of token ids; send lists of one kind", "input")
    return list(given)


def conversations(given: Sequence[Any], field: str) -> list[list[dict[str, Any]]]:
    """One conversation, or a list of them."""
    if not given:
        raise bad_request(f"{field} is an empty list; give at least one message", field)
    kinds = {type(one) for one in given}
    if kinds == {dict}:
        return [list(given)]
    if kinds != {list} or any(not one or any(not isinstance(part, dict) for part in one) for one in given):
        raise bad_request(f"{field} must be a list of messages, or a list of such lists", field)
    return list(given)
