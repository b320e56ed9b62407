"""The asynchronous engine: a client of an engine process, with an output stream per request."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quire.compat.unavailable import named, with_tokenization
from quire.compat.vllm_interface import VllmInterface, refuse_loggers
from quire.config import EngineConfig
from quire.config.logs import set_up_logging
from quire.core.engine_start import EngineStart
from quire.engine.async_engine import EngineCallError, EngineDeadError, EngineStalledError
from quire.engine.engine_connection import EngineChannel, EngineConnection
from quire.engine.engine_health import EngineHealth
from quire.engine.input_processor import InputProcessor, ParsedPrompt, Prompt
from quire.engine.output_processor import OutputProcessor
from quire.engine.output_stream import OutputBatch, OutputStream
from quire.engine.outputs import Logprob, RequestOutput
from quire.engine.resolve_config import resolve_config
from quire.messages.lora import LoRARequest
from quire.messages.pooling_params import PoolingParams
from quire.messages.protocol import AddRequests, Call, Dead, FinishRequests, Heartbeat, Outputs, Result, Watch
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.metrics.engine import cache_config_info
from quire.metrics.kinds import Metric
from quire.platforms.start_up import collector_paused
from quire.pooling.outputs import PoolingOutput, PoolingRequestOutput
from quire.tokenizer.load import tokenizer_of
from quire.weights.engine_methods import CONTROL_SECONDS, AsyncControlMethods

logger = logging.getLogger("quire")

PROFILE_SECONDS = 600.0  # to write a trace
ADAPTER_SECONDS = 0.005  # between looks at whether an adapter is loaded
PACE = 32  # prompts, which take some milliseconds

T = TypeVar("T")


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """The event loop's other tasks run now and then meanwhile: thousands of prompts would stall every stream."""
    for number, item in enumerate(items, 1):
        yield item
        if number % PACE == 0:
            await asyncio.sleep(0)


