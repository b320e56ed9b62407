"""Turns prompts in any accepted form into validated, tokenized requests."""

import dataclasses
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.config.shown import shown
from quire.messages.checks import MAX_INT, check_int, check_text
from quire.messages.protocol import CLIENT_SHIFT
from quire.messages.requests import ContentKey, EngineCoreRequest
from quire.messages.sampling_params import ALL_LOGPROBS, SamplingParams
from quire.sample.user_processors import processor_classes, validators
from quire.tokenizer.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str
    output_token_ids: list[int]  # generated elsewhere: the request goes on after them


MAX_PRIORITY = 2**31
MAX_REQUEST_ID = 1024  # characters
MAX_CACHE_SALT = 1024  # characters

Prompt = str | Sequence[int] | PromptDict
_KEYS = set(PromptDict.__annotations__)


@dataclass(slots=True)
class ParsedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None
    output_token_ids: list[int] = field(default_factory=list)
    content_keys: tuple[ContentKey, ...] = ()


class InputProcessor:
    def __init__(self, config: EngineConfig, max_model_len: int, tokenizer: Tokenizer | None, client: int = 0) -> None:
        """`client` is this front end's number, which keeps its indices, core ids and seeds distinct."""
        model = config.model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.allows_priorities = config.scheduler.scheduling_policy == "priority"
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_logprobs = model.max_logprobs
        classes = processor_classes(model.logits_processors)
        self._allows_extra_args = bool(classes)
        self._validators = validators(classes)
        structured = config.structured_outputs
        switches = {
            "disable_any_whitespace": structured.structured_outputs_disable_any_whitespace,
            "disable_additional_properties": structured.structured_outputs_disable_additional_properties,
        }
        self._structured = {name: value for name, value in switches.items() if value}
        self._seeds = random.Random(f"{model.seed} {client}" if client else model.seed)
        self._count = client << CLIENT_SHIFT
        self._prefix = f"{client}\0" if client else ""

    def process(
        self,
        request_id: str,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> tuple[ParsedPrompt, EngineCoreRequest]:
        """The prompt's text and tokens, and one request for all `n` completions."""
        check_text("request_id", request_id, MAX_REQUEST_ID)
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if priority and not self.allows_priorities:
            raise ValueError("a priority needs scheduling_policy 'priority' (--scheduling-policy priority)")
        parsed = prompt if isinstance(prompt, ParsedPrompt) else self.parse(prompt)
        if parsed.cache_salt is not None:
            check_text("cache_salt", parsed.cache_salt, MAX_CACHE_SALT)
        if params.truncate_prompt_tokens is not None:
            # A copy: the caller may reuse its prompt with other parameters.
            kept = self._truncate(parsed.token_ids, params.truncate_prompt_tokens)
            parsed = dataclasses.replace(parsed, token_ids=kept)
        self._check(parsed.token_ids, params)
        resumed = self._resumed(parsed, params) if parsed.output_token_ids else None
        ids = self._array("the prompt", parsed.token_ids)
        if params.structured_outputs is not None and self._structured:
            replaced = msgspec.structs.replace(params.structured_outputs, checked=True, **self._structured)
            params = params.replace_unchecked(structured_outputs=replaced)
        if params.bad_words:
            params = params.replace_unchecked(bad_words_token_ids=self._bad_words(params.bad_words))
        request = EngineCoreRequest(
            request_id=self._prefix + request_id,
            index=self._count + 1,
            prompt_token_ids=ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            seed=params.seed if params.seed is not None else self._seeds.getrandbits(63),
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=parsed.cache_salt,
            output_token_ids=resumed,
            content_keys=parsed.content_keys,
        )
        self._count += params.n
        return parsed, request

    def parse(self, prompt: Prompt) -> ParsedPrompt:
        return self.parse_many([prompt])[0]

    def parse_many(self, prompts: Sequence[Prompt]) -> list[ParsedPrompt]:
        """Tokenizes all texts in one batch, for which the tokenizer uses all cores."""
        parsed = [_parse(prompt) for prompt in prompts]
        texts = [p for p in parsed if p.text is not None and not p.token_ids]
        if texts:
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer: pass prompt_token_ids, or drop skip_tokenizer_init")
            encoded = self.tokenizer.encode_batch([p.text or "" for p in texts])
            for p, ids in zip(texts, encoded, strict=True):
                p.token_ids = ids
        return parsed

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings are matched in the text, which needs a tokenizer: drop skip_tokenizer_init")
        if params.structured_outputs is not None and (self.tokenizer is None or not self.eos_token_ids):
            missing = "a tokenizer: drop skip_tokenizer_init" if self.tokenizer is None else "an end-of-sequence token"
            raise ValueError(f"{params.structured_outputs.field}: this needs a model with {missing}")
        if params.min_tokens and params.allowed_token_ids:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
            if ends.issuperset(params.allowed_token_ids):
                raise ValueError("allowed_token_ids are all tokens that end the request, which min_tokens forbids")
        if params.thinking_token_budget is not None and params.reasoning is None:
            raise ValueError(
                "thinking_token_budget needs the tokens that begin and end reasoning: start the server with "
                "--reasoning-parser, or give SamplingParams(reasoning=ReasoningTokens(start=..., end=...))"
            )
        if params.extra_args and not self._allows_extra_args:
            raise ValueError("extra_args are for logits processors; the engine has none (--logits-processors)")
        for validate in self._validators:
            validate(params)
        if not token_ids:
            raise ValueError("the prompt is empty; it must have at least one token")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self.max_model_len} it may have at most "
                f"{self.max_model_len - 1}, so that one can be generated"
            )
        named = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "logit_bias": params.logit_bias,
        }
        for name, ids in named.items():
            if ids:
                self._array(name, list(ids))
        for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            everything = self.max_logprobs == ALL_LOGPROBS
            if count is not None and not everything and (count == ALL_LOGPROBS or count > self.max_logprobs):
                requested = "all logprobs are requested" if count == ALL_LOGPROBS else f"{name} is {count}"
                raise ValueError(f"{requested}; at most {self.max_logprobs} are allowed (--max-logprobs; -1: no limit)")

    def _resumed(self, prompt: ParsedPrompt, params: SamplingParams) -> np.ndarray:
        """The ids after which a request goes on, which must leave it a token to generate."""
        count, length = len(prompt.output_token_ids), len(prompt.token_ids)
        if params.n > 1:
            raise ValueError(f"output_token_ids are of one completion, and n is {params.n}; it must be 1")
        limit = self.max_model_len - length
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if count >= limit:
            raise ValueError(
                f"output_token_ids has {count} tokens; with max_tokens {params.max_tokens}, {length} prompt tokens "
                f"and max_model_len {self.max_model_len} at most {limit - 1}, so that one can be generated"
            )
        return self._array("output_token_ids", prompt.output_token_ids)

    def _array(self, name: str, token_ids: list[int]) -> np.ndarray:
        # Several times faster through an array than numpy's conversion of a list.
        try:
            ids = np.frombuffer(array("q", token_ids), np.int64)
        except (OverflowError, TypeError):
            wrong = next(i for i in token_ids if not isinstance(i, int) or not 0 <= i < self.vocab_size)
            raise ValueError(
                f"{name} has token id {shown(wrong)}; the model's ids are 0 to {self.vocab_size - 1}"
            ) from None
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"{name} has token id {wrong}; the model's ids are 0 to {self.vocab_size - 1}")
        return ids.astype(np.int32)

    def _truncate(self, token_ids: list[int], keep: int) -> list[int]:
        """Keeps the end of the prompt."""
        longest = self.max_model_len - 1
        if keep > longest:
            raise ValueError(
                f"truncate_prompt_tokens is {keep}; with max_model_len {self.max_model_len} at most {longest}"
            )
        return token_ids[-(longest if keep == -1 else keep) :]

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        """Token sequences of each word, at the start of a text and after a space."""
        if self.tokenizer is None:
            raise ValueError("bad_words needs a tokenizer: drop skip_tokenizer_init")
        sequences = []
        for word in words:
            plain, spaced = word.lstrip(), " " + word.lstrip()
            for text in (plain, spaced) if plain else (word,):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences


