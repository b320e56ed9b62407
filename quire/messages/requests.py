"""Front end to core and back. Outputs are columns, so that a step of 256 requests is a few arrays."""

import enum

import msgspec
import numpy as np

from quire.messages.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct):
    """A tokenized, validated request. `index` is the front end's own number for it and names it in outputs."""

    request_id: str
    index: int
    prompt_token_ids: np.ndarray  # int32
    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    lora_id: int = 0
    fork_of: str | None = None  # first sibling of `n`, whose prompt blocks this one shares


class Logprobs(msgspec.Struct):
    """Rows that asked for logprobs: the sampled token first, then the top ones, best first."""

    position: np.ndarray  # [m] which output row
    token_ids: np.ndarray  # [m, 1 + k]
    logprobs: np.ndarray  # [m, 1 + k] float32
    ranks: np.ndarray  # [m] rank of the sampled token, 1 is the best


class PromptLogprobs(msgspec.Struct):
    """Logprobs of prompt tokens start, start + 1, ... of one request: the token itself first, then the top ones."""

    owner: int  # in a runner's output the plan row, in the core's output the request's index
    start: int
    token_ids: np.ndarray  # [m, 1 + k]
    logprobs: np.ndarray  # [m, 1 + k] float32
    ranks: np.ndarray  # [m]


STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class SchedulerStats(msgspec.Struct):
    """The engine's own numbers, the same for all its front ends; the newest are right."""

    time: float = 0.0  # of the monotonic clock, which all processes of a machine share
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)  # steps by size, up to each bound and beyond
    step_tokens_sum: int = 0


class EngineCoreOutputs(msgspec.Struct):
    """One step's news, one row per request that got tokens or ended."""

    index: np.ndarray  # [n] int64
    token_ids: np.ndarray  # [m] int32, the rows' new tokens one after the other
    offsets: np.ndarray  # [n + 1] int32
    finish: np.ndarray  # [n] int8, FinishReason
    num_cached: np.ndarray  # [n] int32, prompt tokens that came from the prefix cache
    stop_reasons: dict[int, int] = {}  # row -> the stop token that ended it, if not an EOS
    errors: dict[int, str] = {}  # row -> cause, where finish is ERROR
    scheduled: dict[int, float] = {}  # row -> when it was first scheduled (monotonic), where this is its first token
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    stats: SchedulerStats | None = None

    @classmethod
    def ended(cls, index: list[int], reason: FinishReason, cause: str | None = None) -> "EngineCoreOutputs":
        """Requests that end without a new token."""
        n = len(index)
        return cls(
            index=np.asarray(index, np.int64),
            token_ids=np.empty(0, np.int32),
            offsets=np.zeros(n + 1, np.int32),
            finish=np.full(n, reason, np.int8),
            num_cached=np.zeros(n, np.int32),
            errors=dict.fromkeys(range(n), cause) if cause else {},
        )

    def select(self, low: int, high: int) -> "EngineCoreOutputs":
        """The part about requests with low <= index < high."""
        rows = np.flatnonzero((self.index >= low) & (self.index < high))
        place = {int(row): i for i, row in enumerate(rows)}
        lengths = np.diff(self.offsets)
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths[rows], out=offsets[1:])
        owner = np.repeat(np.arange(len(self.index)), lengths)
        logprobs = self.logprobs
        if logprobs is not None:
            mine = np.flatnonzero(np.isin(logprobs.position, rows))
            logprobs = Logprobs(
                np.searchsorted(rows, logprobs.position[mine]),
                logprobs.token_ids[mine],
                logprobs.logprobs[mine],
                logprobs.ranks[mine],
            )
        return EngineCoreOutputs(
            index=self.index[rows],
            token_ids=self.token_ids[np.isin(owner, rows)],
            offsets=offsets,
            finish=self.finish[rows],
            num_cached=self.num_cached[rows],
            stop_reasons={place[row]: reason for row, reason in self.stop_reasons.items() if row in place},
            errors={place[row]: cause for row, cause in self.errors.items() if row in place},
            scheduled={place[row]: at for row, at in self.scheduled.items() if row in place},
            logprobs=logprobs,
            prompt_logprobs=[part for part in self.prompt_logprobs if low <= part.owner < high],
            stats=self.stats,
        )
