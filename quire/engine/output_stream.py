"""A request's output stream to one consumer, which may be slower than the engine."""

import asyncio
from typing import Any, Generic, TypeVar

from quire.engine.logprobs import joined
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput[PoolingOutput])


class OutputStream(Generic[Output]):
    """Buffers at most one output: later ones are merged into it until the consumer reads it."""

    def __init__(self, merge_deltas: bool) -> None:
        self._merge_deltas = merge_deltas
        self._buffered: Output | None = None
        self._error: Exception | None = None
        self._available = asyncio.Event()

    def put(self, output: Output) -> None:
        if isinstance(self._buffered, RequestOutput):
            assert isinstance(output, RequestOutput)
            output.outputs = self._merged(self._buffered.outputs, output.outputs)
        self._buffered = output
        self._available.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._available.set()

    async def get(self) -> Output:
        await self._available.wait()
        output, self._buffered = self._buffered, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._available.clear()
        return output

    def _merged(self, earlier: list[CompletionOutput], later: list[CompletionOutput]) -> list[CompletionOutput]:
        merged = {part.index: part for part in earlier}
        for part in later:
            before = merged.get(part.index)
            if before is not None and self._merge_deltas:
                part.text = before.text + part.text
                part.token_ids = before.token_ids + part.token_ids
                if part.logprobs is not None:
                    part.logprobs = joined(before.logprobs, part.logprobs)
            merged[part.index] = part
        return list(merged.values())


class OutputBatch:
    """The one output each of several requests, for a consumer that waits for all."""

    def __init__(self, count: int) -> None:
        self.outputs: dict[str, PoolingRequestOutput[PoolingOutput]] = {}
        self._count = count
        self._error: Exception | None = None
        self._ended = asyncio.Event()

    def put(self, output: Any) -> None:
        self.outputs[output.request_id] = output
        if len(self.outputs) == self._count:
            self._ended.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ended.set()

    async def done(self) -> dict[str, PoolingRequestOutput[PoolingOutput]]:
        """By request id."""
        await self._ended.wait()
        if len(self.outputs) < self._count:
            assert self._error is not None
            raise self._error
        return self.outputs
