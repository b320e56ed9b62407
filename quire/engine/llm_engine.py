"""The synchronous engine: add requests, step, collect outputs."""

import contextlib
import itertools
import logging
import time

from quire.config import EngineConfig
from quire.core.engine_core import EngineCore
from quire.engine.core_client import EngineCoreClient, InprocClient, SyncMPClient
from quire.engine.input_processor import InputProcessor, ParsedPrompt, Prompt
from quire.engine.metrics import Metric, cache_config_info
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import RequestOutput
from quire.engine.resolve_config import resolve_config
from quire.executor.factory import make_executor
from quire.messages.protocol import Ready
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.platforms.defaults import with_platform_defaults
from quire.tokenizer.load import tokenizer_of

logger = logging.getLogger("quire")


class LLMEngine:
    def __init__(
        self, config: EngineConfig, import_seconds: float | None = None, *, multiprocess: bool = False
    ) -> None:
        """`import_seconds` is the time that imports took, for the start-up log. With `multiprocess` the core runs in
        its own process."""
        times = [time.perf_counter()]
        self.config, checkpoint = resolve_config(config)
        self.model_name = checkpoint.name
        model = self.config.model
        self.tokenizer = None if model.skip_tokenizer_init else tokenizer_of(checkpoint, model)
        self.client: EngineCoreClient
        self.client, ready = self._start_process() if multiprocess else self._start_in_process(times)
        times.append(time.perf_counter())
        self.max_model_len = ready.max_model_len
        self.input_processor = InputProcessor(self.config, ready.max_model_len, self.tokenizer)
        interval, buckets = self.config.scheduler.stream_interval, self.config.observability.custom_histogram_buckets
        self.output_processor = OutputProcessor(self.tokenizer, interval, buckets)
        self.stats = SchedulerStats()
        self._num_blocks = ready.num_blocks
        for line in (*ready.summary.lines(checkpoint.name), _time_line(times, import_seconds)):
            logger.info(line)

    def _start_in_process(self, times: list[float]) -> tuple[InprocClient, Ready]:
        self.config = with_platform_defaults(self.config)
        executor = make_executor(self.config)
        times.append(time.perf_counter())
        try:
            core = EngineCore(self.config, executor)
        except BaseException:
            executor.shutdown()
            raise
        return InprocClient(core), Ready(core.max_model_len, core.summary, core.num_blocks, core.max_num_seqs)

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
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        parsed, request = self.input_processor.process(request_id, prompt, params, arrival_time, priority)
        self.output_processor.add(request_id, parsed.text, parsed.token_ids, request)
        try:
            self.client.add_request(request)
        except BaseException:
            with contextlib.suppress(Exception):  # it may never have been sent
                self.abort_request(request_id)
            raise

    def abort_request(self, request_ids: list[str] | str) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.client.finish_requests(self.output_processor.drop(ids))

    def step(self) -> list[RequestOutput]:
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
        return [*own, cache_config_info(self.config.cache, self._num_blocks, self.model_name)]

    def has_unfinished_requests(self) -> bool:
        return len(self.output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def reset_prefix_cache(self) -> bool:
        self.client.reset_prefix_cache()
        return True

    def shutdown(self) -> None:
        self.client.shutdown()


def _time_line(times: list[float], import_seconds: float | None) -> str:
    """Start-up time by phase; the engine process is one phase."""
    ends = ["model load", "cache"] if len(times) == 3 else ["engine process"]
    spent = [end - start for start, end in itertools.pairwise(times)]
    phases = {"import": import_seconds, **dict(zip(ends, spent, strict=True))}
    measured = {phase: seconds for phase, seconds in phases.items() if seconds is not None}
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in measured.items())
    return f"ready in {sum(measured.values()):.1f} s: {parts}"
