"""An AsyncEngine without a model: real input and output processing around tokens given by a rule.

For measuring the front end alone, and for testing the server.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np

from quire.config import EngineConfig
from quire.engine.async_engine import EngineDeadError
from quire.engine.input_processor import InputProcessor, ParsedPrompt, Prompt
from quire.engine.output_processor import OutputProcessor
from quire.engine.output_stream import OutputStream
from quire.engine.outputs import RequestOutput
from quire.engine.resolve_config import resolve_config
from quire.messages.pooling_params import PoolingParams
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason, Logprobs, SchedulerStats
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.metrics.kinds import Metric
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.tokenizer.load import load_tokenizer
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.engine_methods import AsyncControlMethods

Rule = Callable[[EngineCoreRequest, int], int]  # the token after the given number of generated ones


class StubEngine(AsyncControlMethods):
    """Every request gets one token per step, at each iteration of the event loop or every `step_seconds`."""

    vector_size = 384  # of prompts that are pooled

    def __init__(self, rule: Rule, step_seconds: float = 0.0, config: EngineConfig | None = None) -> None:
        self.config, checkpoint = resolve_config(config or EngineConfig())
        self.model_name = checkpoint.name
        self.max_model_len = int(self.config.model.hf_config["max_position_embeddings"])
        self.max_num_seqs = self.config.scheduler.max_num_seqs or 1024
        self.tokenizer: Tokenizer | None = load_tokenizer(checkpoint)
        self.stats = SchedulerStats()
        self.rule = rule
        self.step_seconds = step_seconds
        self.input_processor = InputProcessor(self.config, self.max_model_len, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.dead: str | None = None
        self.running: dict[str, tuple[EngineCoreRequest, int]] = {}  # with the number of generated tokens
        self.streams: dict[str, OutputStream] = {}
        self.aborted: list[str] = []
        self._loop_task: asyncio.Task[None] | None = None

    async def generate(
        self, prompt: Prompt | ParsedPrompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        await self.check_health()
        parsed, core_request = self.input_processor.process(request_id, prompt, sampling_params, priority=priority)
        self.output_processor.add(request_id, parsed.text, parsed.token_ids, core_request)
        stream = OutputStream(sampling_params.output_kind == RequestOutputKind.DELTA)
        self.streams[request_id] = stream
        self.running |= {request.request_id: (request, 0) for request in core_request.sequences()}
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.get_running_loop().create_task(self._steps())
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self.streams.pop(request_id, None)
            if not finished:
                self._drop([request_id])

    async def encode_many(
        self,
        prompts: Sequence[ParsedPrompt],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Each vector holds the prompt's length."""
        await self.check_health()
        for prompt, request_id in zip(prompts, request_ids, strict=True):
            self.input_processor.process(request_id, prompt, pooling_params, priority=priority)
        await asyncio.sleep(self.step_seconds)
        return [
            PoolingRequestOutput(
                request_id,
                PoolingOutput(np.full(self.vector_size, len(prompt.token_ids), np.float32)),
                prompt.token_ids,
                finish_reason="stop",
            )
            for prompt, request_id in zip(prompts, request_ids, strict=True)
        ]

    def _drop(self, request_ids: list[str]) -> None:
        for core_id in self.output_processor.drop(request_ids):
            self.running.pop(core_id, None)
        self.aborted += request_ids

    async def _steps(self) -> None:
        while self.running and self.dead is None:
            await asyncio.sleep(self.step_seconds)
            self.step()

    def step(self) -> None:
        batch = list(self.running.values())
        if not batch:
            return
        tokens = np.array([self.rule(request, count) for request, count in batch], np.int32)
        finish = [self._finish(request, count + 1, int(t)) for (request, count), t in zip(batch, tokens, strict=True)]
        outputs = EngineCoreOutputs(
            index=np.array([request.index for request, _ in batch]),
            token_ids=tokens,
            offsets=np.arange(len(batch) + 1, dtype=np.int32),
            finish=np.array(finish, np.int8),
            num_cached=np.zeros(len(batch), np.int32),
            logprobs=self._logprobs(batch, tokens),
        )
        for (request, count), reason in zip(batch, finish, strict=True):
            if reason:
                del self.running[request.request_id]
            else:
                self.running[request.request_id] = request, count + 1
        ready, ended = self.output_processor.process(outputs)
        for core_id in ended:
            self.running.pop(core_id, None)
        for output in ready:
            if output.request_id in self.streams:
                self.streams[output.request_id].put(output)
        self.stats = SchedulerStats(num_running=len(self.running))

    def _finish(self, request: EngineCoreRequest, count: int, token: int) -> int:
        if token in request.eos_token_ids and not request.sampling.ignore_eos:
            return FinishReason.STOP
        limit = self.max_model_len - len(request.prompt_token_ids)
        return FinishReason.LENGTH if count >= min(limit, request.sampling.max_tokens or limit) else FinishReason.NONE

    def _logprobs(self, batch: list[tuple[EngineCoreRequest, int]], tokens: np.ndarray) -> Logprobs | None:
        rows = [i for i, (request, _) in enumerate(batch) if request.sampling.num_logprobs is not None]
        if not rows:
            return None
        width = 1 + max(batch[i][0].sampling.num_logprobs or 0 for i in rows)
        named = [batch[i][0].sampling.logprob_token_ids or [] for i in rows]
        ids = np.stack([[tokens[i], *ids, *range(100, 99 + width)][:width] for i, ids in zip(rows, named, strict=True)])
        values = np.tile(-np.arange(1, width + 1, dtype=np.float32), (len(rows), 1))
        return Logprobs(np.array(rows), ids, values, np.full(len(rows), width))

    def die(self, cause: str) -> None:
        self.dead = cause
        for stream in self.streams.values():
            stream.fail(EngineDeadError(cause))

    async def abort(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self.streams]
        for request_id in known:
            self.streams[request_id].put(self.output_processor.aborted(request_id))
        self._drop(known)

    async def reset_prefix_cache(self) -> bool:
        return True

    async def get_state(self) -> dict[str, dict[str, int]]:
        own = {"requests": len(self.output_processor), "streams": len(self.streams)}
        return {"front_end": own, "core": {"requests": len(self.running)}}

    async def _control(self, name: str, *args: Any) -> Any:
        """As an engine that is never paused, asleep or updated."""
        answers: dict[str, Any] = {
            "pause": True,
            "resume": None,
            "is_paused": False,
            "is_sleeping": False,
            "wake_up": True,
        }
        answers |= {"get_weight_version": "default", "set_weight_version": None}
        if name not in answers:
            raise ValueError("an engine without a model has no weights, and no memory to give back")
        return answers[name]

    async def get_kv_event_sources(self) -> dict[str, dict[str, Any]]:
        return {}

    async def get_view(self, since: int, cursor: Sequence[int]) -> dict[str, Any]:
        await self.check_health()
        running = [(i, len(r.prompt_token_ids), 0, count, 0, 0) for i, (r, count) in enumerate(self.running.values())]
        blocks = {"total": 1, "free": 1, "cached": 0, "first": 0, "states": b"\x00", "cursor": ()}
        return {"running": running, "waiting": [], "steps": [], "blocks": blocks, "groups": [], "stats": self.stats}

    async def check_health(self) -> None:
        if self.dead is not None:
            raise EngineDeadError(self.dead)

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def get_num_unfinished_sequences(self) -> int:
        return self.output_processor.num_sequences

    def get_metrics(self) -> list[Metric]:
        return self.output_processor.metrics.snapshot(self.stats, self.model_name)

    def shutdown(self) -> None:
        self.running.clear()


def cycle(token_ids: list[int]) -> Rule:
    """Each request cycles through these tokens, starting at its prompt's length."""

    def rule(request: EngineCoreRequest, count: int) -> int:
        return token_ids[(len(request.prompt_token_ids) + count) % len(token_ids)]

    return rule
