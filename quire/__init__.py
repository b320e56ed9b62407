"""Quire: LLM inference and serving. `from quire import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "SamplingParams",
    "Feature",
    "RequestOutput",
    "CompletionOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "EmbeddingRequestOutput",
    "ModelRegistry",
    "__version__",
]

if TYPE_CHECKING:
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.engine.pooling_outputs import EmbeddingRequestOutput, PoolingRequestOutput
    from quire.entrypoints.llm import LLM
    from quire.messages.features import Feature
    from quire.messages.pooling_params import PoolingParams
    from quire.messages.sampling_params import SamplingParams
    from quire.models.registry import ModelRegistry

_HOMES = {
    "LLM": "quire.entrypoints.llm",
    "SamplingParams": "quire.messages.sampling_params",
    "Feature": "quire.messages.features",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "PoolingParams": "quire.messages.pooling_params",
    "PoolingRequestOutput": "quire.engine.pooling_outputs",
    "EmbeddingRequestOutput": "quire.engine.pooling_outputs",
    "ModelRegistry": "quire.models.registry",
}


def __getattr__(name: str) -> Any:
    # Imported on first use so that `quire --help` pays for none of it.
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
