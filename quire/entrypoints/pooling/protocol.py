"""The request bodies: OpenAI's and Cohere's fields and vLLM's additions. Null means that a field was not given.

Fields under "no effect" are accepted because clients send them.
"""

from typing import Any

import msgspec

from quire.entrypoints.openai.protocol import NOTHING, Ignored, Int

Texts = str | list[str | Int | list[Int | dict[str, Any]] | dict[str, Any]]
ScoreInput = str | dict[str, Any]


def _nothing() -> msgspec.Raw:
    return NOTHING


class PooledRequest(msgspec.Struct, kw_only=True):
    """What every request that pools has."""

    model: str | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    use_activation: bool | None = None

    # No effect
    user: str | None = None
    mm_processor_kwargs: Ignored = msgspec.field(default_factory=_nothing)


class InputRequest(PooledRequest, kw_only=True):
    """Texts, token ids, or conversations: one, or a list."""

    input: Texts | None = None
    messages: list[dict[str, Any] | list[dict[str, Any]]] | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None  # of the model's prompts, put before texts

    # Of conversations
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # No effect
    media_io_kwargs: Ignored = msgspec.field(default_factory=_nothing)


class ClassifyRequest(InputRequest, kw_only=True):
    pass


class EmbeddingRequest(InputRequest, kw_only=True):
    dimensions: Int | None = None
    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    normalize: bool | None = None  # a former name of use_activation


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: str | None = None


class ScoringRequest(PooledRequest, kw_only=True):
    max_tokens_per_query: Int | None = None
    max_tokens_per_doc: Int | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(ScoringRequest, kw_only=True):
    """Pairs under one of these pairs of names."""

    queries: ScoreInput | list[ScoreInput] | None = None
    documents: ScoreInput | list[ScoreInput] | None = None
    items: ScoreInput | list[ScoreInput] | None = None
    text_1: ScoreInput | list[ScoreInput] | None = None
    text_2: ScoreInput | list[ScoreInput] | None = None
    data_1: ScoreInput | list[ScoreInput] | None = None
    data_2: ScoreInput | list[ScoreInput] | None = None


class RerankRequest(ScoringRequest, kw_only=True):
    query: ScoreInput
    documents: ScoreInput | list[ScoreInput]
    top_n: Int | None = None
    return_documents: bool | None = None  # Jina's

    # No effect
    return_embeddings: bool | None = None
    rank_fields: Ignored = msgspec.field(default_factory=_nothing)
    max_chunks_per_doc: Int | None = None


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """Cohere's /v2/embed."""

    model: str | None = None
    input_type: str | None = None
    texts: list[str] | None = None
    images: list[Any] | None = None
    inputs: list[dict[str, Any]] | None = None
    output_dimension: Int | None = None
    embedding_types: list[str] | None = None
    truncate: str | None = None
    max_tokens: Int | None = None
    priority: Int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
