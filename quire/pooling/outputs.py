"""Outputs of requests that pool, for users; fields as in vLLM."""

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from quire.messages.requests import ErrorKind
from quire.metrics.request import RequestMetrics

Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingOutput:
    data: np.ndarray  # float32; empty where the request did not finish with "stop"


@dataclass(slots=True, repr=False)
class EmbeddingOutput:
    embedding: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> "EmbeddingOutput":
        return EmbeddingOutput(_one_vector(pooling_output, "an embedding").tolist())

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> "ClassificationOutput":
        return ClassificationOutput(_one_vector(pooling_output, "classes").tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float

    @staticmethod
    def from_base(pooling_output: PoolingOutput) -> "ScoringOutput":
        if pooling_output.data.size != 1:
            raise ValueError(f"a score is one number; the output's shape is {list(pooling_output.data.shape)}")
        return ScoringOutput(float(pooling_output.data.reshape(-1)[0]))


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    finished: bool = True
    finish_reason: str | None = None  # "stop", "abort", "error"
    metrics: RequestMetrics | None = None
    error: str | None = None  # the cause, where finish_reason is "error"
    error_kind: ErrorKind | None = None  # decides what of it clients see


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    __slots__ = ()

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> "EmbeddingRequestOutput":
        return EmbeddingRequestOutput(*_with(request_output, EmbeddingOutput.from_base(request_output.outputs)))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    __slots__ = ()

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> "ClassificationRequestOutput":
        return ClassificationRequestOutput(
            *_with(request_output, ClassificationOutput.from_base(request_output.outputs))
        )


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    __slots__ = ()

    @staticmethod
    def from_base(request_output: PoolingRequestOutput[PoolingOutput]) -> "ScoringRequestOutput":
        """Not a number where the request failed."""
        failed = request_output.finish_reason not in (None, "stop")
        score = ScoringOutput(math.nan) if failed else ScoringOutput.from_base(request_output.outputs)
        return ScoringRequestOutput(*_with(request_output, score))


def _one_vector(output: PoolingOutput, what: str) -> np.ndarray:
    if output.data.ndim != 1:
        raise ValueError(f"{what}: one vector of a prompt; the output has shape {list(output.data.shape)}")
    return output.data


def _with(output: PoolingRequestOutput[PoolingOutput], outputs: Output) -> tuple[Any, ...]:
    """The fields of an output, with what it was made into."""
    result = (output.prompt_token_ids, output.num_cached_tokens, output.finished, output.finish_reason, output.metrics)
    return (output.request_id, outputs, *result, output.error, output.error_kind)
