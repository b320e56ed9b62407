"""Turns prompts in any accepted form into validated, tokenized requests."""

import dataclasses
import functools
import random
import struct
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec
import numpy as np

from quire.config import EngineConfig
from quire.config.shown import shown
from quire.features.inputs import PLACEHOLDER, FeatureChecker, content_keys, read_embeds
from quire.messages.checks import MAX_INT, check_int, check_text
from quire.messages.features import EMBEDS, Feature, FeatureSupport
from quire.messages.lora import LoRARequest
from quire.messages.pooling_params import TOKEN_TYPE_SHIFT, PoolingParams
from quire.messages.protocol import CLIENT_SHIFT
from quire.messages.requests import NO_SAMPLING, ContentKey, EngineCoreRequest
from quire.messages.sampling_params import ALL_LOGPROBS, SamplingParams, bad_word_tokens
from quire.pooling.inputs import complete_pooling, embedding_size
from quire.sample.user_processors import processor_classes, validators
from quire.tokenizer.tokenizer import Tokenizer


class PromptDict(TypedDict, total=False):
    prompt: str
    prompt_token_ids: list[int]
    cache_salt: str
    output_token_ids: list[int]  # generated elsewhere: the request goes on after them
    features: list[Feature]  # what some of the tokens stand for
    prompt_embeds: Any  # a tensor or an array [tokens, hidden]: the prompt itself


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
    features: Sequence[Any] = ()  # to be checked
    lora: LoRARequest | None = None
    token_types: list[int] | None = None  # by token the text of a pair it belongs to, for models with such segments


