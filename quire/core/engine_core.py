"""The step loop: schedule, execute, apply results, with as many plans in flight as configured."""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgspec

from quire.config import EngineConfig, ModelConfig
from quire.config.speculative import SpeculativeConfig
from quire.core.hashing import cache_root
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.kv_layout import blocks_of_one_request, bytes_per_block, longest_model_len, plan_kv_cache
from quire.core.kv_transfers import KVTransfers
from quire.core.scheduler import Scheduler
from quire.core.view import EngineView
from quire.distributed.kv_connector import make_connectors
from quire.distributed.kv_event_recorder import KVEventRecorder
from quire.distributed.kv_events import ZmqEventPublisher
from quire.executor.base import Executor, PendingOutput, WorkerMethod
from quire.lora.residency import Residency
from quire.messages.kv_cache import DraftNeeds, KVCacheConfig
from quire.messages.kv_transfer import ConnectorError
from quire.messages.lora import LoRARequest
from quire.messages.plan import DeviceLostError, ModelRunnerOutput, SchedulerOutput
from quire.messages.protocol import EngineSummary
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, Failure, FinishReason, failure_of, invalid
from quire.pooling.registry import find_pooling_type
from quire.structured_output.manager import StructuredOutputManager
from quire.weights.engine_control import EngineControl

logger = logging.getLogger("quire")

GRAMMAR_WAIT = 0.002  # seconds; new requests are not read meanwhile
ADAPTER_WAIT = 0.001  # likewise
LAST_PLANS = 8
TRANSFER_WAIT = 0.2  # seconds; the end of a transfer and new requests end it


