"""The synchronous engine: add requests, step, collect outputs."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.compat.unavailable import with_tokenization
from quire.compat.vllm_interface import VllmInterface, refuse_loggers
from quire.config import EngineConfig
from quire.config.logs import set_up_logging
from quire.core.engine_core import EngineCore
from quire.engine.core_client import EngineCoreClient, InprocClient, SyncMPClient
from quire.engine.input_processor import InputProcessor, ParsedPrompt, Prompt
from quire.engine.output_processor import OutputProcessor
from quire.engine.resolve_config import resolve_config
from quire.executor.factory import make_executor
from quire.messages.lora import LoRARequest
from quire.messages.pooling_params import PoolingParams
from quire.messages.protocol import Ready
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.metrics.engine import cache_config_info
from quire.metrics.kinds import Metric
from quire.platforms.start_up import collector_paused, start_loading_torch
from quire.tokenizer.load import tokenizer_of
from quire.weights.engine_methods import ControlMethods

logger = logging.getLogger("quire")

PHASES = ("import", "model load", "cache", "engine process")  # of a start, in this order in the log
ADAPTER_SECONDS = 0.002  # between looks at whether an adapter is loaded


class LLMEngine(ControlMethods, VllmInterface):
    @collector_paused()
    def __init__(
        self, config: EngineConfig, import_seconds: float | None = None, *, multiprocess: bool = False
    ) -> None:
        """`import_seconds` is the time that imports took, for the start-up log. With `multiprocess` the core runs in
        its own process."""
        began = time.perf_counter()
        phases = {} if import_seconds is None else {"import": import_seconds}
        if not multiprocess:
            import tokenizers  # noqa: F401  # its library would wait for torch's

            start_loading_torch()
        self.config, checkpoint = resolve_config(config)
        self.model_name = checkpoint.name
        model = self.config.model
        self.tokenizer = None if model.skip_tokenizer_init else tokenizer_of(checkpoint, model)
        self.client: EngineCoreClient
        self.client, ready = self._start_process() if multiprocess else self._start_in_process(phases)
        seconds = time.perf_counter() - began + (import_seconds or 0.0)
        phases["engine process" if multiprocess else "model load"] = seconds - sum(phases.values())
        self.max_model_len = ready.max_model_len
        self.input_processor = InputProcessor(self.config, ready.max_model_len, self.tokenizer, features=ready.features)
        self.output_processor = OutputProcessor.of_engine(self.config, self.tokenizer)
        self.stats = SchedulerStats()
        self._num_blocks = ready.num_blocks
        spent = ", ".join(f"{phase} {phases[phase]:.1f}" for phase in PHASES if phase in phases)
        for line in (*ready.summary.lines(checkpoint.name), f"ready in {seconds:.1f} s: {spent}"):
            logger.info(line)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: Any,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> "LLMEngine":
        """From `EngineArgs`. `usage_context` has no meaning here."""
        config = engine_args.create_engine_config()
        return cls.from_vllm_config(config, usage_context, stat_loggers, enable_multiprocessing)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: Any = None,
        stat_loggers: Any = None,
        multiprocess: bool = False,
    ) -> "LLMEngine":
        refuse_loggers(stat_loggers)
        options = vllm_config.observability
        set_up_logging(options.log_level, options.log_config_file)
        return cls(vllm_config, multiprocess=multiprocess)

    @property
    def engine_core(self) -> EngineCoreClient:
        return self.client

    def _start_in_process(self, phases: dict[str, float]) -> tuple[InprocClient, Ready]:
        began = time.perf_counter()
        from quire.platforms.defaults import with_platform_defaults  # imports torch

        phases["import"] = phases.get("import", 0.0) + time.perf_counter() - began
        self.config = with_platform_defaults(self.config)
        executor = make_executor(self.config)
        began = time.perf_counter()
        try:
            core = EngineCore(self.config, executor)
        except BaseException:
            executor.shutdown()
            raise
        phases["cache"] = time.perf_counter() - began
        return InprocClient(core), Ready(
            core.max_model_len, core.summary, core.num_blocks, core.max_num_seqs, core.features
        )

    def _start_process(self) -> tuple[SyncMPClient, Ready]:
        client = SyncMPClient(self.config)
        try:
            return client, client.connection.wait_ready()
        except BaseException:
            client.connection.close(timeout=0)
            raise

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
    ) -> str:
        """`session_id` and `trace_headers` have no meaning here."""
        if tokenization_kwargs:
            prompt, params = with_tokenization(prompt, params, tokenization_kwargs, self.input_processor.parse_many)
        if lora_request is not None:
            (prompt,) = self.input_processor.with_adapters([prompt], lora_request)
        parsed, request = self.input_processor.process(request_id, prompt, params, arrival_time, priority)
        self.output_processor.add(request_id, prompt_text or parsed.text, parsed.token_ids, request)
        try:
            self.client.add_request(request)
        except BaseException:
            with contextlib.suppress(Exception):  # it may never have been sent
                self.abort_request(request_id)
            raise
        return request_id

    def abort_request(self, request_ids: list[str] | str, internal: bool = False) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.client.finish_requests(self.output_processor.drop(ids))

    def step(self) -> list[Any]:
        """A RequestOutput, or a PoolingRequestOutput of a request that pools, for each that has news."""
        outputs = self.client.get_output()
        if outputs is None:
            return []
        if outputs.stats is not None:
            self.stats = outputs.stats
        ready, ended = self.output_processor.process(outputs)
        if ended:
            self.client.finish_requests(ended)
        return ready

    def get_metrics(self) -> list[Metric]:
        own = self.output_processor.metrics.snapshot(self.stats, self.model_name)
        return [*own, cache_config_info(self.config.cache, self._num_blocks, self.model_name, self.max_model_len)]

    def has_unfinished_requests(self) -> bool:
        return len(self.output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Blocks of running requests stay theirs; nothing is found in them any more."""
        self.client.reset_prefix_cache()
        return True

    def compile_grammars(self, request_ids: list[str]) -> None:
        """Until the grammars of these requests are compiled, or the next step reports why they cannot be."""
        self.client.compile_grammars(request_ids)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of each worker, or a function with the worker as its first argument; a result per worker. It
        is not interrupted after `timeout`."""
        return self.client.collective_rpc(method, args, kwargs or {})

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        return self.collective_rpc(lambda worker: func(worker.get_model()))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        self.collective_rpc("start_profile", args=(profile_prefix,))

    def stop_profile(self) -> None:
        for path in self.collective_rpc("stop_profile"):
            logger.info("profile written to %s", path)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter ahead of requests for it. ValueError if it cannot be."""
        self.client.adapters("add", lora_request)
        while not self.client.adapters("is_loaded", lora_request.lora_int_id):
            time.sleep(ADAPTER_SECONDS)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        return bool(self.client.adapters("remove", lora_id))

    def pin_lora(self, lora_id: int) -> bool:
        """Keep it in a slot from its next use on."""
        return bool(self.client.adapters("pin", lora_id))

    def list_loras(self) -> set[int]:
        return set(self.client.adapters("loaded"))

    def _control(self, name: str, *args: Any) -> Any:
        return self.client.control(name, *args)

    @property
    def _weights_at_hand(self) -> bool:
        parallel = self.config.parallel
        own = parallel.num_ranks == 1 and parallel.distributed_executor_backend in (None, "uni")
        return own and isinstance(self.client, InprocClient)

    def do_log_stats(self) -> None:
        load = f"{self.stats.num_running} requests running, {self.stats.num_waiting} waiting"
        logger.info("%s, %.1f %% of the KV cache in use", load, 100 * self.stats.kv_cache_usage)

    def shutdown(self) -> None:
        self.client.shutdown()
