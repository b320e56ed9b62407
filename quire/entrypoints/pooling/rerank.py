"""POST /score and /rerank, as vLLM, Jina and Cohere have them."""

from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.responses import Response

from quire.engine.input_processor import ParsedPrompt
from quire.entrypoints.chat_renderer import read_template
from quire.entrypoints.http.errors import bad_request
from quire.entrypoints.pooling.endpoint import Answer, PoolingEndpoint, json_body
from quire.entrypoints.pooling.inputs import Truncation
from quire.entrypoints.pooling.protocol import RerankRequest, ScoreRequest, ScoringRequest
from quire.entrypoints.pooling.scoring import (
    TASKS,
    Pairs,
    ScoreOptions,
    by_template,
    score_prompts,
    score_type,
    scored,
    text_of,
)
from quire.messages.pooling_params import PoolingParams

NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))

S = TypeVar("S", bound=ScoringRequest)


class ScoringEndpoint(PoolingEndpoint[S]):
    id_prefix = "score-"
    input_field = "documents"
    max_numbers = 1 << 28  # they are not in the response

    def pairs(self, request: S) -> Pairs:
        raise NotImplementedError

    def params(self, request: S) -> PoolingParams:
        return PoolingParams(task=TASKS[score_type(self.setup)], use_activation=request.use_activation)

    def sources(self, request: S) -> Sequence[Any]:
        """What counts as a sequence: a pair, or each text of it."""
        pairs = self.pairs(request)
        alone = score_type(self.setup) == "cross-encoder"
        return pairs.documents if alone else [*pairs.queries, *pairs.documents]

    def prompts(self, request: S, sources: Sequence[Any], size: int) -> list[ParsedPrompt]:
        context = self.context
        pairs = self.pairs(request)
        for text in (*pairs.queries, *pairs.documents):
            context.check_chars(len(text), self.input_field)
        cut = Truncation(request.truncate_prompt_tokens, request.truncation_side)
        cut.check(self.inputs.longest)
        template = context.engine_config.model.chat_template
        kwargs = {"instruction": request.instruction} if request.instruction is not None else {}
        options = ScoreOptions(
            cut,
            request.max_tokens_per_query or 0,
            request.max_tokens_per_doc or 0,
            None if template is None else read_template(template),
            kwargs | (request.chat_template_kwargs or {}),
            max_chars=context.config.max_request_bytes,
        )
        renderer = context.renderer if by_template(self.setup, options) else None
        prompts = score_prompts(self.inputs, pairs, options, renderer)
        longest = max(len(prompt.token_ids) for prompt in prompts)
        if longest > self.inputs.longest:
            raise bad_request(
                f"a prompt has {longest} tokens; at most {self.inputs.longest} are allowed (max_model_len). Please "
                "reduce the length of the input prompt, or truncate it (truncate_prompt_tokens)",
                self.input_field,
                "context_length_exceeded",
            )
        return prompts


class ScoreEndpoint(ScoringEndpoint[ScoreRequest]):
    request_type = ScoreRequest

    def pairs(self, request: ScoreRequest) -> Pairs:
        for names in NAMES:
            first, second = (getattr(request, name) for name in names)
            if first is not None and second is not None:
                return Pairs.of(first, second, names)
        raise bad_request("give queries and documents (or items; or text_1 and text_2; or data_1, data_2)", "queries")

    def response(self, request: ScoreRequest, answer: Answer) -> Response:
        scores = scored(self.setup, answer.outputs, len(self.pairs(request).queries))
        return json_body(
            answer.envelope([{"index": i, "object": "score", "score": s.outputs.score} for i, s in enumerate(scores)])
        )


class RerankEndpoint(ScoringEndpoint[RerankRequest]):
    request_type = RerankRequest
    id_prefix = "rerank-"

    def pairs(self, request: RerankRequest) -> Pairs:
        if request.top_n is not None and request.top_n < 0:
            raise bad_request(f"top_n is {request.top_n}; it must be 0 or more, 0: all", "top_n")
        return Pairs.of([request.query], request.documents, ("query", "documents"))

    def response(self, request: RerankRequest, answer: Answer) -> Response:
        given = request.documents if isinstance(request.documents, list) else [request.documents]
        scores = [score.outputs.score for score in scored(self.setup, answer.outputs, 1)]
        order = sorted(range(len(scores)), key=lambda place: scores[place], reverse=True)
        results: list[dict[str, Any]] = []
        for place in order[: request.top_n or len(order)]:
            result: dict[str, Any] = {"index": place}
            if request.return_documents is not False:
                result["document"] = {"text": text_of(given[place], "documents"), "multi_modal": None}
            results.append(result | {"relevance_score": scores[place]})
        count = answer.num_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_body({"id": answer.id, "model": answer.model, "usage": usage, "results": results})
