"""Features of prompts in the schedule: when each is encoded, and how long the encoder's output is kept.

A chunk may end anywhere, also inside a feature: the output stays from the first chunk that touches it to the last one.
It is then kept for other requests with the same content, until there is no room for new ones.
"""

from collections.abc import Iterator

import numpy as np

from quire.core.request import Request
from quire.messages.features import EMBEDS, Feature, FeatureChunk, FeaturePlan


class EncoderCache:
    """Encoder outputs on the device, by content hash, bounded in tokens; reference-counted."""

    def __init__(self, capacity: int, step_tokens: int) -> None:
        """At most `step_tokens` are encoded in a step, or a single output that is longer."""
        self.capacity = capacity
        self.step_tokens = step_tokens
        self.lengths: dict[bytes, int] = {}
        self.owners: dict[bytes, int] = {}
        self.evicted: list[bytes] = []  # which the worker still has
        self._unused: dict[bytes, None] = {}  # without owners, the oldest first
        self._new: set[bytes] = set()  # that no plan encodes yet
        self.num_tokens = 0  # of all outputs
        self._num_owned = 0  # of those with owners
        self._num_encoding = 0  # in the plan that is being made

    def acquire(self, key: bytes, length: int) -> bool:
        """Whether the output is there, or there is room and time in this step to make it."""
        if key not in self.lengths:
            too_many = self._num_encoding and self._num_encoding + length > self.step_tokens
            if too_many or self._num_owned + length > self.capacity:
                return False
            while self.num_tokens + length > self.capacity:
                self._evict(next(iter(self._unused)))
            self.lengths[key], self.owners[key] = length, 0
            self.num_tokens += length
            self._new.add(key)
            self._num_encoding += length
        self._unused.pop(key, None)
        self._num_owned += 0 if self.owners[key] else length
        self.owners[key] += 1
        return True

    def release(self, key: bytes) -> None:
        self.owners[key] -= 1
        if self.owners[key]:
            return
        self._num_owned -= self.lengths[key]
        if key in self._new:
            self._new.remove(key)
            self._num_encoding -= self.lengths[key]
            self._drop(key)
        else:
            self._unused[key] = None

    def begin_encoding(self, key: bytes) -> bool:
        """Whether the plan has to encode it: no plan before does."""
        found = key in self._new
        self._new.discard(key)
        return found

    def end_plan(self) -> list[bytes]:
        """What the worker is to free."""
        self._num_encoding = 0
        freed, self.evicted = self.evicted, []
        return freed

    def drop_unused(self) -> None:
        for key in list(self._unused):
            self._evict(key)

    def _evict(self, key: bytes) -> None:
        del self._unused[key]
        self._drop(key)
        self.evicted.append(key)

    def _drop(self, key: bytes) -> None:
        self.num_tokens -= self.lengths.pop(key)
        del self.owners[key]


class PromptFeatures:
    """The requests that have features, and what they hold of the encoder cache."""

    def __init__(self, cache_tokens: int, step_tokens: int) -> None:
        self.cache = EncoderCache(cache_tokens, step_tokens)
        self.active: dict[Request, int] = {}  # in rows, with features ahead of them: the token at which they end
        self._held: dict[Request, dict[int, bytes]] = {}  # by index of the feature

    def limit(self, request: Request, start: int, count: int) -> int:
        """How many of the tokens from `start` on can be computed, 0 if none; holds what they need."""
        for index, feature in _touched(request, start, start + count):
            held = self._held.setdefault(request, {})
            if feature.kind == EMBEDS or index in held:
                continue
            if not self.cache.acquire(feature.content_hash, feature.length):
                return max(0, feature.start - start)
            held[index] = feature.content_hash
        return count

    def limit_rows(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """`limit` for all rows of a plan: `counts` are lowered."""
        for place, request in self._places(rows):
            if counts[place]:
                counts[place] = self.limit(request, int(starts[place]), int(counts[place]))

    def enter(self, request: Request, num_computed: int) -> None:
        """The request has got a row."""
        end = request.num_prompt_tokens if _is_shifted(request) else request.core.features[-1].stop
        if num_computed < end:
            self.active[request] = end

    def leave(self, request: Request) -> None:
        """The request has left its row, or does not get one."""
        self.active.pop(request, None)
        for key in self._held.pop(request, {}).values():
            self.cache.release(key)

    def plan(self, rows: np.ndarray, counts: np.ndarray, computed: np.ndarray) -> FeaturePlan | None:
        """The part of a plan after which `computed` tokens are computed, `counts` by itself. What no later token needs
        is released."""
        chunks: list[FeatureChunk] = []
        encode: list[tuple[int, int]] = []
        for place, request in self._places(rows):
            stop = int(computed[place])
            start = stop - int(counts[place])
            touched = list(_touched(request, start, stop))
            if touched or _is_shifted(request):
                chunks.append(FeatureChunk(place, request.row, start, stop))
            encode += [
                (request.row, index)
                for index, feature in touched
                if feature.kind != EMBEDS and self.cache.begin_encoding(feature.content_hash)
            ]
            if stop >= self.active[request]:
                self.leave(request)
            else:
                self._release_before(request, stop)
        freed = self.cache.end_plan()
        return FeaturePlan(chunks, encode, freed) if chunks or freed else None

    def _places(self, rows: np.ndarray) -> list[tuple[int, Request]]:
        """Where in a plan the active requests are, in its order."""
        rows_of = {request.row: request for request in self.active}
        return [(place, rows_of[row]) for place, row in enumerate(rows.tolist()) if row in rows_of]

    def _release_before(self, request: Request, num_computed: int) -> None:
        held = self._held.get(request, {})
        for index in [i for i in held if request.core.features[i].stop <= num_computed]:
            self.cache.release(held.pop(index))


def _touched(request: Request, start: int, stop: int) -> Iterator[tuple[int, Feature]]:
    """Features with any of the tokens [start, stop), in their order, by index."""
    for index, feature in enumerate(request.core.features):
        if feature.start < stop and start < feature.stop:
            yield index, feature


def _is_shifted(request: Request) -> bool:
    """Whether positions of its prompt are not those of text: all of the prompt's tokens need them then."""
    return any(feature.positions is not None for feature in request.core.features)
