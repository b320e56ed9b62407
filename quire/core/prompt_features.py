"""Features of prompts in the schedule: when each is encoded, and how long the encoder's output is kept.

A chunk may end anywhere, also inside a feature: the output stays from the first chunk that touches it to the last one.
It is then kept for other requests with the same content, until there is no room for new ones.
"""

from collections.abc import Iterator

import numpy as np

from quire.core.request import Request
from quire.features.encoder_cache import EncoderCache
from quire.messages.features import EMBEDS, Feature, FeatureChunk, FeaturePlan


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
