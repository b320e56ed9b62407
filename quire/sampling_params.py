"""vLLM's import path for sampling parameters."""

from quire.entrypoints.beam_search import BeamSearchParams
from quire.messages.sampling_params import (
    ReasoningTokens,
    RepetitionDetection,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
)
from quire.messages.structured import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "ReasoningTokens",
    "RepetitionDetection",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

GuidedDecodingParams = StructuredOutputsParams  # its former name
RepetitionDetectionParams = RepetitionDetection
