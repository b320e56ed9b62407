"""The tokenizer that programs get: the methods of transformers' that they call, with its arguments and defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.tokenizer.tokenizer import Tokenizer

NO_LIMIT = 10**30  # transformers' own value for a length that is not limited


class Encoding(dict[str, Any]):
    """What calling the tokenizer gives: `input_ids` and `attention_mask`, as keys and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class UserTokenizer:
    """Other attributes are those of `Tokenizer`."""

    is_fast = True
    padding_side = "left"
    truncation_side = "right"

    def __init__(self, inner: Tokenizer, name: str, max_model_len: int) -> None:
        self.inner = inner
        self.name_or_path = name
        self.model_max_length = max_model_len

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __len__(self) -> int:
        return self.inner.vocab_size

    @property
    def max_token_id(self) -> int:
        return self.inner.vocab_size - 1

    @property
    def bos_token(self) -> str | None:
        return self._token(self.inner.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self._token(self.inner.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        return self._token(self.inner.pad_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.inner.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return self.inner.convert_ids_to_tokens(self.all_special_ids)

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.inner.backend.get_vocab(True)
        return vocabulary

    def get_added_vocab(self) -> dict[str, int]:
        added = self.inner.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def encode(
        self,
        text: str,
        text_pair: None = None,
        add_special_tokens: bool = True,
        truncation: bool | None = None,
        max_length: int | None = None,
    ) -> list[int]:
        if text_pair is not None:
            raise ValueError("text_pair: only single texts are encoded")
        ids = self.inner.encode(text, add_special_tokens)
        return ids[:max_length] if truncation and max_length else ids

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Encoding:
        texts = [text] if isinstance(text, str) else list(text)
        rows = self.inner.encode_batch(texts, add_special_tokens)
        if truncation and max_length:
            rows = [ids[:max_length] for ids in rows]
        width = max(map(len, rows), default=0) if padding else 0
        pads = (self.inner.pad_token_id, self.inner.eos_token_id, 0)
        fill = next(token_id for token_id in pads if token_id is not None)
        columns = {
            "input_ids": [[fill] * (width - len(ids)) + ids for ids in rows],
            "attention_mask": [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows],
        }
        if return_tensors is not None:
            return Encoding({name: _as_tensor(values, return_tensors) for name, values in columns.items()})
        single = isinstance(text, str)
        return Encoding({name: values[0] if single else values for name, values in columns.items()})

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        return self.inner.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **_: Any) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        return self.inner.convert_ids_to_tokens(self.inner.encode(text, add_special_tokens))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        find = self.inner.backend.token_to_id
        return find(tokens) if isinstance(tokens, str) else [find(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        if isinstance(ids, int):
            return self.inner.convert_ids_to_tokens([ids])[0]
        kept = [i for i in ids if not skip_special_tokens or i not in self.inner.special_ids]
        return self.inner.convert_ids_to_tokens(kept)

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return self.decode(self.convert_tokens_to_ids(tokens))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """The rendered text, or its token ids: a list for each conversation, an Encoding with `return_dict`."""
        from quire.tokenizer.chat_template import render_chat  # Jinja is not needed to generate

        template = chat_template or self.inner.chat_template
        if template is None:
            raise ValueError("the model has no chat template (a base model?); pass chat_template")
        several = bool(conversation) and isinstance(conversation[0], (list, tuple))
        special = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
        texts = [
            render_chat(
                one,
                template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs | ({"documents": documents} if documents is not None else {}),
                special_tokens={name: text for name, text in special.items() if text is not None},
            )
            for one in (conversation if several else [conversation])
        ]
        if not tokenize:
            return texts if several else texts[0]
        given: Any = texts if several else texts[0]
        encoded = self(given, False, padding, truncation, max_length, return_tensors)
        return encoded if return_dict else encoded["input_ids"]

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.inner.convert_ids_to_tokens([token_id])[0]


def _as_tensor(rows: list[list[int]], kind: str) -> Any:
    if kind == "pt":
        import torch

        return torch.tensor(rows)
    if kind == "np":
        import numpy

        return numpy.array(rows)
    raise ValueError(f"return_tensors is {kind!r}; allowed: pt, np")


def get_tokenizer(
    tokenizer_name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> UserTokenizer:
    """The tokenizer of a model, without an engine."""
    from quire.checkpoint.resolve import resolve_model
    from quire.tokenizer.load import load_tokenizer

    checkpoint = resolve_model(tokenizer_name, revision=revision, remote_code=trust_remote_code)
    return UserTokenizer(load_tokenizer(checkpoint), checkpoint.name, NO_LIMIT)
