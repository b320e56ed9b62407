"""POST /v1/embeddings, /pooling and /classify."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from quire.config.pooling import CLASSIFY, EMBED
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.pooling.encoding import Encoding
from quire.entrypoints.pooling.endpoint import Answer, InputEndpoint, T, json_body
from quire.entrypoints.pooling.protocol import ClassifyRequest, EmbeddingRequest, PoolingRequest
from quire.messages.pooling_params import PoolingParams

BYTES = "application/octet-stream"


def encoding_of(request: EmbeddingRequest) -> Encoding:
    return Encoding.of(request.encoding_format, request.embed_dtype, request.endianness)


def vectors_response(request: EmbeddingRequest, answer: Answer, object: str, field: str) -> Response:
    """In the encoding that the request asks for."""
    encoding, arrays = encoding_of(request), [output.outputs.data for output in answer.outputs]
    if encoding.is_json:
        values = encoding.values(arrays)
        return json_body(answer.envelope([{"index": i, "object": object, field: v} for i, v in enumerate(values)]))
    parts = [encoding.binary(array) for array in arrays]
    if encoding.format == "bytes_only":
        return Response(b"".join(parts), media_type=BYTES)
    ends = np.cumsum([len(part) for part in parts]).tolist()
    items = [
        {
            "index": i,
            "embed_dtype": encoding.dtype,
            "endianness": encoding.endianness,
            "start": end - len(part),
            "end": end,
            "shape": list(array.shape),
        }
        for i, (part, end, array) in enumerate(zip(parts, ends, arrays, strict=True))
    ]
    metadata = {"id": answer.id, "created": answer.created, "model": answer.model, "data": items, "usage": answer.usage}
    return Response(b"".join(parts), headers={"metadata": json.dumps(metadata)}, media_type=BYTES)


class VectorEndpoint(InputEndpoint[T]):
    def sources(self, request: T) -> Sequence[Any]:
        assert isinstance(request, EmbeddingRequest)
        encoding_of(request)  # a wrong one is refused before anything runs
        return super().sources(request)


class EmbeddingsEndpoint(VectorEndpoint[EmbeddingRequest]):
    request_type = EmbeddingRequest
    id_prefix = "embd-"

    def params(self, request: EmbeddingRequest) -> PoolingParams:
        self.check_task(EMBED)
        return PoolingParams(
            task=EMBED,
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            normalize=request.normalize,
        )

    def response(self, request: EmbeddingRequest, answer: Answer) -> Response:
        return vectors_response(request, answer, "embedding", "embedding")


class PoolEndpoint(VectorEndpoint[PoolingRequest]):
    """Whatever the model gives."""

    request_type = PoolingRequest
    id_prefix = "pool-"

    def params(self, request: PoolingRequest) -> PoolingParams:
        assert self.setup is not None
        given = PoolingParams(
            task=request.task,
            dimensions=request.dimensions,
            use_activation=request.use_activation,
            normalize=request.normalize,
        )
        task = given.task or self.setup.task
        if task not in self.setup.tasks:
            raise bad_request(
                f"Unsupported task: {task!r}. This model has: {', '.join(self.setup.tasks)}", "task", "unsupported_task"
            )
        return given.replace_unchecked(task=task)

    def response(self, request: PoolingRequest, answer: Answer) -> Response:
        return vectors_response(request, answer, "pooling", "data")


class ClassifyEndpoint(InputEndpoint[ClassifyRequest]):
    request_type = ClassifyRequest
    id_prefix = "classify-"

    def params(self, request: ClassifyRequest) -> PoolingParams:
        self.check_task(CLASSIFY)
        return PoolingParams(task=CLASSIFY, use_activation=request.use_activation)

    def response(self, request: ClassifyRequest, answer: Answer) -> Response:
        assert self.setup is not None
        labels = self.setup.labels
        data = []
        for i, output in enumerate(answer.outputs):
            best = int(output.outputs.data.argmax())
            probs = output.outputs.data.tolist()
            label = labels[best] if best < len(labels) else None
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
        return json_body(answer.envelope(data))
