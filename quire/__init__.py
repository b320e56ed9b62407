"""Quire: LLM inference and serving. `from quire import LLM, SamplingParams`."""

import sys
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
    "PoolingOutput",
    "EmbeddingRequestOutput",
    "EmbeddingOutput",
    "ClassificationRequestOutput",
    "ClassificationOutput",
    "ScoringRequestOutput",
    "ScoringOutput",
    "TextPrompt",
    "TokensPrompt",
    "PromptType",
    "LLMEngine",
    "AsyncLLMEngine",
    "EngineArgs",
    "AsyncEngineArgs",
    "ModelRegistry",
    "__version__",
]

if TYPE_CHECKING:
    from quire.config.engine_args import AsyncEngineArgs, EngineArgs
    from quire.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.outputs import CompletionOutput, RequestOutput
    from quire.engine.prompts import PromptType, TextPrompt, TokensPrompt
    from quire.entrypoints.llm import LLM
    from quire.messages.features import Feature
    from quire.messages.pooling_params import PoolingParams
    from quire.messages.sampling_params import SamplingParams
    from quire.models.registry import ModelRegistry
    from quire.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )

_HOMES = {
    "LLM": "quire.entrypoints.llm",
    "SamplingParams": "quire.messages.sampling_params",
    "Feature": "quire.messages.features",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "PoolingParams": "quire.messages.pooling_params",
    "PoolingRequestOutput": "quire.pooling.outputs",
    "PoolingOutput": "quire.pooling.outputs",
    "EmbeddingRequestOutput": "quire.pooling.outputs",
    "EmbeddingOutput": "quire.pooling.outputs",
    "ClassificationRequestOutput": "quire.pooling.outputs",
    "ClassificationOutput": "quire.pooling.outputs",
    "ScoringRequestOutput": "quire.pooling.outputs",
    "ScoringOutput": "quire.pooling.outputs",
    "TextPrompt": "quire.engine.prompts",
    "TokensPrompt": "quire.engine.prompts",
    "PromptType": "quire.engine.prompts",
    "LLMEngine": "quire.engine.llm_engine",
    "AsyncLLMEngine": "quire.engine.async_llm_engine",
    "EngineArgs": "quire.config.engine_args",
    "AsyncEngineArgs": "quire.config.engine_args",
    "ModelRegistry": "quire.models.registry",
}


def __getattr__(name: str) -> Any:
    # Imported on first use so that `quire --help` pays for none of it.
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from quire.vllm_paths import UNAVAILABLE, to_come

        if name in UNAVAILABLE[""]:
            raise AttributeError(to_come("", name))
    raise AttributeError(f"module 'quire' has no attribute {name!r}")


class _VllmPaths:
    """Last on sys.meta_path: asked only for modules that do not exist, which may be import paths of vLLM's."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("quire."):
            return None
        from quire.vllm_paths import spec_of

        return spec_of(name)


sys.meta_path.append(_VllmPaths)
