"""Requests from front end to core, and outputs back. Outputs are columns, so a step of 256 requests is a few arrays."""

import copy
import enum
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from quire.messages.features import Feature
from quire.messages.kv_transfer import TierStats
from quire.messages.lora import AdapterStats, LoRARequest
from quire.messages.pooling_params import PoolingParams
from quire.messages.sampling_params import RequestOutputKind, SamplingParams
from quire.messages.speculation import DraftStats

MAX_ERROR_CHARACTERS = 4096


class FinishReason(enum.IntEnum):
    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    REPETITION = 5

    def __str__(self) -> str:
        return self.name.lower()


class ErrorKind(enum.StrEnum):
    """The kind of error that ended a request: it decides what the client sees."""

    INVALID = "invalid_request"  # the message is shown to the client
    BUSY = "busy"  # shown too; the client may retry
    OUT_OF_MEMORY = "out_of_memory"
    NOT_A_NUMBER = "not_a_number"  # in the logits
    INTERNAL = "internal"


class RequestError(msgspec.Struct, frozen=True):
    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed outside of a step."""

    request_id: str
    index: int
    error: RequestError


def invalid(message: str) -> RequestError:
    return RequestError(ErrorKind.INVALID, sendable(message))


def failure_of(error: BaseException) -> RequestError:
    """The error of a request that failed through no fault of its own."""
    message = f"{type(error).__name__}: {error}"
    out_of_memory = isinstance(error, MemoryError) or "out of memory" in message.lower()
    return RequestError(ErrorKind.OUT_OF_MEMORY if out_of_memory else ErrorKind.INTERNAL, sendable(message))


def sendable(text: str) -> str:
    """Truncated, and without lone surrogates, which cannot be encoded."""
    return text[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode()


class ContentKey(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a prompt stand for content that their ids do not tell, an image say: `key` names it, and
    the KV-cache blocks with any of those tokens are found by it too."""

    start: int
    stop: int
    key: bytes


# A request that pools is run like one that generates one token. Where a step draws for its row, that is discarded.
NO_SAMPLING = SamplingParams(
    temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


class EngineCoreRequest(msgspec.Struct):
    """A tokenized, validated request for `params.n` completions, or one of its sequences; or for the prompt's pooled
    vector. `index` is the front end's number for it, used in outputs; a request's sequences have consecutive ones."""

    request_id: str
    index: int
    prompt_token_ids: np.ndarray  # int32
    params: SamplingParams | PoolingParams
    eos_token_ids: tuple[int, ...]
    seed: int
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    lora: LoRARequest | None = None
    output_token_ids: np.ndarray | None = None  # int32: generated elsewhere, by a request that goes on here
    content_keys: tuple[ContentKey, ...] = ()
    features: tuple[Feature, ...] = ()  # in the order of their tokens
    fork_of: str | None = None  # first sibling of `n`, whose prompt blocks this one shares

    @property
    def lora_id(self) -> int:
        """Of its adapter; 0: none."""
        return 0 if self.lora is None else self.lora.lora_int_id

    @property
    def sampling(self) -> SamplingParams:
        return self.params if isinstance(self.params, SamplingParams) else NO_SAMPLING

    @property
    def pooling(self) -> PoolingParams | None:
        return self.params if isinstance(self.params, PoolingParams) else None

    def sequences(self) -> Iterator["EngineCoreRequest"]:
        """One per completion: the first computes the prompt, the others fork from it. Prompt and parameters are sent
        once and shared."""
        yield self
        forked = self.sampling
        if forked.prompt_logprobs is not None or forked.prompt_logprob_token_ids is not None:
            forked = forked.replace_unchecked(prompt_logprobs=None, prompt_logprob_token_ids=None)
        for i in range(1, forked.n):
            sibling = copy.copy(self)
            sibling.request_id, sibling.index = sequence_id(self.request_id, i), self.index + i
            sibling.seed, sibling.params, sibling.fork_of = child_seed(self.seed, i), forked, self.request_id
            yield sibling


def sequence_id(request_id: str, number: int) -> str:
    """The core's id of a request's n-th completion."""
    return f"{request_id}\0{number}" if number else request_id


def child_seed(seed: int, child: int) -> int:
    """hash(seed, i): well-spread seeds for the completions of one request (the finaliser of SplitMix64)."""
    x = (seed + child * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) >> 1


class Logprobs(msgspec.Struct):
    """Tokens whose logprobs were requested: the sampled token first, then the top ones, best first."""

    position: (
        np.ndarray
    )  # [m] which token: in a runner's output of all places of its token_ids, in the core's of its token_ids
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
    candidates: bool = False  # these are of the tokens that the request named, [m, k] without ranks


RESIDENCY_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
    *(600.0, 1200.0, 1800.0),
)
STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class SchedulerStats(msgspec.Struct):
    """Engine-wide statistics, the same for all front ends; the newest are valid."""

    time: float = 0.0  # monotonic clock, shared by all processes of a machine
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up
    prefix_cache_hits: int = 0  # tokens found
    external_cache_queries: int = 0  # tokens that connectors were asked for
    external_cache_hits: int = 0  # tokens that they load
    num_deferred: int = 0  # of those waiting: not for room, but for a grammar, KV blocks, a fork or frames
    step_tokens: tuple[int, ...] = (0,) * (len(STEP_TOKEN_BOUNDS) + 1)  # steps per bucket; the last is unbounded
    step_tokens_sum: int = 0
    # Seconds that blocks lived, were idle before eviction, and between two hits, if measured: each the blocks per
    # bucket of RESIDENCY_SECONDS, the last unbounded, and the sum.
    residency: tuple[tuple[float, ...], ...] = ()
    drafts: DraftStats | None = None  # None: there is no proposer
    adapters: AdapterStats | None = None  # None: there is no room for any
    tiers: tuple[TierStats, ...] = ()  # by KV connector that keeps any
    sleep_level: int = 0  # 0: awake; 1: the weights are on the host; 2: discarded


