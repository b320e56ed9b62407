"""The APIs that `quire bench serve` measures, by vLLM's names of backends: where requests go and what they hold."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.bench.datasets import Item

# The flags of sampling parameters; those not given are left to the server.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


class Api(Protocol):
    @property
    def path(self) -> str: ...

    @property
    def streams(self) -> bool:
        """Whether responses are events with tokens, or whole."""
        ...

    @property
    def takes_texts(self) -> bool:
        """Whether prompts are texts, which the server renders or tokenizes, never token ids."""
        ...

    def common(self, args: argparse.Namespace) -> dict[str, Any]:
        """What all requests hold, but for the model."""
        ...

    def own(self, batch: Sequence[Item]) -> dict[str, Any]:
        """What a request holds of its prompts; one that generates has one."""
        ...


def _generation(args: argparse.Namespace) -> dict[str, Any]:
    common: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    common |= {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    return common | ({"ignore_eos": True} if args.ignore_eos else {})


@dataclass(frozen=True)
class Completions:
    path: str = "/v1/completions"
    streams: bool = True
    takes_texts: bool = False

    def common(self, args: argparse.Namespace) -> dict[str, Any]:
        return _generation(args) | ({} if args.logprobs is None else {"logprobs": args.logprobs})

    def own(self, batch: Sequence[Item]) -> dict[str, Any]:
        (item,) = batch
        return {"max_tokens": item.output_len, "prompt": item.prompt}


@dataclass(frozen=True)
class Chat:
    path: str = "/v1/chat/completions"
    streams: bool = True
    takes_texts: bool = True

    def common(self, args: argparse.Namespace) -> dict[str, Any]:
        common = _generation(args)
        if args.logprobs is not None:
            common |= {"logprobs": True, "top_logprobs": args.logprobs}
        if args.chat_template_kwargs:
            common["chat_template_kwargs"] = args.chat_template_kwargs
        return common

    def own(self, batch: Sequence[Item]) -> dict[str, Any]:
        (item,) = batch
        return {"max_completion_tokens": item.output_len, "messages": [{"role": "user", "content": item.prompt}]}


@dataclass(frozen=True)
class Pooling:
    """Embeddings, or whatever else the model pools. As in vLLM a text that is too long is truncated."""

    path: str
    streams: bool = False
    takes_texts: bool = False

    def common(self, args: argparse.Namespace) -> dict[str, Any]:
        return {"truncate_prompt_tokens": -1}

    def own(self, batch: Sequence[Item]) -> dict[str, Any]:
        return {"input": batch[0].prompt if len(batch) == 1 else [item.prompt for item in batch]}


BACKENDS: dict[str, Api] = {
    "vllm": Completions(),
    "openai": Completions(),
    "openai-chat": Chat(),
    "openai-embeddings": Pooling("/v1/embeddings"),
    "vllm-pooling": Pooling("/pooling"),
}


def backend_of(endpoint: str) -> str:
    """The backend whose requests a path takes, if its name says so."""
    ends = {"openai-chat": "chat/completions", "openai-embeddings": "embeddings", "vllm-pooling": "pooling"}
    return next((name for name, end in ends.items() if endpoint.rstrip("/").endswith(end)), "openai")