class EngineCore:
    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        num_stages = config.parallel.pipeline_parallel_size
        # Stages have a plan each, of different requests; what is sampled is known before a request runs on.
        self.max_in_flight = num_stages if num_stages > 1 else config.scheduler.depth + 1
        assert config.scheduler.max_num_seqs is not None and config.scheduler.max_num_batched_tokens is not None
        step_tokens = config.scheduler.max_num_batched_tokens
        step_tokens = min(step_tokens, config.scheduler.max_num_scheduled_tokens or step_tokens)
        self.max_num_seqs = config.scheduler.max_num_seqs
        # Blocks leave the window by confirmed tokens: plans in flight need room beyond what one step writes.
        num_drafts = config.speculative.num_drafts
        needs: DraftNeeds = executor.collective_rpc("draft_needs", (), {})[-1] if num_drafts else DraftNeeds()
        span = max(step_tokens, self.max_in_flight * (1 + num_drafts) + 1) + needs.num_lookahead
        layout = self._lay_out_cache(config)
        self.max_model_len = self._fit_model_len(config, layout, span)
        # Where a token attends to later ones, a prompt is computed at once.
        chunked_prefill = config.scheduler.enable_chunked_prefill and layout.chunkable
        if num_drafts and not all(group.spec.rolls_back for group in layout.groups):
            raise ValueError("drafts need a cache that can be rolled back, which a recurrent state's cannot be yet")
        if not layout.groups and step_tokens < self.max_model_len:
            logger.info(
                "max_num_batched_tokens raised from %d to %d: texts are computed whole", step_tokens, self.max_model_len
            )
            step_tokens = self.max_model_len
        if not chunked_prefill and step_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a step must hold a whole prompt: max_num_batched_tokens is {step_tokens}, "
                f"max_model_len {self.max_model_len}; raise the first (--max-num-batched-tokens) or lower the second"
            )
        support = executor.feature_support()
        cache_tokens = config.scheduler.encoder_tokens
        if not chunked_prefill and support is not None and support.kinds and cache_tokens < self.max_model_len:
            raise ValueError(
                f"encoder_cache_size is {cache_tokens}; where a prompt is computed at once, its features must fit: at "
                f"least max_model_len, {self.max_model_len} (--encoder-cache-size)"
            )
        self.features = support and msgspec.structs.replace(support, max_length=cache_tokens)
        self.num_blocks = layout.num_blocks
        transfers = KVTransfers(make_connectors(config.transfer, layout, "scheduler"))
        executor.initialize_kv_cache(layout, self.max_model_len, transfers.notify)
        # What connectors keep may outlive this engine, and a checkpoint may be replaced under its name.
        weights = executor.collective_rpc("weights_identity", (), {})[0] if transfers.connectors else ""
        self.summary = EngineSummary(executor.describe(), self._describe_cache(layout, config.cache.block_size, span))
        observed = config.observability
        kv = KVCacheManager(
            layout,
            enable_caching=config.cache.enable_prefix_caching,
            root=kv_fingerprint(config.model, config.cache.kv_cache_dtype, layout, config.speculative, weights),
            hash_algorithm=config.cache.prefix_caching_hash_algo,
            residency_sample=observed.kv_cache_metrics_sample if observed.kv_cache_metrics else None,
            recomputes_last_block=needs.recomputes_last_block,
        )
        self.kv_events = ZmqEventPublisher(config.kv_events.events) if config.kv_events.events.published else None
        if self.kv_events is not None:
            kv.events = KVEventRecorder(layout.groups, self.kv_events.publish)
            kv.pool.on_evict.append(kv.events.removed)
        adaptive = num_drafts > 0 and config.speculative.adaptive and num_stages == 1
        self.scheduler = Scheduler(
            kv,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=step_tokens,
            short_step_tokens=config.scheduler.short_step_tokens,
            max_model_len=self.max_model_len,
            policy=config.scheduler.scheduling_policy,
            long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
            chunked_prefill=chunked_prefill,
            transfers=transfers,
            num_drafts=num_drafts,
            adaptive_drafts=adaptive,
            draft_profile=executor.collective_rpc("get_draft_profile", (), {})[-1] if num_drafts else None,
            encoder_cache_tokens=cache_tokens,
            num_lookahead=needs.num_lookahead,
            num_stages=num_stages,
            adapters=Residency(executor, config.lora.max_loras, config.lora.num_host)
            if config.lora.enable_lora
            else None,
        )
        self.grammars = StructuredOutputManager.of_engine(config)
        self._failures: list[Failure] = []  # requests that failed outside of a step, until their results are returned
        self._unsampled: SchedulerOutput | None = None  # the newest plan, while its masks need tokens in flight
        self._last_result = 0.0  # when it came
        self._view: EngineView | None = None  # while somebody watches
        self._in_flight: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self._buffered: deque[EngineCoreOutputs] = deque()  # what the next calls of step() return
        self.control = EngineControl(self, config.model.enable_sleep_mode)

    def add_request(self, request: EngineCoreRequest) -> None:
        """All its sequences, or none if that raises."""
        if self.control.paused:
            self.control.held.append(request)
            return
        added: list[str] = []
        if request.pooling is not None and request.pooling.pooling_type is not None:
            find_pooling_type(request.pooling.pooling_type)  # a wrong one would fail others' steps
        try:
            for sequence in request.sequences():
                self.scheduler.add_request(sequence)
                added.append(sequence.request_id)
                if sequence.sampling.structured_outputs is not None and not self.grammars.add(sequence):
                    self.scheduler.block_for_grammar(sequence.request_id)
        except BaseException:
            self.finish_requests(added)
            raise
        self._finish_failed()

    def add_or_fail(self, request: EngineCoreRequest) -> None:
        """An error is returned with the next outputs."""
        try:
            self.add_request(request)
        except Exception as error:
            told = invalid(str(error)) if isinstance(error, ValueError) else failure_of(error)
            indices = [request.index + i for i in range(request.sampling.n)]
            self.buffer(EngineCoreOutputs.ended(indices, FinishReason.ERROR, told))

    def finish_requests(self, request_ids: list[str]) -> list[int]:
        if self.control.held:
            self.control.held = [held for held in self.control.held if held.request_id not in request_ids]
        self.grammars.drop(request_ids)
        return self.scheduler.finish_requests(request_ids)

    def has_unfinished(self) -> bool:
        # Plans in flight are drained even if all their requests have ended: the scheduler expects their results.
        waits = self.control.frozen or not self.scheduler.has_unfinished()
        return not waits or bool(self._in_flight or self._failures or self._buffered)

    def buffer(self, outputs: EngineCoreOutputs) -> None:
        """To be returned by step()."""
        self._buffered.append(outputs)

    def step_ahead(self, schedules: bool = True) -> None:
        """A step whose outputs are returned by a later one."""
        outputs = self._step(schedules)
        if outputs is not None:
            self.buffer(outputs)

    def drain(self) -> None:
        """Wait for all plans in flight; schedules none."""
        while self._in_flight or self._failures:
            self.step_ahead(schedules=False)

    def state(self) -> dict[str, int]:
        """What is held right now. In an idle engine every block is free and the other numbers are 0."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        return {
            "requests": len(scheduler.requests),
            "requests_sending": len(scheduler.transfers.sending),
            "rows": len(scheduler.running),
            "plans_in_flight": len(self._in_flight),
            "blocks": pool.num_blocks,
            "blocks_free": pool.num_free,
        }

    def view(self, since: int, cursor: Sequence[int]) -> dict[str, Any]:
        """Requests, blocks, and the steps after step `since`. Steps are noted from the first call on, until nobody
        calls for seconds."""
        self._view = self._view or EngineView(self.scheduler)
        return self._view.sample(since, cursor)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        self.scheduler.transfers.forget()

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return self.control.collective_rpc(method, args, kwargs)

    def compile_grammars(self, request_ids: Collection[str]) -> None:
        """Until the grammars of these requests are compiled, or the next step reports why they cannot be."""
        while self.grammars.waits_for(request_ids):
            self.grammars.compiler.wait(GRAMMAR_WAIT)
            self._poll_grammars()

    def step(self) -> EngineCoreOutputs | None:
        """Keep the pipeline full, then wait for its oldest plan."""
        return self._buffered.popleft() if self._buffered else self._step(schedules=not self.control.frozen)

    def _step(self, schedules: bool) -> EngineCoreOutputs | None:
        self._poll_grammars()
        self.poll_adapters()
        if self._failures:
            return self._report_failures()
        began = self._last_result if self._in_flight else time.perf_counter()
        while schedules and self._can_schedule and (plan := self.scheduler.schedule()) is not None:
            self._in_flight.append((plan, _interrupted()))  # until it is executing
            self.executor.execute_model(plan)
            self._unsampled = plan
            self._sample()
        self._finish_failed()
        if not self._in_flight:
            if self.grammars.pending:
                self.grammars.compiler.wait(GRAMMAR_WAIT)
            elif self.adapters is not None and self.adapters.pending:
                time.sleep(ADAPTER_WAIT)
            elif self.scheduler.transfers.pending and not self._failures:
                self.scheduler.transfers.wait(TRANSFER_WAIT)
            return None
        plan, future = self._in_flight[0]
        try:
            output = future.result()
        except DeviceLostError:
            raise  # no request can be served any more: the caller ends the engine
        except Exception as error:
            self._in_flight.popleft()
            logger.exception("step %d failed; its requests end with an error", plan.step)
            connector = error.connector if isinstance(error, ConnectorError) else None
            return self._after_result(self.scheduler.fail_plan(plan, failure_of(error), connector))
        self._in_flight.popleft()  # only now: an interrupted wait can be resumed
        self._last_result = time.perf_counter()
        self.scheduler.note_time(plan, self._last_result - began)
        if self._view is not None:
            self._view = self._view.after_step(plan, self._last_result - began)
        return self._after_result(self.scheduler.update_from_output(plan, output))

    @property
    def _can_schedule(self) -> bool:
        return len(self._in_flight) < self.max_in_flight and self._unsampled is None

    def _sample(self) -> None:
        """Enqueue sampling of the newest plan, unless it has rows whose masks need tokens that are still in flight: the
        forward pass runs meanwhile, and the result with the last of them calls again."""
        plan = self._unsampled
        if plan is None:
            return
        mask = None
        if self.grammars.active:
            rows = self.scheduler.constrained_rows(plan)
            if rows is None:
                return
            mask = self.grammars.fill(rows.rows, rows.drafts)
            self._finish_failed()
        self._unsampled = None
        self._in_flight[-1] = (plan, self.executor.sample_tokens(mask))

    def _after_result(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """After a result was applied: advance grammars, and sample a plan that waited for it."""
        self.grammars.advance(outputs)
        self._finish_failed()
        self._sample()
        return outputs

    def wake(self) -> None:
        """Called from any thread: a step that waits for transfers ends."""
        self.scheduler.transfers.wake()

    def _poll_grammars(self) -> None:
        """Admit requests whose grammar has compiled."""
        if self.grammars.pending:
            for request_id in self.grammars.ready():
                self.scheduler.grammar_ready(request_id)
            self._finish_failed()

    @property
    def adapters(self) -> Residency | None:
        return self.scheduler.adapters

    def call_adapters(self, method: str, args: Sequence[Any]) -> Any:
        """`add`, `remove`, `pin`, `is_loaded` or `loaded` of Residency."""
        if self.adapters is None:
            raise ValueError("the engine was started without room for adapters (--enable-lora)")
        self.poll_adapters()
        if method == "add":
            (lora,) = args
            self.adapters.add(lora if isinstance(lora, LoRARequest) else msgspec.convert(lora, LoRARequest))
            return None
        calls: dict[str, Callable[..., Any]] = {
            "remove": self.adapters.remove,
            "pin": self.adapters.pin,
            "is_loaded": self.adapters.is_loaded,
            "loaded": self.adapters.loaded,
        }
        return calls[method](*args)

    def poll_adapters(self) -> None:
        """Admit requests whose adapter has been loaded."""
        if self.adapters is not None:
            self.scheduler.poll_adapters()
            self._finish_failed()

    def _report_failures(self) -> EngineCoreOutputs:
        failed, self._failures = self._failures, []
        outputs = EngineCoreOutputs.ended([failure.index for failure in failed], FinishReason.ERROR)
        outputs.errors = {place: failure.error for place, failure in enumerate(failed)}
        outputs.stats = self.scheduler.stats()
        return outputs

    def _finish_failed(self) -> None:
        if self.grammars.failures:
            self.scheduler.finish_requests([failure.request_id for failure in self.grammars.failures])
            self._failures += self.grammars.failures
            self.grammars.failures = []
        if self.scheduler.failures:
            self.grammars.drop([failure.request_id for failure in self.scheduler.failures])
            self._failures += self.scheduler.failures
            self.scheduler.failures = []

    def kv_event_sources(self) -> dict[str, dict[str, Any]]:
        """By data-parallel rank, where events of the KV cache are published."""
        return {} if self.kv_events is None else {str(self.kv_events.rank): asdict(self.kv_events.source)}

    def shutdown(self) -> None:
        if self.kv_events is not None:
            self.kv_events.close()
        if self.scheduler.transfers.connectors:
            with suppress(Exception):  # of workers that may have ended before
                for _ in range(LAST_PLANS):  # so that connectors save what is computed
                    if self.scheduler.requests or not self.has_unfinished():
                        break
                    self.step()
                self.executor.collective_rpc("close_connectors", (), {})
            self.scheduler.transfers.close()
        self.executor.shutdown()

    def _lay_out_cache(self, config: EngineConfig) -> KVCacheConfig:
        specs = self.executor.kv_cache_specs()
        if config.cache.num_gpu_blocks_override is not None:
            return plan_kv_cache(specs, None, config.cache.num_gpu_blocks_override)
        return plan_kv_cache(specs, config.cache.kv_cache_memory_bytes or self.executor.kv_cache_memory())

    def _describe_cache(self, layout: KVCacheConfig, block_size: int, span: int) -> str:
        if not layout.groups:
            return f"no KV cache: texts of up to {self.max_model_len} tokens are computed whole"
        one = blocks_of_one_request(layout.groups, self.max_model_len, span)
        size = (layout.num_blocks + 1) * bytes_per_block(layout.groups) / 2**30
        return (
            f"KV cache: {layout.num_blocks} blocks of {block_size} tokens ({size:.2f} GiB), "
            f"{layout.num_blocks / one:.1f} requests of {self.max_model_len} tokens at a time"
        )

    @staticmethod
    def _fit_model_len(config: EngineConfig, layout: KVCacheConfig, span: int) -> int:
        """A request of full length must fit alone, or it would wait for ever."""
        requested = config.model.max_model_len
        wanted = requested or config.model.derived_max_model_len
        fits = longest_model_len(layout.groups, layout.num_blocks, wanted, span)
        if fits >= wanted:
            return wanted
        if requested is not None or fits < 1:
            raise ValueError(
                f"a request of max_model_len {wanted} needs more KV cache than there is ({layout.num_blocks} blocks); "
                f"the longest that fits is {fits} (--max-model-len), or allow more memory (--kv-cache-memory-bytes)"
            )
        logger.warning("max_model_len lowered from %d to %d: that is what the KV cache can hold", wanted, fits)
        return fits


def kv_fingerprint(
    model: ModelConfig, kv_cache_dtype: str, layout: KVCacheConfig, drafts: SpeculativeConfig, weights: str = ""
) -> bytes:
    """Two engines with the same one compute the same keys and values for the same tokens. `weights` tells contents of
    checkpoints; without it they are known by their name, which serves while an engine runs."""
    # Of all RoPE scalings, longrope alone chooses its factors by the longest sequence that may come.
    chooses_by_length = "long_factor" in repr(model.hf_config)
    return cache_root(
        weights or f"{model.model or ''}, {model.revision or ''}",
        repr(model.hf_overrides),
        f"{model.dtype}, {kv_cache_dtype}",
        f"quantization {model.quantization}",
        f"longrope {model.max_model_len or model.derived_max_model_len}" if chooses_by_length else "",
        repr(layout.groups),
        *([f"draft {drafts.model}, {drafts.revision}, quantization {drafts.quantization}"] if drafts.model else []),
    )


def _interrupted() -> "Future[ModelRunnerOutput]":
    future: Future[ModelRunnerOutput] = Future()
    future.set_exception(RuntimeError("the step was interrupted"))
    return future
