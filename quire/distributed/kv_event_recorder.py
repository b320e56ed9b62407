"""Collects what enters and leaves the prefix cache, for those who follow it from outside."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.messages.kv_cache import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    LatentSpec,
    SlidingWindowSpec,
    StateSpec,
)
from quire.messages.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    published_hash,
)
from quire.messages.requests import EngineCoreRequest

BlockKey = tuple[bytes, int]  # (hash of the block and all before it, KV-cache group)

KINDS: dict[type[KVCacheSpec], str] = {
    FullAttentionSpec: "full_attention",
    SlidingWindowSpec: "sliding_window",
    LatentSpec: "mla_attention",
    StateSpec: "mamba",
}


class KVEventRecorder:
    """Events of a step are published together, in their order."""

    def __init__(self, groups: Sequence[KVCacheGroup], publish: Callable[[KVEventBatch], None]) -> None:
        self._specs = [group.spec for group in groups]
        self._publish = publish
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def stored(
        self, request: EngineCoreRequest, key: BlockKey, parent: bytes | None, token_ids: np.ndarray, start: int
    ) -> None:
        """The block of these tokens, the first of which is the request's token `start`, can be found from now on."""
        (block_hash, group), last = key, self._events[-1] if self._events else None
        name, before = published_hash(block_hash), None if parent is None else published_hash(parent)
        lora, spec, extra = request.lora, self._specs[group], _extra_keys(request, start, len(token_ids))
        lora_id = None if lora is None else lora.lora_int_id
        if (
            isinstance(last, BlockStored)
            and last.group_idx == group
            and last.block_hashes[-1] == before
            and last.lora_id == lora_id
            and (last.extra_keys is None) == (extra is None)
        ):
            last.block_hashes.append(name)
            last.token_ids.extend(token_ids.tolist())
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            return
        self._events.append(
            BlockStored(
                block_hashes=[name],
                parent_block_hash=before,
                token_ids=token_ids.tolist(),
                block_size=spec.block_size,
                lora_id=lora_id,
                medium=MEDIUM_GPU,
                lora_name=None if lora is None else lora.lora_name,
                extra_keys=None if extra is None else [extra],
                group_idx=group,
                kv_cache_spec_kind=KINDS.get(type(spec), "unknown"),
                kv_cache_spec_sliding_window=spec.window if isinstance(spec, SlidingWindowSpec) else None,
            )
        )

    def removed(self, block_id: int, key: BlockKey) -> None:
        self._events.append(BlockRemoved([published_hash(key[0])], MEDIUM_GPU, key[1]))

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())
        self.flush()  # an idle engine makes no steps

    def flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._publish(KVEventBatch(time.time(), events))


def _extra_keys(request: EngineCoreRequest, start: int, count: int) -> tuple[Any, ...] | None:
    """What beside its tokens is in the hash of the block at token `start`, in vLLM's order."""
    keys: list[Any] = [] if request.lora is None else [request.lora.lora_name]
    keys += [
        (content.key.hex(), content.start - start)
        for content in request.content_keys
        if content.start < start + count and start < content.stop
    ]
    if request.cache_salt is not None and start == 0:
        keys.append(request.cache_salt)
    return tuple(keys) if keys else None