class AsyncLLM(AsyncControlMethods, VllmInterface):
    """The constructor returns once the model is loaded. This process does not import torch."""

    @collector_paused()
    def __init__(
        self, config: EngineConfig, channel: EngineChannel | None = None, start: EngineStart | None = None
    ) -> None:
        """Starts its own engine, unless given a `channel` to a shared one, or a `start` of its process."""
        began = time.perf_counter()
        self.config, checkpoint = resolve_config(config)
        self.model_name = checkpoint.name
        self._owns_engine = channel is None
        self._connection = channel or EngineConnection(self.config, start=start)
        try:
            model = self.config.model
            self.tokenizer = None if model.skip_tokenizer_init else tokenizer_of(checkpoint, model)
            ready = self._connection.wait_ready()
        except BaseException:
            self._connection.close(timeout=0)
            raise
        self.max_model_len = ready.max_model_len
        self.max_num_seqs = ready.max_num_seqs
        self._num_blocks = ready.num_blocks
        client = self._connection.client or 0
        self.input_processor = InputProcessor(self.config, ready.max_model_len, self.tokenizer, client, ready.features)
        self.output_processor = OutputProcessor.of_engine(self.config, self.tokenizer)
        self.stats = SchedulerStats()
        self._streams: dict[str, OutputStream[Any] | OutputBatch] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        options = self.config.observability
        self._call_timeout = options.engine_call_timeout
        self._health = EngineHealth(options.engine_heartbeat_timeout, options.engine_stall_timeout)
        self._dead: EngineDeadError | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: threading.Thread | None = None
        if self._owns_engine:
            for line in (*ready.summary.lines(self.model_name), f"ready in {time.perf_counter() - began:.1f} s"):
                logger.info(line)

    @classmethod
    def from_engine_args(
        cls, engine_args: Any, start_engine_loop: bool = True, usage_context: Any = None, stat_loggers: Any = None
    ) -> "AsyncLLM":
        """From `AsyncEngineArgs`. `start_engine_loop` and `usage_context` have no meaning here."""
        return cls.from_vllm_config(engine_args.create_engine_config(), stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> "AsyncLLM":
        refuse_loggers(stat_loggers)
        options = vllm_config.observability
        set_up_logging(options.log_level, options.log_config_file)
        return cls(vllm_config)

    async def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Arguments from `trace_headers` on are vLLM's and have no meaning here."""
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"generate() takes SamplingParams, got {type(sampling_params).__name__}; encode() pools")
        if tokenization_kwargs:
            prompt, sampling_params = with_tokenization(
                prompt, sampling_params, tokenization_kwargs, self.input_processor.parse_many
            )
        if lora_request is not None:
            (prompt,) = self.input_processor.with_adapters([prompt], lora_request)
        stream = self._add(prompt, sampling_params, request_id, priority)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._abort([request_id])

    async def encode(
        self,
        prompt: Prompt | ParsedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: Any = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """One output, with the prompt's pooled vector."""
        if not isinstance(pooling_params, PoolingParams):
            raise ValueError(f"encode() takes PoolingParams, got {type(pooling_params).__name__}; generate() samples")
        if lora_request is not None:
            (prompt,) = self.input_processor.with_adapters([prompt], lora_request)
        stream = self._add(prompt, pooling_params, request_id, priority)
        finished = False
        try:
            output = await stream.get()
            finished = output.finished
            yield output
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._abort([request_id])

    async def encode_many(
        self,
        prompts: Sequence[ParsedPrompt],
        pooling_params: PoolingParams,
        request_ids: Sequence[str],
        *,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """One output for each prompt, in their order. All are checked before any runs, and sent as one message."""
        self._check_dead()
        self._ensure_listening()
        self._health.check()
        process = self.input_processor.process
        pairs = paced(zip(request_ids, prompts, strict=True))
        ready = [process(id, prompt, pooling_params, priority=priority) async for id, prompt in pairs]
        self._check_dead()  # by now
        batch = OutputBatch(len(ready))
        try:
            async for request_id, (parsed, request) in paced(zip(request_ids, ready, strict=True)):
                self.output_processor.add(request_id, parsed.text, parsed.token_ids, request)
                self._streams[request_id] = batch
            self._connection.send(AddRequests([request for _, request in ready]))
            done = await batch.done()
        finally:
            for request_id in request_ids:
                if self._streams.get(request_id) is batch:
                    del self._streams[request_id]
            self._abort([request_id for request_id in request_ids if request_id not in batch.outputs])
        return [done[request_id] for request_id in request_ids]

    async def abort(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Their streams end with a final output of finish_reason "abort"."""
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and request_id in self.output_processor:
                stream.put(self.output_processor.aborted(request_id))
        self._abort(request_ids)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker; a result per worker."""
        results: list[Any] = await self._call("collective_rpc", [named(method), *args], dict(kwargs or {}), timeout)
        return results

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        await self.collective_rpc("start_profile", args=(profile_prefix,))

    async def stop_profile(self) -> None:
        for path in await self.collective_rpc("stop_profile", timeout=PROFILE_SECONDS):
            logger.info("profile written to %s", path)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of requests for it. ValueError if it cannot be."""
        await self._adapters("add", msgspec.to_builtins(lora_request))
        while not await self._adapters("is_loaded", lora_request.lora_int_id):
            await asyncio.sleep(ADAPTER_SECONDS)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        return bool(await self._adapters("remove", lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep it in a slot from its next use on."""
        return bool(await self._adapters("pin", lora_id))

    async def list_loras(self) -> set[int]:
        return set(await self._adapters("loaded"))

    async def _adapters(self, method: str, *args: Any) -> Any:
        try:
            return await self._call("adapters", [method, *args])
        except EngineCallError as error:
            raise ValueError(str(error)) from None

    async def _control(self, name: str, *args: Any) -> Any:
        try:
            return await self._call("control", [name, *args], timeout=CONTROL_SECONDS)
        except EngineCallError as error:
            raise ValueError(str(error)) from None

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """The engine process logs them by itself."""

    @property
    def is_running(self) -> bool:
        return self._dead is None

    is_stopped = errored = property(lambda self: self._dead is not None)

    @property
    def dead_error(self) -> EngineDeadError:
        return self._dead or EngineDeadError("the engine is alive")

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        await self._call("reset_prefix_cache")
        return True

    async def get_state(self) -> dict[str, dict[str, int]]:
        """Current counts of this front end and of the core."""
        own = {"requests": len(self.output_processor), "streams": len(self._streams), "calls": len(self._calls)}
        return {"front_end": own, "core": await self._call("state")}

    async def get_kv_event_sources(self) -> dict[str, dict[str, Any]]:
        """By data-parallel rank, where events of the KV cache are published."""
        sources: dict[str, dict[str, Any]] = await self._call("kv_event_sources")
        return sources

    async def get_view(self, since: int, cursor: Sequence[int]) -> dict[str, Any]:
        view: dict[str, Any] = await self._call("view", [since, list(cursor)])
        return view

    async def _call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        self._check_dead()
        self._ensure_listening()
        self._num_calls += 1
        number = self._num_calls
        done = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(Call(number, name, list(args), dict(kwargs or {})))
            return await asyncio.wait_for(done, timeout or self._call_timeout)
        except TimeoutError:
            limit = f"{timeout or self._call_timeout:g} seconds (--engine-call-timeout)"
            raise EngineStalledError(f"the engine has not replied to {name} within {limit}") from None
        finally:
            del self._calls[number]

    async def check_health(self) -> None:
        self._check_dead()
        self._ensure_listening()
        self._connection.check_alive()
        self._health.check()

    def engine_died(self, cause: str) -> None:
        """Called when the process that started the shared engine reports its exit."""
        self._die(EngineDeadError(cause))

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def get_num_unfinished_sequences(self) -> int:
        return self.output_processor.num_sequences

    def get_metrics(self) -> list[Metric]:
        own = self.output_processor.metrics.snapshot(self.stats, self.model_name)
        return [*own, cache_config_info(self.config.cache, self._num_blocks, self.model_name, self.max_model_len)]

    def shutdown(self, timeout: float = 10.0) -> None:
        """Stop the engine process, after `timeout` seconds by force; a shared one keeps running. Open streams end with
        an error."""
        if self._closing:
            return
        self._closing = True
        self._die(EngineDeadError("the engine was shut down"))
        if self._listener is not None:
            self._listener.join()
        self._connection.close(timeout)

    def _add(
        self, prompt: Prompt | ParsedPrompt, params: SamplingParams | PoolingParams, request_id: str, priority: int
    ) -> OutputStream[Any]:
        self._check_dead()
        self._ensure_listening()
        self._health.check()
        parsed, request = self.input_processor.process(request_id, prompt, params, priority=priority)
        self.output_processor.add(request_id, parsed.text, parsed.token_ids, request)
        try:
            stream = self._streams[request_id] = OutputStream(request.sampling.output_kind == RequestOutputKind.DELTA)
            self._connection.send(AddRequests([request]))
        except BaseException:
            self._streams.pop(request_id, None)
            with contextlib.suppress(Exception):  # it may never have been sent
                self._abort([request_id])
            raise
        return stream

    def _abort(self, request_ids: list[str]) -> None:
        running = self.output_processor.drop(request_ids)
        if running and self._dead is None:
            self._connection.send(FinishRequests(running))

    def _check_dead(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _ensure_listening(self) -> None:
        """Start the listener thread, at the first call from an event loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._listener = threading.Thread(target=self._receive, name="quire-listener", daemon=True)
            self._listener.start()
            self._connection.send(Watch(self._connection.client or 0))
        elif self._loop is not loop:
            raise RuntimeError("an AsyncLLM serves one event loop; create another for this one")

    def _receive(self) -> None:
        """Runs in a thread: receives and decodes messages, and hands them to the event loop."""
        loop, waiting_since = self._loop, time.monotonic()
        while loop is not None and not self._closing:
            try:
                message = self._connection.receive(timeout=0.2)
                if message is None:
                    waited, waiting_since = time.monotonic() - waiting_since, time.monotonic()
                    self._health.record_silence(waited)
                    self._connection.check_alive()
                    continue
            except EngineDeadError as error:
                message = Dead(str(error))
            except Exception as error:
                logger.exception("a message from the engine cannot be decoded")
                message = Dead(f"a message from the engine cannot be decoded: {error}")
            waiting_since = time.monotonic()
            self._health.record_message(message.step_seconds if isinstance(message, Heartbeat) else None)
            if isinstance(message, Heartbeat):
                continue
            entries = self.output_processor.prompt_entries(message.outputs) if isinstance(message, Outputs) else []
            try:
                loop.call_soon_threadsafe(self._handle, message, entries)
            except RuntimeError:
                return  # the event loop is closed
            if isinstance(message, Dead):
                return

    def _handle(self, message: Any, prompt_entries: list[list[dict[int, Logprob]] | None]) -> None:
        match message:
            case Outputs(outputs):
                self.stats = outputs.stats or self.stats
                ready, ended = self.output_processor.process(outputs, prompt_entries)
                for output in ready:
                    stream = self._streams.get(output.request_id)
                    if stream is not None:
                        stream.put(output)
                if ended:
                    self._connection.send(FinishRequests(ended))
            case Result(number, error, values):
                done = self._calls.get(number)
                if done is None or done.done():
                    return  # the caller has timed out
                if error is None:
                    done.set_result(values)
                else:
                    done.set_exception(EngineCallError(error))
            case Dead(cause):
                self._die(EngineDeadError(cause))

    def _die(self, error: EngineDeadError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        if not self._closing and self._owns_engine:
            logger.error("the engine is dead: %s", error)
        for stream in self._streams.values():
            stream.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
