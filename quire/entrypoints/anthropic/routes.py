"""The dialect of Anthropic's Messages API."""

import msgspec
from starlette.routing import Route
from starlette.types import Scope

from quire.entrypoints.anthropic.answer import MessagesAnswer
from quire.entrypoints.anthropic.errors import ERROR_SCHEMA, error_body
from quire.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from quire.entrypoints.anthropic.request import chat_request
from quire.entrypoints.http.context import ServerContext
from quire.entrypoints.http.dialect import Dialect
from quire.entrypoints.openai.endpoint import Answer
from quire.entrypoints.openai.logprobs import LogprobFormat
from quire.entrypoints.openai.params import ParamsBuilder
from quire.entrypoints.openai.pools_only import refused
from quire.entrypoints.openai.protocol import ChatRequest
from quire.entrypoints.openai.render import RenderEndpoint
from quire.entrypoints.openai.translated import CountEndpoint, TranslatedEndpoint, TranslatedRequest

PATH = "/v1/messages"
NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
    "thinking_token_budget": "thinking",
}


class MessagesEndpoint(TranslatedEndpoint[MessagesRequest]):
    """POST /v1/messages"""

    source_type = MessagesRequest
    id_prefix = "msg_"
    names = NAMES

    async def translated(self, source: CountTokensRequest, scope: Scope) -> TranslatedRequest:
        return chat_request(source, self.reasoning is not None and self.reasoning.countable)

    def response(self, id: str, model: str, request: ChatRequest, logprobs: LogprobFormat) -> Answer:
        assert isinstance(request, TranslatedRequest)
        cache = self.context.engine_config.cache
        block_size = cache.block_size if cache.enable_prefix_caching else None
        return MessagesAnswer(id, model, request, self.parsing(request), block_size)


def count_shape(num_tokens: int) -> dict[str, int]:
    return {"input_tokens": num_tokens}


def routes(context: ServerContext) -> list[Route]:
    if context.config.tokens_only:
        return []
    setup = context.engine_config.pooling.setup
    if setup is not None:
        return refused(setup, BODIES)
    params = ParamsBuilder(context.config, context.engine.max_model_len, context.engine_config.model)
    endpoint = MessagesEndpoint(context, params)
    return [
        Route(PATH, endpoint, methods=["POST"]),
        Route(f"{PATH}/render", RenderEndpoint(endpoint, single=True), methods=["POST"]),
        Route(
            f"{PATH}/count_tokens",
            CountEndpoint(endpoint, CountTokensRequest, endpoint.translated, count_shape),
            methods=["POST"],
        ),
    ]


BODIES: dict[str, type[msgspec.Struct]] = {
    PATH: MessagesRequest,
    f"{PATH}/render": MessagesRequest,
    f"{PATH}/count_tokens": CountTokensRequest,
}
ANTHROPIC = Dialect("anthropic", routes, error_body, prefixes=(PATH,), bodies=BODIES, error_schema=ERROR_SCHEMA)
