"""Parts of a prompt that are more than token ids: embeddings, and inputs of a model's encoders."""

from collections.abc import Sequence

import msgspec
import numpy as np

EMBEDS = "embeds"


class Feature(msgspec.Struct, frozen=True, eq=False):
    """Tokens [start, start + length) of a prompt stand for `data`: embeddings [length, hidden] (kind "embeds"), or an
    input of the model's encoder of that kind, whose output has `length` rows. Their ids are placeholders."""

    kind: str
    start: int
    length: int
    data: np.ndarray
    content_hash: bytes = b""  # of what `data` is; made of the data itself if left out
    # [3, length], for a model whose rotary embedding has three axes: where its tokens are, counted from the first one's
    # position. The token after it comes one after the largest. None: one after the other, as text is.
    positions: np.ndarray | None = None

    @property
    def stop(self) -> int:
        return self.start + self.length


class FeatureSupport(msgspec.Struct, frozen=True):
    """What an engine's prompts may hold beside token ids."""

    hidden_size: int  # of embeddings
    kinds: tuple[str, ...] = ()  # that the model has encoders for
    position_axes: int = 1  # 3: features may have positions
    max_length: int = 0  # of an encoder's output


class FeatureChunk(msgspec.Struct, frozen=True):
    """A row of a plan computes tokens [start, stop), which lie in a prompt with features."""

    place: int  # among the plan's rows
    row: int
    start: int
    stop: int


class FeaturePlan(msgspec.Struct):
    """A step's part about features: first encoder outputs are freed, then others computed, then all are read."""

    chunks: list[FeatureChunk]
    encode: list[tuple[int, int]]  # (row, index of its feature); outputs are kept by content hash
    free: list[bytes]  # content hashes


def prompt_positions(features: Sequence[Feature], num_tokens: int) -> np.ndarray:
    """[3, num_tokens]: where the tokens of a prompt are, by axis."""
    positions = np.empty((3, num_tokens), np.int64)
    done = at = 0
    for feature in features:
        if feature.positions is None:
            continue
        count = feature.start - done
        positions[:, done : feature.start] = np.arange(at, at + count)
        at += count
        positions[:, feature.start : feature.stop] = at + feature.positions
        at += int(feature.positions.max()) + 1
        done = feature.stop
    positions[:, done:] = np.arange(at, at + num_tokens - done)
    return positions
