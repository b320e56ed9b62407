"""POST /v2/embed, as Cohere has it."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.responses import Response

from quire.config.pooling import EMBED
from quire.config.shown import shown
from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.http.errors import bad_request, not_available
from quire.entrypoints.pooling.endpoint import Answer, PoolingEndpoint, json_body
from quire.entrypoints.pooling.inputs import Truncation
from quire.entrypoints.pooling.protocol import CohereEmbedRequest
from quire.messages.pooling_params import PoolingParams

TRUNCATE = {"NONE": None, "START": "left", "END": "right"}  # the side that is cut
TYPES = ("float", "base64", "binary", "ubinary")


class CohereEmbedEndpoint(PoolingEndpoint[CohereEmbedRequest]):
    request_type = CohereEmbedRequest
    id_prefix = "embd-"
    input_field = "texts"

    def params(self, request: CohereEmbedRequest) -> PoolingParams:
        self.check_task(EMBED)
        return PoolingParams(task=EMBED, dimensions=request.output_dimension)

    def sources(self, request: CohereEmbedRequest) -> Sequence[Any]:
        if request.images is not None:
            raise not_available("images", "embeddings of images")
        if (request.texts is None) == (request.inputs is None):
            raise bad_request("give exactly one of texts and inputs", "texts")
        wrong = next((one for one in request.embedding_types or () if one not in TYPES), None)
        if wrong is not None:
            raise bad_request(f"embedding_types has {shown(wrong)}; allowed: {', '.join(TYPES)}", "embedding_types")
        if request.truncate is not None and request.truncate not in TRUNCATE:
            raise bad_request(f"truncate is {shown(request.truncate)}; allowed: {', '.join(TRUNCATE)}", "truncate")
        texts = request.texts if request.texts is not None else [_text(one) for one in request.inputs or ()]
        if not texts:
            raise bad_request("texts is an empty list; give at least one text", "texts")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise bad_request(f"max_tokens is {request.max_tokens}; it must be 1 or more", "max_tokens")
        return texts

    def prompts(self, request: CohereEmbedRequest, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        for text in sources:
            self.context.check_chars(len(text), "texts")
        side = TRUNCATE[request.truncate or "END"]
        longest = self.inputs.longest
        most = min(request.max_tokens or longest, longest)
        prefix = self._prefix(request.input_type)
        prompts = self.inputs.texts(sources, cut=Truncation(None if side is None else most, side), prefix=prefix)
        over = next((len(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > most), None)
        if over is not None:
            raise bad_request(f"a text has {over} tokens; at most {most} are allowed with truncate NONE", "texts")
        if any(not prompt.token_ids for prompt in prompts):
            raise bad_request("a text is empty; it must have at least one token", "texts")
        return prompts

    def _prefix(self, input_type: str | None) -> str:
        """The model's prompt of this name."""
        prompts = self.setup.prompt_by_name if self.setup is not None else {}
        if input_type is None:
            return ""
        if input_type not in prompts:
            allowed = (
                f"the model's are: {', '.join(map(repr, prompts))}" if prompts else "the model has none; leave it out"
            )
            raise bad_request(f"Unsupported input_type {shown(input_type)}; {allowed}", "input_type")
        return prompts[input_type]

    def response(self, request: CohereEmbedRequest, answer: Answer) -> Response:
        data = np.stack([output.outputs.data for output in answer.outputs])
        kinds = dict.fromkeys(request.embedding_types or ["float"])  # each once, however often it is named
        if data.shape[1] % 8 and {"binary", "ubinary"} & kinds.keys():
            raise bad_request(f"{data.shape[1]} dimensions cannot be packed into bytes", "embedding_types")
        texts = [prompt for prompt in request.texts] if request.texts is not None else None
        return json_body(
            {
                "id": answer.id,
                "embeddings": {kind: _typed(data, kind) for kind in kinds},
                "texts": texts,
                "meta": {
                    "api_version": {"version": "2"},
                    "billed_units": {"input_tokens": answer.num_tokens, "image_tokens": 0},
                },
                "response_type": "embeddings_by_type",
            }
        )


def _typed(data: np.ndarray, kind: str) -> list[Any]:
    if kind == "float":
        return data.tolist()
    if kind == "base64":
        return [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in data]
    packed = np.packbits(data >= 0, axis=1)
    return packed.tolist() if kind == "ubinary" else (packed.astype(np.int16) - 128).tolist()


def _text(given: dict[str, Any]) -> str:
    parts = given.get("content")
    if not isinstance(parts, list) or not parts:
        raise bad_request("inputs: each needs content, a list of parts", "inputs")
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            raise not_available("inputs", "content other than text")
        texts.append(part["text"])
    return "\n".join(texts)
