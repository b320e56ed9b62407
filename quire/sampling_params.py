"""vLLM's import path for sampling parameters."""

from typing import Any

from quire.messages.sampling_params import RepetitionDetection, RequestOutputKind, SamplingParams

__all__ = ["RepetitionDetection", "RequestOutputKind", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in ("GuidedDecodingParams", "StructuredOutputsParams"):
        raise ImportError(f"{name}: structured output is not available yet")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