def _parse(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, [])
    if isinstance(prompt, dict):
        unknown = prompt.keys() - _KEYS
        if unknown or not prompt.keys() & {"prompt", "prompt_token_ids"}:
            wrong = f"has unknown keys {sorted(unknown)}" if unknown else "lacks prompt and prompt_token_ids"
            raise ValueError(f"the prompt {wrong}; allowed: {', '.join(sorted(_KEYS))}")
        ids = _parse(prompt["prompt_token_ids"]).token_ids if "prompt_token_ids" in prompt else []
        outputs = _parse(prompt["output_token_ids"]).token_ids if prompt.get("output_token_ids") else []
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        for key, value in (("prompt", text), ("cache_salt", salt)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{key} is {shown(value)}; it must be a string")
        return ParsedPrompt(text, ids, salt, outputs)
    token_ids = _token_ids(prompt)
    if token_ids is not None:
        return ParsedPrompt(None, token_ids)
    raise ValueError(
        "a prompt is a string, a list of token ids, or a dict with prompt or prompt_token_ids; "
        f"got {type(prompt).__name__}"
    )


def _token_ids(prompt: Any) -> list[int] | None:
    """A list of ints from any sequence of them; None for anything else."""
    if isinstance(prompt, list) and not any(isinstance(token, bool) for token in prompt[:1]):
        try:
            return array("q", prompt).tolist()
        except OverflowError:
            wrong = next(i for i in prompt if isinstance(i, int) and abs(i) > MAX_INT)
            raise ValueError(f"the prompt has token id {shown(wrong)}; ids are whole numbers below 2^31") from None
        except TypeError:
            pass
    try:
        found = np.asarray(prompt)
    except ValueError:  # ragged
        return None
    return found.tolist() if found.ndim == 1 and (found.dtype.kind in "iu" or not len(found)) else None
