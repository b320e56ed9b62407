"""The dialect of models that pool: OpenAI's, Cohere's, Jina's and vLLM's endpoints."""

import json

from starlette.routing import Route
from starlette.types import ASGIApp

from quire.config.pooling import CLASSIFY, EMBED
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect
from quire.entrypoints.openai.errors import ERROR_BODIES, error_body
from quire.entrypoints.openai.invocations import InvocationsEndpoint
from quire.entrypoints.pooling.cohere import CohereEmbedEndpoint
from quire.entrypoints.pooling.embeddings import ClassifyEndpoint, EmbeddingsEndpoint, PoolEndpoint
from quire.entrypoints.pooling.endpoint import ROUTES
from quire.entrypoints.pooling.rerank import RerankEndpoint, ScoreEndpoint

PATHS = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)


def routes(context: ServerContext) -> list[Route]:
    if context.config.tokens_only:
        return []
    embeddings, pool, classify = EmbeddingsEndpoint(context), PoolEndpoint(context), ClassifyEndpoint(context)
    score, rerank = ScoreEndpoint(context), RerankEndpoint(context)
    served: tuple[ASGIApp, ...] = (
        embeddings,
        CohereEmbedEndpoint(context),
        pool,
        classify,
        score,
        score,
        rerank,
        rerank,
        rerank,
    )
    setup = context.engine_config.pooling.setup
    found = [
        Route(path, endpoint, methods=["POST"], include_in_schema=setup is not None)
        for path, endpoint in zip(PATHS, served, strict=True)
    ]
    if setup is not None:
        by_task: dict[str, ASGIApp] = {CLASSIFY: classify, EMBED: embeddings}
        whole = by_task.get(setup.task, pool)
        by_field: dict[str, ASGIApp] = {"query": rerank, "queries": score, "text_1": score, "data_1": score}
        by_field |= {"input": whole, "messages": whole}
        invocations = InvocationsEndpoint(context.bodies, by_field)
        found.append(Route("/invocations", invocations, methods=["POST"], include_in_schema=False))
    return found


def example(url: str, name: str, task: str) -> str:
    body = json.dumps({"model": name, "input": "Hello"})
    return f"curl {url}{ROUTES.get(task, '/pooling')} -H 'Content-Type: application/json' -d '{body}'"


POOLING = Dialect("pooling", routes, error_body, prefixes=PATHS, pooling_example=example, error_formats=ERROR_BODIES)