class InputProcessor:
    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        tokenizer: Tokenizer | None,
        client: int = 0,
        features: FeatureSupport | None = None,
    ) -> None:
        """`client` is this front end's number, which keeps its indices, core ids and seeds distinct. `features`: what
        the engine's prompts may hold beside token ids."""
        model = config.model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.allows_adapters = config.lora.enable_lora
        self.allows_priorities = config.scheduler.scheduling_policy == "priority"
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        # A limit that covers the vocabulary is none.
        self.max_logprobs = ALL_LOGPROBS if model.max_logprobs >= model.vocab_size else model.max_logprobs
        self.pooling = config.pooling.setup
        self.embedding_size = embedding_size(model.hf_config, self.pooling)
        classes = processor_classes(model.logits_processors)
        self._allows_extra_args = bool(classes)
        self._validators = validators(classes)
        embeds, positions = model.enable_prompt_embeds, model.derived_max_model_len
        self._features = FeatureChecker(features, embeds, max_model_len, positions)
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
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> tuple[ParsedPrompt, EngineCoreRequest]:
        """The prompt's text and tokens, and one request for all `n` completions, or for the pooled prompt."""
        check_text("request_id", request_id, MAX_REQUEST_ID)
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        if priority and not self.allows_priorities:
            raise ValueError("a priority needs scheduling_policy 'priority' (--scheduling-policy priority)")
        parsed = prompt if isinstance(prompt, ParsedPrompt) else self.parse(prompt)
        if parsed.cache_salt is not None:
            check_text("cache_salt", parsed.cache_salt, MAX_CACHE_SALT)
        if params.truncate_prompt_tokens is not None:
            # A copy: the caller may reuse its prompt with other parameters.
            kept = self._truncate(parsed.token_ids, params)
            parsed = dataclasses.replace(parsed, token_ids=kept)
        seed, resumed = 0, None
        if isinstance(params, PoolingParams):
            params = self.check_pooling(parsed, params)
        else:
            self._check(parsed.token_ids, params)
            resumed = self._resumed(parsed, params) if parsed.output_token_ids else None
            if params.structured_outputs is not None and self._structured:
                replaced = msgspec.structs.replace(params.structured_outputs, checked=True, **self._structured)
                params = params.replace_unchecked(structured_outputs=replaced)
            if params.bad_words:
                params = params.replace_unchecked(bad_words_token_ids=self._bad_words(params.bad_words))
            seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        ids = self._array("the prompt", parsed.token_ids)
        if parsed.token_types is not None:
            ids |= np.asarray(parsed.token_types, np.int32) << TOKEN_TYPE_SHIFT
        features = self._check_features(parsed, params) if parsed.features else ()
        request = EngineCoreRequest(
            request_id=self._prefix + request_id,
            index=self._count + 1,
            prompt_token_ids=ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            seed=seed,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=parsed.cache_salt,
            lora=parsed.lora,
            output_token_ids=resumed,
            content_keys=(*parsed.content_keys, *content_keys(features)) if features else parsed.content_keys,
            features=features,
        )
        self._count += request.sampling.n
        return parsed, request

    def parse(self, prompt: Prompt) -> ParsedPrompt:
        return self.parse_many([prompt])[0]

    def parse_many(self, prompts: Sequence[Prompt], add_special_tokens: bool = True) -> list[ParsedPrompt]:
        """Tokenizes all texts in one batch, for which the tokenizer uses all cores."""
        parsed = [_parse(prompt) for prompt in prompts]
        texts = [p for p in parsed if p.text is not None and not p.token_ids]
        if texts:
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer: pass prompt_token_ids, or drop skip_tokenizer_init")
            encoded = self.tokenizer.encode_batch([p.text or "" for p in texts], add_special_tokens)
            for p, ids in zip(texts, encoded, strict=True):
                p.token_ids = ids
        return parsed

    def with_adapters(self, prompts: Sequence[Prompt | ParsedPrompt], lora_request: Any) -> list[ParsedPrompt]:
        """The prompts with one adapter for all, or one (or None) for each."""
        loras = list(lora_request) if isinstance(lora_request, list | tuple) else [lora_request] * len(prompts)
        if len(loras) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(loras)} lora_requests; give one for all, or one for each"
            )
        for lora in loras:
            if lora is not None and not isinstance(lora, LoRARequest):
                raise ValueError(f"lora_request is {shown(lora)}; it must be a LoRARequest, or None")
            if lora is not None and not self.allows_adapters:
                raise ValueError("lora_request: the engine was started without room for adapters (enable_lora)")
        parsed = [one if isinstance(one, ParsedPrompt) else self.parse(one) for one in prompts]
        return [dataclasses.replace(one, lora=lora) for one, lora in zip(parsed, loras, strict=True)]

    def _check(self, token_ids: list[int], params: SamplingParams) -> None:
        if self.pooling is not None:
            can = ", ".join(self.pooling.tasks)
            raise ValueError(f"this model pools and does not generate; it can: {can} (--runner generate, if it can)")
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
        self._check_length(token_ids, params)
        named = {
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids,
            "logprob_token_ids": params.logprob_token_ids,
            "logit_bias": params.logit_bias,
        }
        if (tags := params.reasoning) is not None:
            named["reasoning"] = [*tags.start, *tags.end, *(tags.budget_end or ())]
        for name, ids in named.items():
            if ids:
                self._array(name, list(ids))
        params.check_logprobs(ALL_LOGPROBS if self.max_logprobs >= self.vocab_size else self.max_logprobs)
        if params.prompt_logprob_token_ids is not None:
            self._check_candidates(params.prompt_logprob_token_ids, len(token_ids), params.prompt_logprob_start or 0)

    def _check_candidates(self, rows: list[list[int]], num_tokens: int, start: int) -> None:
        """Tokens of a prompt to score: a row for each position from `start` on that predicts a prompt token."""
        name = "prompt_logprob_token_ids"
        if len(rows) != num_tokens - 1 - start or not rows:
            raise ValueError(
                f"{name} has {len(rows)} rows; a prompt of {num_tokens} tokens has {max(0, num_tokens - 1 - start)} "
                f"from prompt_logprob_start {start} on, the last token left out"
            )
        longest = max(map(len, rows))
        if self.max_logprobs != ALL_LOGPROBS and longest > self.max_logprobs:
            raise ValueError(f"{name} has a row of {longest} ids; at most {self.max_logprobs} (--max-logprobs)")
        if longest == 0:
            raise ValueError(f"{name} has no token ids; at least one row must have one")
        self._array(name, [max(0, token) for row in rows for token in row])

    def check_pooling(self, prompt: ParsedPrompt, params: PoolingParams) -> PoolingParams:
        """The parameters, with defaults filled in."""
        if prompt.output_token_ids:
            raise ValueError("output_token_ids are for requests that generate; a prompt to pool has none")
        self._check_length(prompt.token_ids, params)
        return complete_pooling(params, self.pooling, self.embedding_size)

    def _longest(self, params: SamplingParams | PoolingParams) -> int:
        """The longest prompt."""
        return self.max_model_len if isinstance(params, PoolingParams) else self.max_model_len - 1

    def _check_length(self, token_ids: list[int], params: SamplingParams | PoolingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; it must have at least one token")
        longest = self._longest(params)
        if len(token_ids) > longest:
            why = ", so that one can be generated" if longest < self.max_model_len else ""
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self.max_model_len} it may have at most "
                f"{longest}{why}"
            )

    def _check_features(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> tuple[Feature, ...]:
        if params.truncate_prompt_tokens is not None:
            raise ValueError("truncate_prompt_tokens would move the features of a prompt; leave one of them out")
        sampling = params if isinstance(params, SamplingParams) else NO_SAMPLING
        features = self._features.check(prompt.features, len(prompt.token_ids), sampling.max_tokens)
        if sampling.prompt_logprobs is not None and any(feature.kind == EMBEDS for feature in features):
            raise ValueError("prompt_logprobs are not compatible with embeddings, which have no token ids")
        return features

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
        # Several times faster than numpy's conversion of a list, and twice as fast as through an array.
        try:
            ids = np.frombuffer(struct.pack(f"{len(token_ids)}q", *token_ids), np.int64)
        except (struct.error, OverflowError, TypeError):
            wrong = next(i for i in token_ids if not isinstance(i, int) or not 0 <= i < self.vocab_size)
            raise ValueError(
                f"{name} has token id {shown(wrong)}, out of vocabulary: the model has {self.vocab_size} ids, from 0"
            ) from None
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            raise ValueError(
                f"{name} has token id {wrong}, out of vocabulary: the model has {self.vocab_size} ids, from 0"
            )
        return ids.astype(np.int32)

    def _truncate(self, token_ids: list[int], params: SamplingParams | PoolingParams) -> list[int]:
        """Keeps the end of a prompt that is to be continued, and the beginning of one to pool."""
        keep, longest = params.truncate_prompt_tokens or 0, self._longest(params)
        if keep > longest:
            raise ValueError(
                f"truncate_prompt_tokens is {keep}; with max_model_len {self.max_model_len} at most {longest}"
            )
        keep = longest if keep == -1 else keep
        return token_ids[:keep] if isinstance(params, PoolingParams) else token_ids[-keep:]

    def _bad_words(self, words: list[str]) -> list[list[int]]:
        if self.tokenizer is None:
            raise ValueError("bad_words needs a tokenizer: drop skip_tokenizer_init")
        return bad_word_tokens(words, functools.partial(self.tokenizer.encode, add_special_tokens=False))


def _parse(prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, [])
    if isinstance(prompt, dict):
        unknown = {key for key in prompt.keys() - _KEYS if prompt[key] is not None}
        if unknown or not prompt.keys() & {"prompt", "prompt_token_ids", "prompt_embeds"}:
            wrong = f"has unknown keys {sorted(unknown)}" if unknown else "lacks prompt and prompt_token_ids"
            raise ValueError(f"the prompt {wrong}; allowed: {', '.join(sorted(_KEYS))}")
        features = prompt.get("features") or ()
        if not isinstance(features, list | tuple):
            raise ValueError(f"features is {shown(features)}; it must be a list of Feature")
        if "prompt_embeds" in prompt:
            if prompt.keys() & {"prompt", "prompt_token_ids", "features"}:
                raise ValueError("prompt_embeds is a whole prompt; leave prompt, prompt_token_ids and features out")
            embeds = read_embeds(prompt["prompt_embeds"])
            features = [Feature(EMBEDS, 0, len(embeds), embeds)]
            prompt = prompt | {"prompt_token_ids": [PLACEHOLDER] * len(embeds)}
        ids = _parse(prompt["prompt_token_ids"]).token_ids if "prompt_token_ids" in prompt else []
        outputs = _parse(prompt["output_token_ids"]).token_ids if prompt.get("output_token_ids") else []
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        for key, value in (("prompt", text), ("cache_salt", salt)):
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{key} is {shown(value)}; it must be a string")
        if features and not ids:
            raise ValueError("features are at tokens of prompt_token_ids, which the prompt lacks")
        return ParsedPrompt(text, ids, salt, outputs, features=features)
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
        with suppress(msgspec.ValidationError):
            return msgspec.convert(prompt, list[int])  # a copy
        try:
            return array("q", prompt).tolist()  # also of numpy's integers
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
