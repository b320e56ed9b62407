"""The synchronous engine: requests in, steps, outputs out."""

import logging
import time

from quire.config import EngineConfig
from quire.core.engine_core import EngineCore
from quire.engine.core_client import InprocClient
from quire.engine.input_processor import InputProcessor, ParsedPrompt, Prompt
from quire.engine.output_processor import OutputProcessor
from quire.engine.outputs import RequestOutput
from quire.engine.setup import resolve_config
from quire.executor.uniproc import UniProcExecutor
from quire.messages.requests import SchedulerStats
from quire.messages.sampling_params import SamplingParams
from quire.tokenizer.load import load_tokenizer

logger = logging.getLogger("quire")


class LLMEngine:
    def __init__(self, config: EngineConfig) -> None:
        began = time.perf_counter()
        self.config, checkpoint = resolve_config(config)
        model = self.config.model
        self.tokenizer = None if model.skip_tokenizer_init else load_tokenizer(checkpoint, model.tokenizer)
        executor = UniProcExecutor(self.config)
        core = EngineCore(self.config, executor)
        self.client = InprocClient(core)
        self.max_model_len = core.max_model_len
        self.input_processor = InputProcessor(model, core.max_model_len, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer)
        self.stats = SchedulerStats()
        capacity = core.capacity
        logger.info("%s · %s · %s", checkpoint.name, model.dtype, executor.describe())
        logger.info(
            "KV cache: %d blocks of %d tokens (%.2f GiB), %.1f requests of %d tokens at a time · ready in %.1f s",
            capacity.num_blocks,
            self.config.cache.block_size,
            capacity.num_bytes / 2**30,
            capacity.max_concurrency,
            core.max_model_len,
            time.perf_counter() - began,
        )

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
    ) -> None:
        if request_id in self.output_processor:
            raise ValueError(f"request id {request_id!r} is in use; ids must be unique among unfinished requests")
        if priority and self.config.scheduler.scheduling_policy != "priority":
            raise ValueError("a priority needs scheduling_policy 'priority' (--scheduling-policy priority)")
        parsed, requests = self.input_processor.process(request_id, prompt, params, arrival_time, priority)
        self.output_processor.add(
            request_id,
            [(r.index, r.request_id) for r in requests],
            parsed.text,
            parsed.token_ids,
            params,
            requests[0].arrival_time,
        )
        for request in requests:
            self.client.add_request(request)

    def abort_request(self, request_ids: list[str] | str) -> None:
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        self.client.finish_requests(self.output_processor.drop(ids))

    def step(self) -> list[RequestOutput]:
        outputs = self.client.get_output()
        if outputs is None:
            return []
        if outputs.stats is not None:
            self.stats = outputs.stats
        return self.output_processor.process(outputs)

    def has_unfinished_requests(self) -> bool:
        return len(self.output_processor) > 0

    def get_num_unfinished_requests(self) -> int:
        return len(self.output_processor)

    def reset_prefix_cache(self) -> bool:
        self.client.reset_prefix_cache()
        return True

    def shutdown(self) -> None:
        self.client.shutdown()
