"""Texts and tokens for datasets: counted and rendered by a tokenizer here, or by the measured server."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.bench.serve_client import Target, fetch

if TYPE_CHECKING:
    from quire.tokenizer.tokenizer import Tokenizer


class Texts(Protocol):
    vocab_size: int | None  # None: unknown

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, text: str) -> list[int]:
        """The tokens of a chat with this one message, by the chat template."""
        ...

    def decode(self, tokens: list[int]) -> str: ...


class LocalTexts:
    def __init__(self, tokenizer: "Tokenizer", template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self.vocab_size: int | None = tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_chat(self, text: str) -> list[int]:
        from quire.entrypoints.chat_renderer import ChatRenderer

        renderer = ChatRenderer(self.tokenizer)
        if renderer.template is None:
            raise ValueError("the tokenizer has no chat template; send prompts as they are (--skip-chat-template)")
        message = {"role": "user", "content": text}
        return renderer.prompts([[message]], template_kwargs=self.template_kwargs)[0].token_ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


class ServerTexts:
    def __init__(self, target: Target, model: str, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.target = target
        self.model = model
        self.template_kwargs = template_kwargs
        self.vocab_size: int | None = None

    def encode(self, text: str) -> list[int]:
        return self._post("/tokenize", {"prompt": text})["tokens"]

    def encode_chat(self, text: str) -> list[int]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        return self._post("/tokenize", body)["tokens"]

    def decode(self, tokens: list[int]) -> str:
        return self._post("/detokenize", {"tokens": tokens})["prompt"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, response = asyncio.run(fetch(self.target, "POST", path, {"model": self.model, **body}))
        if status != 200:
            raise ValueError(
                f"{path} returns status {status}, but this dataset needs a tokenizer; name one (--tokenizer)"
                + ("" if "messages" not in body else ", or send prompts as they are (--skip-chat-template)")
            )
        return json.loads(response)


def local_texts(name: str, template_kwargs: Mapping[str, Any] | None = None) -> LocalTexts:
    """A tokenizer by folder, file or hub id."""
    from quire.tokenizer.load import load_tokenizer

    # A tokenizer that is named needs no checkpoint.
    return LocalTexts(load_tokenizer(None, name), template_kwargs)  # type: ignore[arg-type]


def texts_for(
    target: Target,
    served_name: str,
    tokenizer: str | None,
    model: str | None,
    template_kwargs: Mapping[str, Any] | None,
) -> Texts:
    """The named tokenizer, that of a model in a local folder, or else the server's."""
    if tokenizer is None and model is not None and Path(model).is_dir():
        tokenizer = model
    if tokenizer is not None:
        return local_texts(tokenizer, template_kwargs)
    return ServerTexts(target, served_name, template_kwargs)
