"""Outputs of requests that pool, for users; fields as in vLLM."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from quire.messages.requests import ErrorKind
from quire.metrics.request import RequestMetrics

Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingOutput:
    data: np.ndarray  # float32; empty where the request did not finish with "stop"


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int | None = None
    finish_reason: str | None = None  # "stop", "abort", "error"
    metrics: RequestMetrics | None = None
    error: str | None = None  # the cause, where finish_reason is "error"
    error_kind: ErrorKind | None = None  # decides what of it clients see


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def as_embedding(output: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
    return _with(output, EmbeddingOutput(output.outputs.data.tolist()))


def as_classification(output: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
    return _with(output, ClassificationOutput(output.outputs.data.tolist()))


def _with(output: PoolingRequestOutput[PoolingOutput], outputs: Output) -> PoolingRequestOutput[Output]:
    return PoolingRequestOutput(
        output.request_id,
        outputs,
        output.prompt_token_ids,
        output.finished,
        output.num_cached_tokens,
        output.finish_reason,
        output.metrics,
        output.error,
        output.error_kind,
    )
