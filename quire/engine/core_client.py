"""Clients of the engine core: in this process, or in another."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from quire.compat.unavailable import named
from quire.config import EngineConfig
from quire.core.engine_core import EngineCore
from quire.engine.async_engine import EngineCallError, EngineDeadError, EngineStalledError
from quire.engine.engine_connection import EngineConnection
from quire.executor.base import WorkerMethod
from quire.messages.lora import LoRARequest
from quire.messages.protocol import AddRequests, Call, Dead, FinishRequests, Outputs, Result
from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest
from quire.weights.engine_methods import CONTROL_SECONDS

POLL_SECONDS = 0.2  # between checks that the engine is alive; messages are received at once


class EngineCoreClient(Protocol):
    def add_request(self, request: EngineCoreRequest) -> None: ...

    def finish_requests(self, request_ids: list[str]) -> None: ...

    def get_output(self) -> EngineCoreOutputs | None: ...

    def reset_prefix_cache(self) -> None: ...

    def compile_grammars(self, request_ids: list[str]) -> None:
        """Until they are compiled or have failed, where the core does not step by itself."""
        ...

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Of every worker."""
        ...

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Every worker's part of the checkpoint, in files of its own."""
        self.collective_rpc("save_sharded_state", (path, pattern, max_size), {})

    def adapters(self, method: str, *args: Any) -> Any:
        """Call a method of the core's adapters."""
        ...

    def control(self, method: str, *args: Any) -> Any:
        """Call a method of the core's EngineControl."""
        ...

    def shutdown(self) -> None: ...


class InprocClient(EngineCoreClient):
    """The core in this process: get_output() runs a step."""

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

    def compile_grammars(self, request_ids: list[str]) -> None:
        self.core.compile_grammars(request_ids)

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        return self.core.collective_rpc(method, args, kwargs)

    def adapters(self, method: str, *args: Any) -> Any:
        return self.core.call_adapters(method, args)

    def control(self, method: str, *args: Any) -> Any:
        while (result := self.core.control.call(method, args)) is False and method == "pause":
            self.core.step_ahead()  # nobody else makes it step
        return result

    def shutdown(self) -> None:
        self.core.shutdown()


class SyncMPClient(EngineCoreClient):
    """The core in its own process, which steps by itself: get_output() waits for the next outputs."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the engine; `connection.wait_ready` returns once the model is loaded."""
        self.connection = EngineConnection(config)
        self._call_timeout = config.observability.engine_call_timeout
        self._outputs: deque[EngineCoreOutputs] = deque()  # received while waiting for a Result
        self._num_calls = 0
        self._dead: EngineDeadError | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(AddRequests([request]))

    def finish_requests(self, request_ids: list[str]) -> None:
        if request_ids and self._dead is None:
            self._send(FinishRequests(request_ids))

    def get_output(self) -> EngineCoreOutputs | None:
        """None after POLL_SECONDS without outputs, so that the caller can check for interrupts."""
        if self._outputs:
            return self._outputs.popleft()
        message = self._receive()
        return message.outputs if isinstance(message, Outputs) else None

    def reset_prefix_cache(self) -> None:
        self._call("reset_prefix_cache")

    def compile_grammars(self, request_ids: list[str]) -> None:
        pass

    def collective_rpc(self, method: WorkerMethod, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results: list[Any] = self._call("collective_rpc", [named(method), *args], dict(kwargs))
        return results

    def adapters(self, method: str, *args: Any) -> Any:
        plain = [msgspec.to_builtins(one) if isinstance(one, LoRARequest) else one for one in args]
        try:
            return self._call("adapters", [method, *plain])
        except EngineCallError as error:
            raise ValueError(str(error)) from None

    def control(self, method: str, *args: Any) -> Any:
        try:
            return self._call("control", [method, *args], timeout=CONTROL_SECONDS)
        except EngineCallError as error:
            raise ValueError(str(error).removeprefix("the engine failed control: ")) from None

    def _call(
        self,
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        self._num_calls += 1
        self._send(Call(self._num_calls, name, list(args), dict(kwargs or {})))
        limit = timeout or self._call_timeout
        until = time.monotonic() + limit
        while time.monotonic() < until:
            message = self._receive()
            if isinstance(message, Outputs):
                self._outputs.append(message.outputs)
            elif isinstance(message, Result) and message.number == self._num_calls:
                if message.error is not None:
                    raise EngineCallError(f"the engine failed {name}: {message.error}")
                return message.values
        waited = f"{limit:g} seconds (--engine-call-timeout)"
        raise EngineStalledError(f"the engine has not replied to {name} within {waited}")

    def shutdown(self) -> None:
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down")
        self.connection.close()

    def _send(self, message: Any) -> None:
        if self._dead is not None:
            raise self._dead
        self.connection.send(message)

    def _receive(self) -> Any | None:
        if self._dead is not None:
            raise self._dead
        try:
            message = self.connection.receive(POLL_SECONDS)
            if message is None:
                self.connection.check_alive()
        except EngineDeadError as error:
            self._dead = error
            raise
        if isinstance(message, Dead):
            self._dead = EngineDeadError(message.cause)
            raise self._dead
        return message
