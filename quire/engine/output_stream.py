"""Outputs on their way to one consumer, who may be slower than the engine."""

import asyncio

from quire.engine.outputs import CompletionOutput, RequestOutput


class OutputStream:
    """Holds at most one output: what comes before the consumer has taken the last is merged into it."""

    def __init__(self, merge_deltas: bool) -> None:
        self._merge_deltas = merge_deltas
        self._waiting: RequestOutput | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._waiting is not None:
            output.outputs = self._merged(self._waiting.outputs, output.outputs)
        self._waiting = output
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._news.set()

    async def get(self) -> RequestOutput:
        await self._news.wait()
        output, self._waiting = self._waiting, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._news.clear()
        return output

    def _merged(self, earlier: list[CompletionOutput], later: list[CompletionOutput]) -> list[CompletionOutput]:
        merged = {part.index: part for part in earlier}
        for part in later:
            before = merged.get(part.index)
            if before is not None and self._merge_deltas:
                part.text = before.text + part.text
                part.token_ids = before.token_ids + part.token_ids
                if part.logprobs is not None:
                    part.logprobs = (before.logprobs or []) + part.logprobs
            merged[part.index] = part
        return list(merged.values())
