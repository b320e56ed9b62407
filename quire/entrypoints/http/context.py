"""State shared by all endpoints: the engine, the served model names, the jobs in progress."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from starlette.types import Scope

from quire import __version__
from quire.config import EngineConfig
from quire.config.server import ServerConfig
from quire.config.shown import shown
from quire.engine.async_engine import AsyncEngine
from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.chat_renderer import ChatRenderer
from quire.entrypoints.http.adapters import ServedAdapters
from quire.entrypoints.http.body import CLIENT_REQUEST_ID, BodyReader
from quire.entrypoints.http.errors import ApiError, bad_request, overloaded
from quire.entrypoints.http.keys import KnownKeys
from quire.entrypoints.http.metrics import HttpMetrics
from quire.entrypoints.http.peers import Peers, RemotePeers
from quire.entrypoints.http.rate_limit import FixedWindowLimiter, RateLimiter
from quire.entrypoints.http.request_log import RequestLog
from quire.entrypoints.http.shared_store import SharedStore, Store
from quire.entrypoints.parsers.detect import ParserNames, parser_names
from quire.entrypoints.tool_prompt import takes_tools
from quire.entrypoints.tracing import Tracer
from quire.messages.lora import LoRARequest
from quire.metrics.kinds import Metric
from quire.tokenizer.tokenizer import Tokenizer

MAX_IDS = 1 << 21  # token ids in a request with many inputs
LONG_TEXT = 20_000  # characters; tokenizing them on the event loop would stall every stream
MAX_SHOWN = 100  # adapters, where models are listed for people

T = TypeVar("T")


@dataclass
class Job:
    """An HTTP request in progress."""

    id: str
    num_prompts: int
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    beams: set[str] = field(default_factory=set)  # engine request ids of a running beam search
    aborted_by_admin: bool = False
    engine_died: bool = False  # the reason it was aborted
    queued_tokens: int = 0  # of its prompts, until the first output

    def engine_ids(self) -> list[str]:
        """One for each prompt. Clients cannot choose ids with spaces, so these never collide."""
        return [self.id] if self.num_prompts == 1 else [f"{self.id} {i}" for i in range(self.num_prompts)]


def _fingerprint(config: ServerConfig, engine: EngineConfig, model_name: str) -> str | None:
    """Tells servers apart whose output may differ; `full` names the parallelism, which the hash leaves out."""
    if config.fingerprint_mode in ("custom", "none"):
        return config.fingerprint_value
    facts = (__version__, model_name, engine.model.dtype, engine.device.device)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:10]
    size = engine.parallel.tensor_parallel_size
    parallel = f"tp{size}-" if config.fingerprint_mode == "full" and size > 1 else ""
    return f"fp_{__version__}-{parallel}{digest}"


class ServerContext:
    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        engine_config: EngineConfig,
        peers: Peers | None = None,
        api_keys: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.peers = peers or Peers()
        self.store: Store = self.peers if isinstance(self.peers, RemotePeers) else SharedStore.of(config)
        self.config = config
        self.engine_config = engine_config
        self.created = int(time.time())
        self.model_names = config.served_model_name or (engine.model_name,)
        self.adapters = ServedAdapters(config, engine, self.model_names[0], engine_config.lora.enable_lora)
        most_inputs = config.max_inputs if engine_config.pooling.setup is not None else 1
        self.bodies = BodyReader(config, max(engine.max_model_len, min(MAX_IDS, most_inputs * engine.max_model_len)))
        self.http_metrics = HttpMetrics()
        endpoint = config.otlp_traces_endpoint
        self.tracer = Tracer(endpoint, self.model_names[0]) if endpoint is not None else None
        self.jobs: dict[str, Job] = {}
        self._num_sequences = 0  # over all jobs
        self.draining = False
        self.keys = KnownKeys(api_keys) if api_keys else None
        windows = FixedWindowLimiter.of(config)
        remote = self.peers if isinstance(self.peers, RemotePeers) else None
        self.limiter: RateLimiter | None = None if windows is None else remote or windows
        self.isolate_by_key = (config.prefix_cache_isolation or ("key" if len(api_keys) > 1 else "none")) == "key"
        self.request_log = RequestLog.of(config)
        self._threads = ThreadPoolExecutor(config.renderer_num_workers, thread_name_prefix="quire-prompt")
        self.fingerprint = _fingerprint(config, engine_config, engine.model_name)

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise bad_request("the server has no tokenizer (--skip-tokenizer-init); send prompts as token ids")
        return self.engine.tokenizer

    @cached_property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(
            self.tokenizer, self.engine_config.model.chat_template, self.config.chat_template_content_format
        )

    @cached_property
    def parsers(self) -> ParserNames:
        """The parsers of responses: the user's, or those of the model's chat template and family."""
        config, template = self.config, self.renderer.template if self.engine.tokenizer is not None else None
        family = str(self.engine_config.model.hf_config.get("model_type", ""))
        given = config.tool_call_parser, config.reasoning_parser
        takes = template is not None and takes_tools(template)
        return parser_names(*given, config.enable_auto_tool_choice, template, takes, family)

    @property
    def pools(self) -> bool:
        return self.engine_config.pooling.setup is not None

    @property
    def task(self) -> str | None:
        """Of a model that pools."""
        setup = self.engine_config.pooling.setup
        return None if setup is None else setup.task

    @property
    def kind(self) -> str:
        """For the log: what the model is served for, or how its text is parsed."""
        setup = self.engine_config.pooling.setup
        return str(self.parsers) if setup is None else f"pooling: {', '.join(setup.tasks)}"

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run slow work off the event loop, where it would stall every stream of this process."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def in_thread_if(self, long: bool, function: Callable[[], T]) -> T:
        return await self.in_thread(function) if long else function()

    @cached_property
    def max_prompt_chars(self) -> int:
        """A longer text certainly exceeds max_model_len tokens."""
        given = self.config.max_prompt_chars
        return given or max(LONG_TEXT, self.engine.max_model_len * self.tokenizer.longest_token)

    def check_chars(self, count: int, param: str) -> None:
        if count <= LONG_TEXT and self.config.max_prompt_chars is None:
            return
        if count > self.max_prompt_chars:
            message = f"{param} has {count} characters; at most {self.max_prompt_chars} are tokenized"
            raise bad_request(f"{message} (--max-prompt-chars)", param, "context_length_exceeded")

    def cache_salt(self, scope: Scope, given: str | None) -> str | None:
        """Requests of equal salts share cached prefixes: the request's own, plus its key's if keys are isolated."""
        key: bytes | None = scope.get("quire.key")
        if not self.isolate_by_key or key is None:
            return given
        return hashlib.sha256(key + (given or "").encode()).hexdigest()

    def check_model(self, name: str | None) -> str:
        """The model name for the response. A request without one gets the default."""
        if name and (name in self.model_names or self.adapters.get(name) is not None):
            return name
        if not name or self.config.skip_model_name_validation:
            return self.model_names[0]
        raise self._no_such_model(name)

    def adapter(self, model: str) -> LoRARequest | None:
        """That of a model that `check_model` has returned. If it was unloaded since, there is no such model."""
        found = None if model in self.model_names else self.adapters.get(model)
        if found is None and model not in self.model_names:
            raise self._no_such_model(model)
        return found

    def _no_such_model(self, name: str) -> ApiError:
        message = f"the model {shown(name)} does not exist; this server has {', '.join(self.shown_names)}"
        return ApiError(404, message, param="model", code="model_not_found")

    @property
    def shown_names(self) -> tuple[str, ...]:
        """The model's names, and those of some adapters."""
        return (*self.model_names, *(lora.lora_name for lora in self.adapters.all[:MAX_SHOWN]))

    def admit(self, num_sequences: int = 1) -> None:
        """Refuse requests beyond the queue limit. The engine's count of waiting requests dates from its last step, so
        requests accepted since are counted too."""
        if self.draining:
            raise overloaded("the server is shutting down", 5)
        most = self.engine_config.scheduler.max_num_queued_reqs
        if most is not None:
            if num_sequences > most:
                what = f"prompts times n are {num_sequences} sequences; at most {most} are allowed"
                raise bad_request(f"{what} (--max-num-queued-reqs)", "n", "too_many_sequences")
            self.report_load()
            if self.peers.num_unfinished + num_sequences > most:
                raise self._rejected(
                    f"{self.peers.num_unfinished} requests are in progress (--max-num-queued-reqs {most})"
                )
        limit = self.config.max_waiting_requests
        if limit is None:
            return
        slots = self.engine.max_num_seqs
        if num_sequences > slots + limit:
            allowed = f"{slots} can run and {limit} may wait (--max-num-seqs, --max-waiting-requests)"
            raise bad_request(f"prompts times n are {num_sequences} sequences; {allowed}", "n", "too_many_sequences")
        self.report_load()
        unfinished = self.peers.num_unfinished
        waiting = max(self.engine.stats.num_waiting, unfinished - slots)
        free = max(0, slots - unfinished)
        if unfinished > 0 and waiting + max(0, num_sequences - free) > limit:
            raise self._rejected(f"{waiting} requests are waiting already (--max-waiting-requests {limit})")

    async def admit_sequences(
        self, count: int, scope: Scope, limit: int, what: str = "prompts times n", param: str = "n"
    ) -> None:
        """Enforce limits on the number of sequences of a request, before anything is tokenized."""
        if count > limit:
            flag = "--max-sequences" if param == "n" else "--max-inputs"
            message = f"{what} are {count} sequences; at most {limit} are allowed ({flag})"
            raise bad_request(message, param, "too_many_sequences")
        if count > 1 and "quire.acquire" in scope:
            await scope["quire.acquire"](count - 1)
        self.admit(count)

    def request_id(self, given: str | None, scope: Scope) -> str | None:
        """The client's, from the body or the header."""
        if given is None:
            return scope.get("quire.client_request_id")
        if not CLIENT_REQUEST_ID.fullmatch(given):
            raise bad_request("request_id must be 1 to 128 visible ASCII characters", "request_id")
        return given

    def admit_tokens(self, job: Job, prompts: Sequence[ParsedPrompt]) -> None:
        """Refuse prompts beyond the limit of tokens that wait. One that nothing waits for is never refused."""
        limit = self.engine_config.scheduler.max_num_queued_tokens
        if limit is None:
            return
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        waiting = sum(other.queued_tokens for other in self.jobs.values())
        if waiting and waiting + num_tokens > limit:
            raise self._rejected(f"prompts of {waiting} tokens are waiting already (--max-num-queued-tokens {limit})")
        job.queued_tokens = num_tokens

    def _rejected(self, message: str) -> ApiError:
        self.http_metrics.rejections += 1
        return overloaded(message, 1)

    @contextmanager
    def job(self, prefix: str, wanted: str | None, num_prompts: int, num_sequences: int) -> Iterator[Job]:
        """Register a job under the client's request id, or a derived one if that is in use."""
        id = f"{prefix}{wanted or uuid.uuid4().hex}"
        if id in self.jobs:
            id = f"{id}-{uuid.uuid4().hex[:8]}"
        job = self.jobs[id] = Job(id, num_prompts)
        self._num_sequences += num_sequences
        self.report_load()
        try:
            yield job
        finally:
            del self.jobs[id]
            self._num_sequences -= num_sequences
            self.report_load()

    def report_load(self) -> None:
        self.peers.report(len(self.jobs), max(self.engine.get_num_unfinished_sequences(), self._num_sequences))

    def own_metrics(self) -> list[Metric]:
        """This process's metrics."""
        return [*map(self._as_served, self.engine.get_metrics()), *self.http_metrics.snapshot()]

    def _as_served(self, metric: Metric) -> Metric:
        """Labelled with the name that clients use."""
        return replace(metric, labels={**metric.labels, "model_name": self.model_names[0]})

    async def abort(self, request_ids: list[str]) -> list[str]:
        """Abort this process's requests among `request_ids`; returns the ids found."""
        known = [self.jobs[id] for id in request_ids if id in self.jobs]
        for job in known:
            job.aborted_by_admin = True
        await self.engine.abort([engine_id for job in known for engine_id in (*job.engine_ids(), *job.beams)])
        return [job.id for job in known]

    def abort_all(self, engine_died: bool = False) -> None:
        """At shutdown: every open request ends with an error response."""
        for job in self.jobs.values():
            job.engine_died = engine_died
            job.aborted.set()
