"""In place of the endpoints that generate, where the model does not."""

from collections.abc import Iterable

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.config.pooling import PoolingSetup
from quire.entrypoints.http.errors import bad_request


class PoolsOnly:
    def __init__(self, setup: PoolingSetup) -> None:
        self.setup = setup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        can = ", ".join(self.setup.tasks)
        raise bad_request(
            f"{scope['path']}: this model does not generate text; it can: {can} (/v1/embeddings, /classify, /score, "
            "/rerank, /pooling)",
            code="model_pools",
        )


def refused(setup: PoolingSetup, paths: Iterable[str]) -> list[Route]:
    return [Route(path, PoolsOnly(setup), methods=["POST"], include_in_schema=False) for path in paths]
