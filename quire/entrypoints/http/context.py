"""What all endpoints share: the engine, the names it is served under, and what is under way."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.types import Scope

from quire import __version__
from quire.config import EngineConfig
from quire.config.server import ServerConfig
from quire.engine.async_engine import AsyncEngine
from quire.engine.metrics import Metric
from quire.entrypoints.chat_renderer import ChatRenderer
from quire.entrypoints.http.body import BodyReader
from quire.entrypoints.http.errors import ApiError, bad_request, overloaded
from quire.entrypoints.http.metrics import HttpMetrics
from quire.entrypoints.http.peers import Peers
from quire.entrypoints.tracing import Tracer
from quire.messages.checks import shown
from quire.tokenizer.tokenizer import Tokenizer

LONG_TEXT = 20_000  # characters; tokenizing them would hold up every other stream
PROMPT_THREADS = 2  # that tokenize and render long prompts

T = TypeVar("T")


@dataclass
class Job:
    """A request that is being generated."""

    id: str
    num_prompts: int
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    beams: set[str] = field(default_factory=set)  # a beam search's requests in the engine at this moment
    ended: bool = False  # by an administrator
    engine_died: bool = False  # that is why it was aborted

    def engine_ids(self) -> list[str]:
        """One for each prompt. No client can choose an id with a space, so these are no other request's."""
        return [self.id] if self.num_prompts == 1 else [f"{self.id} {i}" for i in range(self.num_prompts)]


class ServerContext:
    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        engine_config: EngineConfig,
        peers: Peers | None = None,
        num_keys: int = 0,
    ) -> None:
        self.engine = engine
        self.peers = peers or Peers()
        self.config = config
        self.engine_config = engine_config
        self.created = int(time.time())
        self.model_names = config.served_model_name or (engine.model_name,)
        self.bodies = BodyReader(config, engine.max_model_len)
        self.http_metrics = HttpMetrics()
        endpoint = config.otlp_traces_endpoint
        self.tracer = Tracer(endpoint, self.model_names[0]) if endpoint is not None else None
        self.jobs: dict[str, Job] = {}
        self._num_sequences = 0  # of all jobs
        self.draining = False
        self.has_keys = num_keys > 0
        self.isolated = (config.prefix_cache_isolation or ("key" if num_keys > 1 else "none")) == "key"
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="quire-prompt")
        facts = (__version__, engine.model_name, engine_config.model.dtype, engine_config.device.device)
        self.fingerprint = "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]

    @property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise bad_request("the server has no tokenizer (--skip-tokenizer-init); send prompts as token ids")
        return self.engine.tokenizer

    @cached_property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, self.engine_config.model.chat_template)

    async def off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """What takes long would hold up every stream of this process."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def off_loop_if(self, long: bool, function: Callable[[], T]) -> T:
        return await self.off_loop(function) if long else function()

    @cached_property
    def max_prompt_chars(self) -> int:
        """A longer text has more tokens than the model takes."""
        given = self.config.max_prompt_chars
        return given or max(LONG_TEXT, self.engine.max_model_len * self.tokenizer.longest_token)

    def check_chars(self, count: int, param: str) -> None:
        if count <= LONG_TEXT and self.config.max_prompt_chars is None:
            return
        if count > self.max_prompt_chars:
            message = f"{param} has {count} characters; at most {self.max_prompt_chars} are tokenized"
            raise bad_request(f"{message} (--max-prompt-chars)", param, "context_length_exceeded")

    def cache_salt(self, scope: Scope, given: str | None) -> str | None:
        """Prefixes are shared among requests of equal salts: a client's own, and its key's where keys are isolated."""
        key: bytes | None = scope.get("quire.key")
        if not self.isolated or key is None:
            return given
        return hashlib.sha256(key + (given or "").encode()).hexdigest()

    def check_model(self, name: str | None) -> str:
        """The name to answer with. A request without a model means the one there is."""
        if name is None or name == "":
            return self.model_names[0]
        if name not in self.model_names:
            message = f"the model {shown(name)} does not exist; this server has {', '.join(self.model_names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name

    def admit(self, num_sequences: int = 1) -> None:
        """Refuse work that would only wait. The engine's own count of waiting requests is as old as its last step, so
        what has come in since counts too."""
        if self.draining:
            raise overloaded("the server is shutting down", 5)
        limit = self.config.max_waiting_requests
        if limit is None:
            return
        places = self.engine.max_num_seqs
        if num_sequences > places + limit:
            most = f"{places} can run and {limit} may wait (--max-num-seqs, --max-waiting-requests)"
            raise bad_request(f"prompts times n are {num_sequences} sequences; {most}", "n", "too_many_sequences")
        self.note_load()
        unfinished = self.peers.num_unfinished
        waiting = max(self.engine.stats.num_waiting, unfinished - places)
        free = max(0, places - unfinished)
        if unfinished > 0 and waiting + max(0, num_sequences - free) > limit:
            raise overloaded(f"{waiting} requests are waiting already (--max-waiting-requests {limit})", 1)

    @contextmanager
    def job(self, prefix: str, wanted: str | None, num_prompts: int, num_sequences: int) -> Iterator[Job]:
        """A new job under the client's own request id, unless that is in use."""
        id = f"{prefix}{wanted or uuid.uuid4().hex}"
        if id in self.jobs:
            id = f"{id}-{uuid.uuid4().hex[:8]}"
        job = self.jobs[id] = Job(id, num_prompts)
        self._num_sequences += num_sequences
        self.note_load()
        try:
            yield job
        finally:
            del self.jobs[id]
            self._num_sequences -= num_sequences
            self.note_load()

    def note_load(self) -> None:
        self.peers.note(len(self.jobs), max(self.engine.get_num_unfinished_sequences(), self._num_sequences))

    def own_metrics(self) -> list[Metric]:
        """Those of this process."""
        return [*self.engine.get_metrics(), *self.http_metrics.snapshot()]

    async def abort(self, request_ids: list[str]) -> list[str]:
        """End requests of this process; those that it has."""
        known = [self.jobs[id] for id in request_ids if id in self.jobs]
        for job in known:
            job.ended = True
        await self.engine.abort([engine_id for job in known for engine_id in (*job.engine_ids(), *job.beams)])
        return [job.id for job in known]

    def abort_all(self, engine_died: bool = False) -> None:
        """At shutdown: every open request is ended with an error that its client sees."""
        for job in self.jobs.values():
            job.engine_died = engine_died
            job.aborted.set()
