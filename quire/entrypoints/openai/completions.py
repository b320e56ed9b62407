"""POST /v1/completions"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.entrypoints.http.context import LONG_TEXT
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.endpoint import GenerationEndpoint
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.logprobs import LogprobFormat, prompt_logprobs
from quire.entrypoints.openai.output_parsing import ReasoningSetup
from quire.entrypoints.openai.params import truncated_right
from quire.entrypoints.openai.prompt_embeds import read_prompt_embeds
from quire.entrypoints.openai.protocol import CompletionRequest
from quire.entrypoints.openai.response import ResponseBuilder, ResponseOptions, encode
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import groups_to_encode


class CompletionEndpoint(GenerationEndpoint[CompletionRequest]):
    request_type = CompletionRequest
    id_prefix = "cmpl-"
    prompt_field = "prompt"

    @functools.cached_property
    def reasoning(self) -> ReasoningSetup | None:
        return ReasoningSetup.of(self.context)

    def params(self, request: CompletionRequest) -> SamplingParams:
        return self.builder.for_completion(request)

    def takes_long(self, request: CompletionRequest, size: int) -> bool:
        return size > LONG_TEXT or request.prompt_embeds is not None

    def sources(self, request: CompletionRequest) -> Sequence[Any]:
        given: list[Any] = embeds_of(request)
        if request.prompt is None and not given:
            raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        given += as_prompts(request.prompt) if request.prompt is not None else []
        most = self.context.config.max_prompts
        if len(given) > most:
            message = f"prompt holds {len(given)} prompts; at most {most} are allowed (--max-prompts)"
            raise bad_request(message, "prompt")
        return given

    def prompts(self, request: CompletionRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        multiple, truncated = len(sources) > 1, request.truncate_prompt_tokens is not None
        longest = self.context.engine.max_model_len - 1
        prompts = self._embedded(request)
        sources = sources[len(prompts) :]
        if sources and not isinstance(sources[0], str):
            for prompt_index, ids in enumerate(sources, len(prompts)):
                self.check_length(truncated, len(ids), prompt_index if multiple else None)
            return prompts + [ParsedPrompt(None, truncated_right(request, ids, longest)) for ids in sources]
        for text in sources:
            self.context.check_chars(len(text), "prompt")
        for texts in groups_to_encode(sources, len):
            try:
                encoded = self.context.tokenizer.encode_batch(texts, request.add_special_tokens is not False)
            except ValueError as error:
                raise refused_value(error, (), "prompt") from None
            for text, ids in zip(texts, encoded, strict=True):
                self.check_length(truncated, len(ids), len(prompts) if multiple else None)
                prompts.append(ParsedPrompt(text, truncated_right(request, ids, longest)))
        return prompts

    def adjusted(
        self, request: CompletionRequest, params: SamplingParams, prompts: list[ParsedPrompt]
    ) -> SamplingParams:
        """A budget for reasoning needs its tags."""
        tokenizer, setup = self.context.engine.tokenizer, self.reasoning
        if params.thinking_token_budget is None or tokenizer is None or setup is None:
            return params
        texts = [prompt.text or tokenizer.decode(prompt.token_ids, skip_special_tokens=False) for prompt in prompts]
        opened = {setup.format.is_open(text) for text in texts}
        return setup.adjust(params, opened.pop() if len(opened) == 1 else None)

    def _embedded(self, request: CompletionRequest) -> list[ParsedPrompt]:
        encoded = embeds_of(request)
        if not encoded:
            return []
        if not self.context.engine.config.model.enable_prompt_embeds:
            raise bad_request("prompt_embeds need a server started with --enable-prompt-embeds", "prompt_embeds")
        for name in ("echo", "use_beam_search", "truncate_prompt_tokens"):
            if getattr(request, name):
                raise bad_request(f"{name} is not compatible with prompt_embeds, which have no token ids", name)
        try:
            prompts = [read_prompt_embeds(one) for one in encoded]
        except ValueError as error:
            raise refused_value(error, (), "prompt_embeds") from None
        for place, prompt in enumerate(prompts):
            self.check_length(False, len(prompt.token_ids), place)
        return prompts

    def prompt_copies(self, request: CompletionRequest, params: SamplingParams) -> int:
        """Every choice repeats them, and so does an echoed prompt."""
        shown = (request.prompt_logprobs is not None) + bool(request.echo and request.logprobs is not None)
        return params.n * shown

    def response(self, id: str, model: str, request: CompletionRequest, logprobs: LogprobFormat) -> ResponseBuilder:
        return CompletionResponse(id, model, self.options, request, logprobs)


def embeds_of(request: CompletionRequest) -> list[str]:
    given = request.prompt_embeds or []
    return [given] if isinstance(given, str) else list(given)


def as_prompts(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of a request: one string or token list, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
    kinds = {type(one) for one in prompt}
    if len(kinds) > 1:
        raise bad_request("prompt mixes strings and token ids; send one kind", "prompt")
    return [prompt] if kinds == {int} else prompt


class CompletionResponse(ResponseBuilder):
    object = chunk_object = "text_completion"
    text_prefix, text_suffix = b',"text":', b""
    no_text = b',"text":""'

    def __init__(
        self, id: str, model: str, options: ResponseOptions, request: CompletionRequest, logprobs: LogprobFormat
    ) -> None:
        self.request = request
        self._offsets: dict[int, int] = {}
        self._first_fields: dict[int, bytes] = {}  # of the choice's first event with a token
        self.only_prompt = bool(request.echo) and request.max_tokens == 0
        super().__init__(id, model, options, request, logprobs)

    @property
    def with_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def events(self, batch: Batch) -> bytes:
        return super().events([(i, without_generated(out)) for i, out in batch] if self.only_prompt else batch)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return super().whole([without_generated(output) for output in outputs] if self.only_prompt else outputs)

    def first_events(self, choice: int, prompt_index: int, output: RequestOutput) -> list[bytes]:
        choice_fields = b""
        if self.with_token_ids:
            self._first_fields[choice] = b',"prompt_token_ids":' + encode(output.prompt_token_ids)
        if self.with_prompt_logprobs:
            choice_fields += b',"prompt_logprobs":' + encode(prompt_logprobs(output.prompt_logprobs))
        if not self.request.echo:
            return [self.event(choice, self.no_text, choice_fields=choice_fields)] if choice_fields else []
        logprobs = encode(self._prompt_part(choice, output)) if self.with_logprobs else b"null"
        return [self.event(choice, self.text(self._prompt_text(output)), logprobs, choice_fields=choice_fields)]

    def token_fields(self, completion: CompletionOutput, choice: int) -> bytes:
        return super().token_fields(completion, choice) + self._first_fields.pop(choice, b"")

    def choice(
        self, index: int, prompt_index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        echo = bool(self.request.echo)
        logprobs = None
        if self.with_logprobs:
            parts = [self._prompt_part(index, output)] if echo else []
            parts.append(self.logprobs(index, completion))
            logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
        return {
            "index": index,
            "text": self._prompt_text(output) + completion.text if echo else completion.text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self.with_token_ids else None,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs) if self.with_prompt_logprobs else None,
            "prompt_token_ids": output.prompt_token_ids if self.with_token_ids else None,
            "routed_experts": None,
        }

    def logprobs(self, choice: int, completion: CompletionOutput) -> dict[str, Any]:
        offset = self._offsets.get(choice, 0)
        shape, offset = self.logprob_format.completion(completion.token_ids, completion.logprobs or [], offset)
        self._offsets[choice] = offset
        return shape

    def _prompt_part(self, choice: int, output: RequestOutput) -> dict[str, Any]:
        entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        shape, offset = self.logprob_format.completion(output.prompt_token_ids, entries, 0)
        self._offsets[choice] = offset
        return shape

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self.request.truncate_prompt_tokens is None:
            return output.prompt
        tokenizer = self.logprob_format.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def without_generated(output: RequestOutput) -> RequestOutput:
    """For max_tokens=0 with echo (prompt scoring): drops the one token that the engine generates at least."""
    choices = [dataclasses.replace(one, text="", token_ids=[], logprobs=[]) for one in output.outputs]
    return dataclasses.replace(output, outputs=choices)
