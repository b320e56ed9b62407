"""Prompts as dicts, under vLLM's names."""

from typing import Any, NotRequired, TypedDict

from quire.engine.input_processor import Prompt


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    prompt_embeds: Any  # a tensor or an array [tokens, hidden]
    cache_salt: NotRequired[str]


PromptType = Prompt
