"""Offline use: `LLM(...)`, `generate`, `chat`, `beam_search`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.config.logs import set_up_logging
from quire.engine.input_processor import ParsedPrompt, Prompt
from quire.engine.llm_engine import LLMEngine
from quire.engine.metrics import Metric
from quire.engine.outputs import RequestOutput
from quire.entrypoints.interruption import interruption
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams
    from quire.entrypoints.chat_renderer import ChatRenderer


class LLM:
    """A model and its engine in this process. Arguments are vLLM's engine arguments; without `model` the embedded
    SmolLM2 is used.

    llm = LLM()
    outputs = llm.generate("The sky is", SamplingParams(temperature=0, max_tokens=20))
    print(outputs[0].outputs[0].text)

    With `multiprocess=True` the engine runs in its own process, and a crash of it does not end this one. Such a program
    needs the usual `if __name__ == "__main__":` of Python's multiprocessing.
    """

    def __init__(self, model: str | None = None, *, multiprocess: bool = False, **engine_args: Any) -> None:
        set_up_logging(engine_args.get("log_level"), engine_args.get("log_config_file"))
        self.llm_engine = LLMEngine(EngineConfig.from_kwargs(model=model, **engine_args), multiprocess=multiprocess)
        self._counter = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a string, token ids, or a dict with either); outputs are in the order of the prompts.

        All prompts are checked before any runs: after an error the engine is unchanged.
        """
        many = _as_prompts(prompts)
        params = self._per_prompt(sampling_params, len(many))
        priorities = list(priority) if priority is not None else [0] * len(many)
        if len(priorities) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(priorities)} priorities; give one for each")
        ids = self._add_all(self.llm_engine.input_processor.parse_many(many), params, priorities)
        return self._run(ids, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        `chat_template` is Jinja text or a file, used instead of the model's own.
        """
        from quire.entrypoints.chat_renderer import read_template

        conversations = [messages] if _is_conversation(messages) else list(messages)
        params = self._per_prompt(sampling_params, len(conversations))
        prompts = self._chat_renderer.prompts(
            conversations,
            chat_template=None if chat_template is None else read_template(chat_template),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=chat_template_kwargs,
        )
        return self._run(self._add_all(prompts, params, [0] * len(prompts)), use_tqdm)

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

        if lora_request is not None:
            raise ValueError("lora_request: LoRA is not available yet; leave it out")
        if concurrency_limit is not None and concurrency_limit < 1:
            raise ValueError(f"concurrency_limit is {concurrency_limit}; it must be 1 or more, or None")
        engine = self.llm_engine
        model = engine.config.model
        check_engine(model.logprobs_mode)
        parsed = engine.input_processor.parse_many(_as_prompts(prompts))
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

        return ChatRenderer(self.get_tokenizer(), self.llm_engine.config.model.chat_template)

    def get_tokenizer(self) -> Tokenizer:
        if self.llm_engine.tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was created with skip_tokenizer_init")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of `generate` and `chat`: the model's own, from its generation_config.json."""
        return SamplingParams(**self.llm_engine.config.model.default_sampling)

    def reset_prefix_cache(self) -> bool:
        return self.llm_engine.reset_prefix_cache()

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms so far, named like vLLM's with the prefix `quire:`."""
        return self.llm_engine.get_metrics()

    def shutdown(self) -> None:
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _per_prompt(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{count} prompts but {len(params)} sampling_params; give one for all, or one for each")
        return list(params)

    def _add_all(self, prompts: list[ParsedPrompt], params: list[SamplingParams], priorities: list[int]) -> list[str]:
        ids: list[str] = []
        try:
            for prompt, one, priority in zip(prompts, params, priorities, strict=True):
                self._counter += 1
                one = one.replace_unchecked(output_kind=RequestOutputKind.FINAL_ONLY)
                self.llm_engine.add_request(str(self._counter), prompt, one, priority=priority)
                ids.append(str(self._counter))
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return ids

    def _new_id(self) -> str:
        self._counter += 1
        return str(self._counter)

    def _run(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        wanted = set(ids)
        progress = Progress(len(ids)) if use_tqdm else None
        try:
            with interruption() as interrupted:
                while len(done) < len(ids):
                    for output in self.llm_engine.step():
                        if output.request_id not in wanted:
                            continue  # the user added it to the engine
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


class Progress:
    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, desc="Generating", unit="prompt", dynamic_ncols=True)
        self.tokens = 0

    def update(self, output: RequestOutput) -> None:
        self.tokens += sum(len(c.token_ids) for c in output.outputs)
        rate = self.tokens / max(1e-9, self.bar.format_dict["elapsed"])
        self.bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts; a string, a dict or a list of token ids is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _is_conversation(messages: Any) -> bool:
    """Whether this is one conversation; several are a list of lists."""
    return not messages or not isinstance(messages, (list, tuple)) or not isinstance(messages[0], (list, tuple))
