"""Logs what clients ask for and what they get (`--enable-log-requests`, `--enable-log-outputs`)."""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from quire.config.server import ServerConfig
from quire.engine.input_processor import ParsedPrompt

if TYPE_CHECKING:
    from quire.entrypoints.http.generation import Batch

logger = logging.getLogger("quire.requests")


class RequestLog:
    """Parameters, texts and finish reasons at INFO; prompts and token ids at DEBUG."""

    def __init__(self, max_len: int | None, outputs: bool, deltas: bool) -> None:
        self.max_len = max_len  # characters and token ids of each prompt and output
        self.outputs = outputs
        self.deltas = deltas

    @classmethod
    def of(cls, config: ServerConfig) -> "RequestLog | None":
        if not config.enable_log_requests:
            return None
        return cls(config.max_log_len, config.enable_log_outputs, config.enable_log_deltas)

    def received(self, ids: Sequence[str], prompts: Sequence[ParsedPrompt], params: object) -> None:
        for request_id, prompt in zip(ids, prompts, strict=True):
            logger.info("received request %s: %s", request_id, params)
            if logger.isEnabledFor(logging.DEBUG):
                text = None if prompt.text is None else prompt.text[: self.max_len]
                logger.debug("prompt of %s: %r, token ids %s", request_id, text, prompt.token_ids[: self.max_len])

    async def logged(
        self, outputs: AsyncGenerator["Batch", None], ids: Sequence[str], is_stream: bool
    ) -> AsyncGenerator["Batch", None]:
        """Passes outputs through."""
        said: dict[tuple[int, int], tuple[list[str], list[int]]] = {}  # texts and tokens so far, by prompt and choice
        async with aclosing(outputs):
            async for batch in outputs:
                for number, output in batch:
                    for choice in output.outputs:
                        texts, tokens = said.setdefault((number, choice.index), ([], []))
                        if is_stream or choice.finish_reason is not None:  # whole outputs repeat what was before
                            texts.append(choice.text)
                            tokens += choice.token_ids
                        if is_stream and self.deltas and (choice.text or choice.token_ids):
                            self._say("delta of", ids[number], choice.index, choice.text, list(choice.token_ids), None)
                        if choice.finish_reason is not None:
                            reason = choice.finish_reason
                            self._say("response to", ids[number], choice.index, "".join(texts), tokens, reason)
                yield batch

    def _say(self, what: str, id: str, index: int, text: str, token_ids: list[int], reason: str | None) -> None:
        ended = "" if reason is None else f", finish reason {reason}"
        logger.info("%s request %s, choice %d: %r%s", what, id, index, text[: self.max_len], ended)
        logger.debug("token ids of request %s, choice %d: %s", id, index, token_ids[: self.max_len])
