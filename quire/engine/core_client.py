"""How a front end reaches the core."""

from typing import Protocol

from quire.core.engine_core import EngineCore
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(Protocol):
    def add_request(self, request: EngineCoreRequest) -> None: ...

    def finish_requests(self, request_ids: list[str]) -> None: ...

    def get_output(self) -> EngineCoreOutputs | None: ...

    def reset_prefix_cache(self) -> None: ...

    def shutdown(self) -> None: ...


class InprocClient:
    """The core in this process: every call is a plain call, and get_output() runs a step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        self.core.add_request(request)

    def finish_requests(self, request_ids: list[str]) -> None:
        self.core.finish_requests(request_ids)

    def get_output(self) -> EngineCoreOutputs | None:
        return self.core.step()

    def reset_prefix_cache(self) -> None:
        self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        self.core.shutdown()
