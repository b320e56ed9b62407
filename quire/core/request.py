"""A request's state in the scheduler."""

import enum

import msgspec
import numpy as np

from quire.core.block_pool import KVCacheBlock
from quire.messages.requests import EngineCoreRequest


class RequestState(enum.IntEnum):
    WAITING = 0
    WAITING_GRAMMAR = 1  # its grammar is being compiled, or its adapter loaded
    WAITING_REMOTE_KV = 2  # a connector is loading its KV cache
    WAITING_FORK = 3  # its first sibling has not computed the prompt yet
    RUNNING = 4
    FINISHED = 5


class Request:
    """While a request runs, its lengths and tokens live in RunningSet, by row; here is what it keeps in between."""

    __slots__ = (
        "awaits",
        "block_hashes",
        "blocks",
        "core",
        "extra_keys",
        "frames_to_discard",
        "key",
        "load_failed",
        "num_cached",
        "num_computed",
        "num_prompt_tokens",
        "prompt_planned",
        "request_id",
        "row",
        "scheduled_at",
        "stale",
        "state",
        "token_ids",
    )

    def __init__(self, core: EngineCoreRequest, key: tuple[int, int], num_groups: int) -> None:
        self.core = core
        self.request_id = core.request_id
        self.key = key  # the order of admission
        self.token_ids = np.ascontiguousarray(core.prompt_token_ids, np.int32)  # confirmed tokens while not in a row
        self.num_prompt_tokens = len(self.token_ids)
        if core.output_token_ids is not None:
            # From here on as if it had been preempted after them.
            self.token_ids = np.concatenate([self.token_ids, core.output_token_ids], dtype=np.int32)
        self.num_computed = 0  # tokens whose KV its blocks hold while not in a row
        self.num_cached = -1  # prompt tokens found in a cache when first scheduled; -1 before that
        self.state = RequestState.WAITING
        self.awaits = 0  # grammar and adapter that are not ready
        self.row = -1
        self.scheduled_at = 0.0  # first time; 0 again once its first token was returned
        self.blocks: list[list[KVCacheBlock]] = [[] for _ in range(num_groups)]
        self.block_hashes: list[bytes] = []
        self.extra_keys = b""
        self.set_adapter(b"")
        self.frames_to_discard = 0  # plans in flight from before a preemption
        self.stale = False  # what it shares, and waits to be loaded beside, is not to be used
        self.load_failed = False  # a connector promised what it could not load: none is asked again
        self.prompt_planned = False  # an earlier plan computes the whole prompt, so siblings may share it

    def set_adapter(self, content: bytes) -> None:
        """Before its blocks are looked up: they hold what its adapter computes."""
        if content or self.core.cache_salt is not None:
            self.extra_keys = msgspec.msgpack.encode([content, self.core.cache_salt])

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end it. Under a grammar an EOS comes only where that allows the end, and counts then."""
        params = self.core.sampling
        goes_on = params.ignore_eos and params.structured_outputs is None
        return [*(() if goes_on else self.core.eos_token_ids), *params.stop_token_ids]

    @property
    def needs_whole_prompt(self) -> bool:
        """Its result is made of every token of the prompt: none may come from a cache."""
        pooling = self.core.pooling
        if pooling is not None:
            return bool(pooling.skip_reading_prefix_cache)
        return not self.core.sampling.reads_prefix_cache

    @property
    def num_tokens(self) -> int:
        """Confirmed ones, while it is not in a row."""
        return len(self.token_ids)

    @property
    def has_blocks(self) -> bool:
        return any(self.blocks)

    def block_ids(self) -> list[list[int]]:
        return [[block.id for block in blocks] for blocks in self.blocks]

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.state.name}, row={self.row})"
