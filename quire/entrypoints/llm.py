"""Offline use: `LLM(...)`, `generate`, `chat`, `beam_search`; what pools is in pooling/offline.py."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.compat.unavailable import UnavailableMethods, refuse_unavailable, tokenization
from quire.compat.vllm_interface import NO_TOKENIZER, ModelView
from quire.config import EngineConfig
from quire.config.logs import set_up_logging
from quire.config.vllm.unpack import logging_options
from quire.engine.input_processor import ParsedPrompt, Prompt
from quire.engine.llm_engine import LLMEngine
from quire.engine.outputs import RequestOutput
from quire.entrypoints.interruption import interruption
from quire.entrypoints.llm_inputs import Progress, as_prompts, is_conversation, per_prompt, truncating
from quire.entrypoints.pooling.offline import PoolingMethods
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import ErrorKind
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.metrics.kinds import Metric, with_vectors
from quire.weights.engine_methods import ControlMethods

if TYPE_CHECKING:
    from quire.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams
    from quire.entrypoints.chat_renderer import ChatRenderer
    from quire.tokenizer.user_tokenizer import UserTokenizer

REFUSED = (ErrorKind.INVALID, ErrorKind.BUSY)  # a request that was never started


class LLM(PoolingMethods, ControlMethods, UnavailableMethods):
    """A model and its engine in this process. Arguments are vLLM's engine arguments; without `model` the embedded
    SmolLM2 is used.

    llm = LLM()
    outputs = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=20))
    print(outputs[0].outputs[0].text)

    With `multiprocess=True` the engine runs in its own process, and a crash of it does not end this one. Such a program
    needs the usual `if __name__ == "__main__":` of Python's multiprocessing.
    """

    def __init__(self, model: str | None = None, *, multiprocess: bool = False, **engine_args: Any) -> None:
        set_up_logging(*logging_options(engine_args))
        self.llm_engine = LLMEngine(EngineConfig.from_kwargs(model=model, **engine_args), multiprocess=multiprocess)
        self._counter = 0
        self._enqueued: list[str] = []
        self._early: dict[str, RequestOutput] = {}  # of enqueued requests that ended while others were waited for

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> "LLM":
        """From `EngineArgs`."""
        return cls(**engine_args.given())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a string, token ids, or a dict with either); outputs are in the order of the prompts.

        All prompts are checked before any runs: after an error the engine is unchanged. `use_tqdm` may be a class to
        use in place of tqdm's.
        """
        refuse_unavailable(mm_processor_kwargs)
        ids = self._add_prompts(prompts, sampling_params, priority, tokenization_kwargs, lora_request)
        return self._run(ids, use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Add prompts without running them: `wait_for_completion` does, for all that were enqueued before."""
        refuse_unavailable(mm_processor_kwargs)
        return self._enqueued_as(
            self._add_prompts(prompts, sampling_params, priority, tokenization_kwargs, lora_request)
        )

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Add conversations as `enqueue` adds prompts."""
        refuse_unavailable(mm_processor_kwargs)
        ids = self._add_conversations(
            messages,
            sampling_params,
            priority,
            tokenization_kwargs,
            chat_template_content_format,
            lora_request,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self._enqueued_as(ids)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """The outputs of all enqueued requests, in their order; `output_type` is what they must be."""
        ids, self._enqueued = self._enqueued, []
        outputs = self._run(ids, use_tqdm)
        if output_type is not None and not all(isinstance(output, output_type) for output in outputs):
            raise TypeError(f"the outputs are RequestOutput; output_type is {output_type!r}")
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        `chat_template` is Jinja text or a file, used instead of the model's own.
        """
        refuse_unavailable(mm_processor_kwargs)
        ids = self._add_conversations(
            messages,
            sampling_params,
            priority,
            tokenization_kwargs,
            chat_template_content_format,
            lora_request,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        return self._run(ids, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: "BeamSearchParams",
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list["BeamSearchOutput"]:
        """The best `params.beam_width` continuations of each prompt, best first, as transformers' beam search finds
        them. At most `concurrency_limit` prompts are searched at a time; default: all."""
        from quire.entrypoints.beam_search import BeamSearch, check_engine, run_searches

        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit is {concurrency_limit}; it must be 1 or more, or None")
        engine = self.llm_engine
        model = engine.config.model
        check_engine(model.logprobs_mode)
        parsed = engine.input_processor.parse_many(as_prompts(prompts))
        if lora_request is not None:
            parsed = engine.input_processor.with_adapters(parsed, lora_request)
        searches = [
            BeamSearch(prompt, params, engine.max_model_len, model.eos_token_ids, model.vocab_size) for prompt in parsed
        ]
        for search in searches:  # all are checked before any runs
            engine.input_processor.process("", search.prompt, search.step_params)
        bar = None
        if use_tqdm:
            from tqdm import tqdm

            bar = tqdm(total=len(searches), desc="Searching", unit="prompt", dynamic_ncols=True)
        try:
            ended = (lambda search: bar.update()) if bar is not None else (lambda search: None)
            run_searches(engine, searches, self._new_id, concurrency_limit, ended)
        finally:
            if bar is not None:
                bar.close()
        results = [search.result() for search in searches]
        if engine.tokenizer is not None:
            for sequence in (one for result in results for one in result.sequences):
                sequence.text = engine.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
        return results

    @cached_property
    def _chat_renderer(self) -> "ChatRenderer":
        from quire.entrypoints.chat_renderer import ChatRenderer

        engine = self.llm_engine
        if engine.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        return ChatRenderer(engine.tokenizer, engine.config.model.chat_template)

    def get_tokenizer(self) -> "UserTokenizer":
        """The model's tokenizer with the methods of transformers' that programs use."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of `generate` and `chat`: the model's own, from its generation_config.json."""
        return SamplingParams(**self.llm_engine.config.model.default_sampling)

    @property
    def model_config(self) -> ModelView:
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many workers the model is distributed over."""
        return self.llm_engine.config.parallel.tensor_parallel_size

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or a function with the worker as its first argument; a result per worker."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call a function with each worker's model (a torch.nn.Module)."""
        return self.llm_engine.apply_model(func)

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each worker's part of the checkpoint to files of its own (at most `max_size` bytes each), which
        `load_format="sharded_state"` loads with as many workers."""
        self.llm_engine.engine_core.save_sharded_state(path, pattern, max_size)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record with torch's profiler until `stop_profile`, to the folder of `profiler_config`."""
        if delay_iterations or max_iterations:
            raise ValueError(
                "delay_iterations and max_iterations are not available yet: profiles of some steps; leave them out"
            )
        self.llm_engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        self.llm_engine.stop_profile()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def _control(self, name: str, *args: Any) -> Any:
        return self.llm_engine._control(name, *args)

    @property
    def _weights_at_hand(self) -> bool:
        return self.llm_engine._weights_at_hand

    def reset_mm_cache(self) -> None:
        """There is none as long as prompts are text."""

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms so far, named like vLLM's with the prefix `quire:`."""
        return with_vectors(self.llm_engine.get_metrics())

    def shutdown(self) -> None:
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _sampling_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        given = self.get_default_sampling_params() if params is None else params
        return [
            one.replace_unchecked(output_kind=RequestOutputKind.FINAL_ONLY)
            for one in per_prompt(given, SamplingParams, count)
        ]

    def _add_prompts(
        self,
        prompts: Any,
        sampling_params: Any,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: Any,
    ) -> list[str]:
        many = as_prompts(prompts)
        keep, special = tokenization(tokenization_kwargs)
        params = truncating(self._sampling_params(sampling_params, len(many)), keep)
        parsed = self.llm_engine.input_processor.parse_many(many, special)
        return self._add_all(parsed, params, priority, lora_request)

    def _add_conversations(
        self,
        messages: Any,
        sampling_params: Any,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        content_format: str,
        lora_request: Any,
        *,
        chat_template: str | None,
        **options: Any,
    ) -> list[str]:
        from quire.entrypoints.chat_renderer import read_template

        conversations = [messages] if is_conversation(messages) else list(messages)
        params = truncating(
            self._sampling_params(sampling_params, len(conversations)), tokenization(tokenization_kwargs)[0]
        )
        prompts = self._chat_renderer.prompts(
            conversations,
            content_format=content_format,
            chat_template=None if chat_template is None else read_template(chat_template),
            **options,
        )
        return self._add_all(prompts, params, priority, lora_request)

    def _add_all(
        self,
        prompts: list[ParsedPrompt],
        params: Sequence[SamplingParams | PoolingParams],
        priority: Sequence[int] | None = None,
        lora_request: Any = None,
    ) -> list[str]:
        if lora_request is not None:
            prompts = self.llm_engine.input_processor.with_adapters(prompts, lora_request)
        priorities = list(priority) if priority is not None else [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(priorities)} priorities; give one for each")
        ids: list[str] = []
        try:
            for prompt, one, rank in zip(prompts, params, priorities, strict=True):
                ids.append(self._add(prompt, one, rank))
            if any(isinstance(one, SamplingParams) and one.structured_outputs is not None for one in params):
                self.llm_engine.compile_grammars(ids)  # so that one that cannot be enforced raises before any runs
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return ids

    def _add(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams, priority: int = 0) -> str:
        self._counter += 1
        return self.llm_engine.add_request(str(self._counter), prompt, params, priority=priority)

    def _enqueued_as(self, ids: list[str]) -> list[str]:
        self._enqueued += ids
        return ids

    def _new_id(self) -> str:
        self._counter += 1
        return str(self._counter)

    def _run(
        self,
        ids: list[str],
        use_tqdm: bool | Callable[..., Any],
        doing: str = "Generating",
        count: int | None = None,
        adding: Iterator[None] | None = None,
    ) -> list[Any]:
        """Until all have ended. `adding`: adds requests before a step, and their ids to `ids`, up to `count` in all."""
        count = len(ids) if count is None else count
        done: dict[str, Any] = {i: self._early.pop(i) for i in ids if i in self._early}
        wanted = set(ids)
        progress = Progress(count, doing, use_tqdm if callable(use_tqdm) else None) if use_tqdm else None
        try:
            if self.is_paused():
                raise RuntimeError("the engine is paused or asleep; let it go on (resume_generation, wake_up)")
            with interruption() as interrupted:
                while len(done) < count:
                    if len(wanted) < count and adding is not None:
                        next(adding, None)
                        wanted.update(ids[len(wanted) :])
                    for output in self.llm_engine.step():
                        if output.request_id not in wanted:
                            if output.request_id in self._enqueued:
                                self._early[output.request_id] = output
                            continue  # else the user added it to the engine
                        started = output.metrics is not None and output.metrics.first_token_time is not None
                        if output.error_kind in REFUSED and not started:
                            raise ValueError(f"prompt {ids.index(output.request_id)}: {output.error}")
                        done[output.request_id] = output
                        if progress is not None:
                            progress.update(output)
                    if interrupted():
                        raise KeyboardInterrupt
        except BaseException:
            self.llm_engine.abort_request(ids)  # the engine stays usable
            raise
        finally:
            if progress is not None:
                progress.close()
        return [done[i] for i in ids]