class EngineCoreOutputs(msgspec.Struct):
    """One step's results, one row per request that got tokens or finished."""

    index: np.ndarray  # [n] int64
    token_ids: np.ndarray  # [m] int32, the rows' new tokens, concatenated
    offsets: np.ndarray  # [n + 1] int32
    finish: np.ndarray  # [n] int8, FinishReason
    num_cached: np.ndarray  # [n] int32, prompt tokens that came from the prefix cache
    stop_reasons: dict[int, int] = {}  # row -> the stop token that ended it, if not an EOS
    errors: dict[int, RequestError] = {}  # row -> cause, where finish is ERROR
    scheduled: dict[int, float] = {}  # row -> when it was first scheduled (monotonic), where this is its first token
    logprobs: Logprobs | None = None
    prompt_logprobs: list[PromptLogprobs] = []
    pooled: dict[int, np.ndarray] = {}  # row -> float32, of requests that pool, which finish so
    preempted: list[int] = []  # indices of requests, once for each preemption since the last outputs
    stats: SchedulerStats | None = None
    num_drafts: np.ndarray | None = None  # [n] int32, verified in the step; None: none were

    @classmethod
    def ended(cls, index: list[int], reason: FinishReason, error: RequestError | None = None) -> "EngineCoreOutputs":
        """Requests that finish without a new token."""
        n = len(index)
        return cls(
            index=np.asarray(index, np.int64),
            token_ids=np.empty(0, np.int32),
            offsets=np.zeros(n + 1, np.int32),
            finish=np.full(n, reason, np.int8),
            num_cached=np.zeros(n, np.int32),
            errors=dict.fromkeys(range(n), error) if error is not None else {},
        )

    def select(self, low: int, high: int) -> "EngineCoreOutputs":
        """The part about requests with low <= index < high."""
        rows = np.flatnonzero((self.index >= low) & (self.index < high))
        new_row = {int(row): i for i, row in enumerate(rows)}
        lengths = np.diff(self.offsets)
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths[rows], out=offsets[1:])
        owner = np.repeat(np.arange(len(self.index)), lengths)
        logprobs = self.logprobs
        if logprobs is not None:
            kept = np.flatnonzero(np.isin(owner, rows))
            mine = np.flatnonzero(np.isin(logprobs.position, kept))
            logprobs = Logprobs(
                np.searchsorted(kept, logprobs.position[mine]),
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
            stop_reasons={new_row[row]: reason for row, reason in self.stop_reasons.items() if row in new_row},
            errors={new_row[row]: error for row, error in self.errors.items() if row in new_row},
            scheduled={new_row[row]: at for row, at in self.scheduled.items() if row in new_row},
            logprobs=logprobs,
            prompt_logprobs=[part for part in self.prompt_logprobs if low <= part.owner < high],
            pooled={new_row[row]: data for row, data in self.pooled.items() if row in new_row},
            preempted=[index for index in self.preempted if low <= index < high],
            stats=self.stats,
            num_drafts=None if self.num_drafts is None else self.num_drafts[rows],
        )
