"""Logprobs in OpenAI's two schemas, and prompt logprobs in vLLM's."""

from collections.abc import Sequence
from typing import Any

from quire.engine.outputs import Logprob
from quire.messages.sampling_params import ALL_LOGPROBS
from quire.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity

Entry = dict[int, Logprob]


class LogprobFormat:
    def __init__(self, tokenizer: Tokenizer | None, as_token_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.as_token_ids = as_token_ids or tokenizer is None

    def text(self, token: int) -> str:
        if self.as_token_ids or self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.token_text(token)

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[Entry | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """Parallel lists, and the text offset of the next token."""
        tokens, offsets = [], []
        for token in token_ids:
            tokens.append(self.text(token))
            offsets.append(offset)
            offset += len(tokens[-1])
        values = [
            None if entry is None else _finite(entry[token].logprob)
            for token, entry in zip(token_ids, entries, strict=True)
        ]
        tops = [
            None if entry is None else {self.text(token): _finite(found.logprob) for token, found in entry.items()}
            for entry in entries
        ]
        shape = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
        return shape, offset

    def chat(self, token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> list[dict[str, Any]]:
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            best = sorted(entry.items(), key=lambda item: item[1].rank or 0)
            best = best if num_top == ALL_LOGPROBS else best[:num_top]
            top = [self._chat_token(id, found) for id, found in best]
            content.append({**self._chat_token(token, entry[token]), "top_logprobs": top})
        return content

    @staticmethod
    def tokens(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> list[dict[str, Any]]:
        """Of /inference/v1/generate, which names tokens by their ids."""
        content = []
        for token, entry in zip(token_ids, entries, strict=True):
            best = sorted(entry.items(), key=lambda item: item[1].rank or 0)
            top = [_ranked(id, found) for id, found in (best if num_top == ALL_LOGPROBS else best[:num_top])]
            content.append({**_ranked(token, entry[token]), "top_logprobs": top})
        return content

    def _chat_token(self, token: int, found: Logprob) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token)) if self.tokenizer is not None else None
        return {"token": self.text(token), "logprob": _finite(found.logprob), "bytes": data}


def _ranked(token: int, found: Logprob) -> dict[str, Any]:
    return {"token_id": token, "logprob": _finite(found.logprob), "rank": found.rank}


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": _finite(p.logprob), "rank": p.rank, "decoded_token": p.decoded_token}
            for token, p in entry.items()
        }
        for entry in entries
    ]


def _finite(value: float) -> float:
    return value if value > LOWEST else LOWEST
