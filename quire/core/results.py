"""A plan's results: whose they are, and how they become the core's outputs."""

from dataclasses import dataclass

import msgspec
import numpy as np

from quire.messages.requests import EngineCoreOutputs, ErrorKind, FinishReason, Logprobs, RequestError

NO_TOKEN = RequestError(
    ErrorKind.NOT_A_NUMBER,
    "the model's scores hold NaN or allow no token; check the weights, or compute in float32 (--dtype float32)",
)


@dataclass(slots=True)
class Frame:
    """A plan in flight: who it advances, and which of them it gives a token."""

    step: int
    rows: np.ndarray
    generations: np.ndarray
    requests: np.ndarray
    samples: np.ndarray


def select_logprobs(logprobs: Logprobs | None, sampled: np.ndarray) -> Logprobs | None:
    """Logprobs by output row instead of plan row."""
    if logprobs is None:
        return None
    place = np.searchsorted(sampled, logprobs.position)
    place = np.minimum(place, max(0, len(sampled) - 1))
    kept = sampled[place] == logprobs.position if len(sampled) else np.zeros(len(place), bool)
    return Logprobs(place[kept], logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept])


def take_back_tokens(outputs: EngineCoreOutputs, places: np.ndarray) -> None:
    """Rows at `places` got no token after all: they end with an error."""
    outputs.token_ids = np.delete(outputs.token_ids, places)
    lengths = np.ones(len(outputs.index), np.int32)
    lengths[places] = 0
    np.cumsum(lengths, out=outputs.offsets[1:])
    outputs.finish[places] = FinishReason.ERROR
    outputs.errors |= dict.fromkeys(places.tolist(), NO_TOKEN)
    if outputs.logprobs is not None:
        kept = np.flatnonzero(~np.isin(outputs.logprobs.position, places))
        outputs.logprobs = Logprobs(*(column[kept] for column in msgspec.structs.astuple(outputs.logprobs)))
