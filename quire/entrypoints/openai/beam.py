"""`use_beam_search`: its parameters from a request's fields, and the search over the asynchronous engine."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from quire.engine.async_engine import AsyncEngine
from quire.engine.input_processor import ParsedPrompt
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.entrypoints.beam_search import Beam, BeamSearch, BeamSearchParams, check_engine
from quire.entrypoints.http.context import Job, ServerContext
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.http.generation import Batch
from quire.entrypoints.openai.errors import refused_value
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizer.detokenizer import IncrementalDetokenizer

# Fields that beam search does not implement, with their neutral values: any other value is refused rather than ignored.
# Fields that only matter for random sampling (top_p, seed, ...) are accepted.
INCOMPATIBLE: dict[str, Any] = {
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    "min_tokens": 0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "repetition_detection": None,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "vllm_xargs": None,
    "suffix": "",
    "thinking_token_budget": None,
    "logprob_token_ids": None,
    "prompt_embeds": None,
    "watermarking": False,
    "routed_experts_prompt_start": 0,
}

T = TypeVar("T")


@dataclass(slots=True)
class BeamRequest:
    beams: BeamSearchParams
    n: int  # sequences to return
    params: SamplingParams  # for detokenization and traces
    num_logprobs: int | None


def beam_request(request: GenerationRequest, context: ServerContext, builder: ParamsBuilder) -> BeamRequest:
    _refuse_incompatible(request)
    n = 1 if request.n is None else request.n
    width, limit, logprobs = n, request.max_tokens, None
    if isinstance(request, CompletionRequest):
        width = n if request.best_of is None else request.best_of
        limit = builder.completion_max_tokens if limit is None else limit
        logprobs = request.logprobs
    elif isinstance(request, ChatRequest):
        limit = request.max_completion_tokens if request.max_completion_tokens is not None else limit
        limit = builder.max_tokens if limit is None else limit
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    if not 1 <= n <= width or width > context.config.max_n:
        name = "best_of" if width != n else "n"
        raise bad_request(f"{name} is {width}; beam search needs n beams or more, {context.config.max_n} at most", name)
    if logprobs is not None and logprobs < 0:
        raise bad_request(f"logprobs is {logprobs}; with use_beam_search it must be 0 or more", "logprobs")
    longest = context.engine.max_model_len
    try:
        check_engine(context.engine_config.model.logprobs_mode)
        beams = BeamSearchParams(
            beam_width=width,
            max_tokens=longest if limit is None else min(limit, longest),
            ignore_eos=bool(request.ignore_eos),
            temperature=request.temperature or 0.0,
            length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
            include_stop_str_in_output=bool(request.include_stop_str_in_output),
            early_stopping=False if request.early_stopping is None else request.early_stopping,
        )
        params = SamplingParams(
            n=n,
            max_tokens=beams.max_tokens,
            skip_special_tokens=request.skip_special_tokens is not False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except ValueError as error:
        raise refused_value(error, request.__struct_fields__, "use_beam_search") from None
    return BeamRequest(beams, n, params, logprobs)


def _refuse_incompatible(request: GenerationRequest) -> None:
    if request.stream:
        raise bad_request("use_beam_search: beams are only known at the end; send the request without stream", "stream")
    for name, neutral in INCOMPATIBLE.items():
        if getattr(request, name, None) not in (None, neutral):
            raise bad_request(f"{name} cannot be used with use_beam_search; leave one of them out", name)
    if (request.response_format or {}).get("type", "text") != "text":
        raise bad_request("response_format cannot be used with use_beam_search", "response_format")
    if isinstance(request, ChatRequest) and request.tool_choice not in (None, "none", "auto"):
        raise bad_request("a forced tool_choice cannot be used with use_beam_search", "tool_choice")
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise bad_request("echo with logprobs cannot be used with use_beam_search", "logprobs")


async def outputs(
    context: ServerContext,
    job: Job,
    prompts: Sequence[ParsedPrompt],
    search_request: BeamRequest,
    params: SamplingParams,
    priority: int,
) -> AsyncGenerator[Batch, None]:
    """One output per prompt, when its search is complete; none if it was aborted. `params` are those of
    `search_request`, adjusted to the prompt."""
    search_request = replace(search_request, params=params)

    async def one(prompt_index: int, prompt: ParsedPrompt, name: str) -> tuple[int, RequestOutput | None]:
        try:
            return prompt_index, await _search(context, job, prompt, name, search_request, priority)
        except ValueError as error:
            raise ValueError(f"prompt[{prompt_index}]: {error}") if len(prompts) > 1 else error from None

    names = job.engine_ids()
    async with _tasks(one(i, prompt, names[i]) for i, prompt in enumerate(prompts)) as tasks:
        for task in asyncio.as_completed(tasks):
            prompt_index, output = await task
            if output is not None:
                yield ((prompt_index, output),)


async def _search(
    context: ServerContext, job: Job, prompt: ParsedPrompt, name: str, search_request: BeamRequest, priority: int
) -> RequestOutput | None:
    engine, model = context.engine, context.engine_config.model
    search = BeamSearch(prompt, search_request.beams, engine.max_model_len, model.eos_token_ids, model.vocab_size)
    params = search.step_params
    if search_request.num_logprobs is not None:
        params = params.replace(logprobs=max(params.logprobs or 0, search_request.num_logprobs))
    first: RequestOutput | None = None
    while not search.done:
        if job.aborted_by_admin:
            return None
        beams = search.prompts()
        ids = [f"{name} beam {search.length} {i}" for i in range(len(beams))]
        job.beams.update(ids)
        try:
            async with _tasks(
                _step(engine, beam, params, id, priority) for beam, id in zip(beams, ids, strict=True)
            ) as tasks:
                steps = await asyncio.gather(*tasks)
        finally:
            job.beams.difference_update(ids)
        for step in steps:
            if step.error is not None:
                return step  # check_outputs() raises its error
            if step.outputs[0].finish_reason == "abort":
                return None
        first = first or steps[0]
        search.process_outputs(steps)
    return _output(engine, name, search, search_request, first)


async def _step(
    engine: AsyncEngine, prompt: ParsedPrompt, params: SamplingParams, id: str, priority: int
) -> RequestOutput:
    stream = engine.generate(prompt, params, id, priority=priority)
    try:
        return await anext(stream)
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


@asynccontextmanager
async def _tasks(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Cancels unfinished tasks on exit, which aborts their engine requests."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _output(
    engine: AsyncEngine, name: str, search: BeamSearch, search_request: BeamRequest, first: RequestOutput | None
) -> RequestOutput:
    best = search.finished[: search_request.n]
    times = first.metrics if first is not None else None
    if times is not None:
        times.last_token_time = times.finished_time = time.time()
        times.num_generation_tokens = sum(len(beam.token_ids) for beam in best)
    return RequestOutput(
        request_id=name,
        prompt=search.prompt.text,
        prompt_token_ids=search.prompt.token_ids,
        prompt_logprobs=None,
        outputs=[_completion(engine, i, search, beam, search_request) for i, beam in enumerate(best)],
        finished=True,
        num_cached_tokens=search.num_cached_tokens,
        metrics=times,
    )


def _completion(
    engine: AsyncEngine, index: int, search: BeamSearch, beam: Beam, search_request: BeamRequest
) -> CompletionOutput:
    text = ""
    if engine.tokenizer is not None:
        hidden = beam.finish_reason == "stop" and not search_request.beams.include_stop_str_in_output
        skip, visible = search_request.params.skip_special_tokens, frozenset(search_request.params.visible_token_ids)
        decoder = IncrementalDetokenizer(engine.tokenizer, search.prompt.token_ids, skip, visible=visible)
        decoder.add(beam.token_ids[: len(beam.token_ids) - hidden])
        decoder.flush()
        text = decoder.text
    logprobs = None
    if search_request.num_logprobs is not None:
        logprobs = [
            _chosen_and_best(token, entry, search_request.num_logprobs)
            for token, entry in zip(beam.token_ids, beam.entries, strict=True)
        ]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=beam.token_ids,
        cumulative_logprob=beam.cum_logprob,
        logprobs=logprobs,
        finish_reason=beam.finish_reason,
    )


def _chosen_and_best(token: int, entry: dict[int, Logprob], count: int) -> dict[int, Logprob]:
    """In the order of sampled responses: the token itself first, then the most likely."""
    return {token: entry[token], **dict(list(entry.items())[:count])}
