"""`LLM`'s methods for models that pool."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.compat.unavailable import tokenization
from quire.compat.vllm_interface import NO_TOKENIZER
from quire.config.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY
from quire.engine.input_processor import ParsedPrompt, Prompt
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.llm_inputs import as_prompts, per_prompt
from quire.entrypoints.pooling.inputs import PoolingInputs, Truncation, joined, split_long
from quire.entrypoints.pooling.scoring import (
    TASKS,
    Pairs,
    ScoreOptions,
    by_template,
    score_prompts,
    score_type,
    scored,
)
from quire.messages.pooling_params import PoolingParams
from quire.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.entrypoints.chat_renderer import ChatRenderer

Tqdm = bool | Callable[..., Any]
Params = PoolingParams | Sequence[PoolingParams] | None


def _is_text(prompt: Any) -> bool:
    if isinstance(prompt, dict) and prompt.keys() <= {"prompt", "cache_salt"}:
        prompt = prompt.get("prompt")
    return isinstance(prompt, str)


class PoolingMethods:
    llm_engine: LLMEngine

    @property
    def _chat_renderer(self) -> "ChatRenderer":
        raise NotImplementedError

    def _add(self, prompt: ParsedPrompt, params: PoolingParams) -> str:
        raise NotImplementedError

    def _run(self, ids: list[str], use_tqdm: Tqdm, doing: str, count: int | None, adding: Iterator[None]) -> list[Any]:
        raise NotImplementedError

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: Params = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, by its task: `outputs.data`, float32; a row for each token if the task
        is one of tokens.

        `truncate_prompt_tokens` and `pooling_task` are for requests whose parameters do not have them. `prompt_name`:
        of the model's prompts (sentence-transformers), which is put before texts.
        """
        many = as_prompts(prompts)
        keep, special = tokenization(tokenization_kwargs)
        keep = keep if truncate_prompt_tokens is None else truncate_prompt_tokens
        default = PoolingParams(task=pooling_task, truncate_prompt_tokens=keep)
        given = per_prompt(default if pooling_params is None else pooling_params, PoolingParams, len(many))
        other = next((one.task for one in given if one.task not in (None, pooling_task)), None)
        if other is not None and pooling_task is not None:
            raise ValueError(f"pooling_params have task {other!r}, but {pooling_task!r} is asked for; leave one out")
        params = [
            one.replace_unchecked(
                task=one.task or default.task,
                truncate_prompt_tokens=one.truncate_prompt_tokens or default.truncate_prompt_tokens,
            )
            for one in given
        ]
        parsed = self._with_adapters(self._parsed(many, params, special, prompt_name), lora_request)
        return self._pool(parsed, params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: Params = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt: `outputs.embedding`, a list of numbers."""
        found = self.encode(
            prompts,
            pooling_params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=EMBED,
            tokenization_kwargs=tokenization_kwargs,
            prompt_name=prompt_name,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class: `outputs.probs`."""
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=CLASSIFY,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.from_base(output) for output in found]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A reward for each token or step, or one for the prompt, as the model gives them: `outputs.data`."""
        setup = self.llm_engine.config.pooling.setup
        task = setup.task if setup is not None and setup.task in (CLASSIFY, TOKEN_CLASSIFY) else TOKEN_CLASSIFY
        given = [pooling_params] if isinstance(pooling_params, PoolingParams) else pooling_params or ()
        named = any(isinstance(one, PoolingParams) and one.task is not None for one in given)
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task=None if named else task,
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each pair of texts fits, `outputs.score`: one of `data_1` for all of `data_2`, or one for each."""
        from quire.entrypoints.chat_renderer import read_template

        setup = self.llm_engine.config.pooling.setup
        task = TASKS[score_type(setup)]
        params = pooling_params or PoolingParams()
        if params.task not in (None, task):
            raise ValueError(f"task is {params.task!r}; this model scores by {task!r}")
        keeps = (truncate_prompt_tokens, tokenization(tokenization_kwargs)[0], params.truncate_prompt_tokens)
        keep = next((one for one in keeps if one is not None), None)
        cut = Truncation(keep)
        cut.check(self._pooling_inputs.longest)
        pairs = Pairs.of(data_1, data_2, ("data_1", "data_2"))
        given = chat_template if chat_template is not None else self.llm_engine.config.model.chat_template
        options = ScoreOptions(cut, template=None if given is None else read_template(given))
        renderer = self._chat_renderer if by_template(setup, options) else None
        prompts = self._with_adapters(score_prompts(self._pooling_inputs, pairs, options, renderer), lora_request)
        params = params.replace_unchecked(task=task, truncate_prompt_tokens=None)
        outputs = self._pool(prompts, [params] * len(prompts), use_tqdm)
        failed = next((output for output in outputs if output.finish_reason != "stop"), None)
        if failed is not None:
            raise RuntimeError(f"a text could not be scored: {failed.error or failed.finish_reason}")
        return scored(setup, outputs, len(pairs.queries))

    def _with_adapters(self, prompts: list[ParsedPrompt], lora_request: Any) -> list[ParsedPrompt]:
        if lora_request is None:
            return prompts
        return self.llm_engine.input_processor.with_adapters(prompts, lora_request)

    @cached_property
    def _pooling_inputs(self) -> PoolingInputs:
        engine = self.llm_engine

        def tokenizer() -> Tokenizer:
            if engine.tokenizer is None:
                raise ValueError(NO_TOKENIZER)
            return engine.tokenizer

        return PoolingInputs(engine.config, tokenizer, engine.max_model_len)

    def _parsed(
        self, prompts: list[Any], params: Sequence[PoolingParams], special: bool, prompt_name: str | None
    ) -> list[ParsedPrompt]:
        """Cut as their parameters say; texts keep the tokens around them."""
        inputs = self._pooling_inputs
        prefix = inputs.named_prompt(prompt_name)
        places: defaultdict[tuple[int | None, bool], list[int]] = defaultdict(list)  # by truncation; of texts or others
        for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            places[one.truncate_prompt_tokens, _is_text(prompt)].append(place)
        parsed: dict[int, ParsedPrompt] = {}
        for (keep, of_texts), some in places.items():
            cut = Truncation(keep)
            cut.check(inputs.longest)
            given = [prompts[place] for place in some]
            found = self._of_texts(given, special, cut, prefix) if of_texts else self._of_others(given, special, cut)
            parsed.update(zip(some, found, strict=True))
        return [parsed[place] for place in range(len(prompts))]

    def _of_texts(self, given: list[Any], special: bool, cut: Truncation, prefix: str) -> list[ParsedPrompt]:
        texts = [one if isinstance(one, str) else one["prompt"] for one in given]
        found = self._pooling_inputs.texts(texts, special, cut, prefix)
        for prompt, one in zip(found, given, strict=True):
            prompt.cache_salt = None if isinstance(one, str) else one.get("cache_salt")
        return found

    def _of_others(self, given: list[Any], special: bool, cut: Truncation) -> list[ParsedPrompt]:
        found, most = self.llm_engine.input_processor.parse_many(given, special), cut.most(self._pooling_inputs.longest)
        for prompt in found if most is not None else ():
            prompt.token_ids = prompt.token_ids[:most]
        return found

    def _pool(
        self, prompts: list[ParsedPrompt], params: Sequence[PoolingParams], use_tqdm: Tqdm
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        setup = self.llm_engine.config.pooling.setup
        task = params[0].task if params else None
        parts, counts = split_long(prompts, setup, task, self.llm_engine.max_model_len)
        if counts is not None:
            params = [one for one, count in zip(params, counts, strict=True) for _ in range(count)]
        self._check(parts, params)
        outputs = self._run_while_adding(parts, params, use_tqdm)
        return outputs if counts is None else joined(outputs, counts)

    def _check(self, prompts: list[ParsedPrompt], params: Sequence[PoolingParams]) -> None:
        """Before any is computed, what can be told of all at once: if all lengths are allowed these two are."""
        if not prompts:
            return
        lengths = [len(prompt.token_ids) for prompt in prompts]
        for one in {id(one): one for one in params}.values():
            for length in (min(lengths), max(lengths)):
                self.llm_engine.input_processor.check_pooling(prompts[lengths.index(length)], one)

    def _run_while_adding(
        self, prompts: list[ParsedPrompt], params: Sequence[PoolingParams], use_tqdm: Tqdm
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        ids: list[str] = []
        return self._run(ids, use_tqdm, "Pooling", len(prompts), self._adding(prompts, params, ids))

    def _adding(self, prompts: list[ParsedPrompt], params: Sequence[PoolingParams], ids: list[str]) -> Iterator[None]:
        """Adds them in parts of two full steps: while the device computes one, the next is ready, and the host adds
        others. What a step holds is not known here if the engine is in a process of its own, which adds by itself."""
        limits = self.llm_engine.config.scheduler
        most_rows, most_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        num_rows = num_tokens = 0
        for prompt, one in zip(prompts, params, strict=True):
            ids.append(self._add(prompt, one))
            num_rows, num_tokens = num_rows + 1, num_tokens + len(prompt.token_ids)
            if most_rows and most_tokens and (num_rows >= 2 * most_rows or num_tokens >= 2 * most_tokens):
                num_rows = num_tokens = 0
                yield
