"""What engines have to be paused, to sleep and to get new weights: vLLM's methods, of both kinds of engine.

Nothing here imports torch: front ends in processes of their own do without it.
"""

import asyncio
import functools
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quire.config.shown import shown

CONTROL_SECONDS = 600.0  # for a call: sleeping, waking, loading
POLL_SECONDS = 0.005  # between looks at whether running requests have ended
PAUSE_MODES = ("abort", "wait", "keep")
DRAFTS = "new weights of a draft model are not available yet; drafts by the old ones remain valid"

P = ParamSpec("P")
R = TypeVar("R")
Request = Any  # {"update_info": ...} or an object with it; a path; a dict of tensors


def info_of(request: Any, name: str) -> Any:
    """vLLM's requests are objects with one field, or dicts."""
    if isinstance(request, Mapping):
        if name not in request:
            raise ValueError(f"the request has {shown(sorted(map(str, request)))}; it must have {name}")
        return request[name]
    if not hasattr(request, name):
        raise ValueError(f"the request is {shown(request)}; it must be a dict with {name}")
    return getattr(request, name)


def is_part(request: Any) -> bool:
    """Whether it is vLLM's: a part of an update that was started, and is finished, by calls of their own."""
    return hasattr(request, "update_info") or (isinstance(request, Mapping) and "update_info" in request)


@contextmanager
def whole_update(request: Any, at_hand: bool) -> Iterator[dict[str, Any]]:
    """The `update_info` of all weights at once. `at_hand`: the workers are in this process."""
    if isinstance(request, (str, os.PathLike)):
        yield {"path": os.fspath(request)}
    elif not isinstance(request, Mapping) or not request:
        raise ValueError(
            f"weights are {shown(request)}; they must be a checkpoint's path, a dict of tensors by their names, or "
            '{"update_info": ...}'
        )
    elif at_hand:
        yield {"tensors": dict(request)}
    else:
        from quire.weights.trainer import in_shared_memory

        with in_shared_memory(request) as info:
            yield info


def check_mode(mode: str) -> None:
    if mode not in PAUSE_MODES:
        raise ValueError(f"mode is {shown(mode)}; allowed: {', '.join(PAUSE_MODES)}")


class AsyncControlMethods:
    """Of an engine whose calls are awaited."""

    async def _control(self, name: str, *args: Any) -> Any:
        """A call of the core's EngineControl."""
        raise NotImplementedError

    async def _rest(self) -> None:
        await asyncio.sleep(POLL_SECONDS)

    @property
    def _weights_at_hand(self) -> bool:
        """Whether the workers are in this process."""
        return False

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Until `resume_generation`: requests that run are aborted, waited for or kept, new ones are held."""
        check_mode(mode)
        while not await self._control("pause", mode, clear_cache):
            await self._rest()

    async def resume_generation(self) -> None:
        await self._control("resume")

    async def is_paused(self) -> bool:
        return bool(await self._control("is_paused"))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """0: pause. 1: also discard the KV cache, and keep the weights on the host. 2: discard both."""
        await self._control("check_sleep", level)
        await self.pause_generation(mode=mode, clear_cache=level != 0)
        await self._control("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """All, or `weights`, `kv_cache`, `scheduling`. Whether the engine is fully awake, and goes on."""
        return bool(await self._control("wake_up", None if tags is None else list(tags)))

    async def is_sleeping(self) -> bool:
        return bool(await self._control("is_sleeping"))

    async def release_kv_cache_memory(self) -> None:
        """Of a paused engine; `wake_up` brings it back."""
        await self._control("release_kv_cache_memory")

    async def init_weight_transfer_engine(self, request: Request) -> None:
        """Meet a trainer: see weights/transfer.py."""
        await self._control("update", "init", info_of(request, "init_info"))

    async def shutdown_weight_transfer_engine(self) -> None:
        await self._control("update", "shutdown", None)

    async def start_weight_update(self) -> None:
        await self._control("update", "start", None)

    async def start_draft_weight_update(self) -> None:
        raise ValueError(DRAFTS)

    async def update_weights(self, request: Request, *, weight_version: str | None = None, mode: str = "keep") -> None:
        """All weights at once, from a checkpoint's path or a dict of tensors: requests that run are then kept (computed
        anew with the new weights), waited for or aborted. {"update_info": ...} is a part of an update between
        `start_weight_update` and `finish_weight_update`. If anything does not fit, the old weights stay."""
        if is_part(request):
            await self._control("update", "add", info_of(request, "update_info"))
            return
        check_mode(mode)
        with whole_update(request, self._weights_at_hand) as info:
            paused = await self.is_paused()
            await self.start_weight_update()
            await self._control("update", "add", info)
            try:
                if not paused:
                    await self.pause_generation(mode=mode, clear_cache=False)
                await self.finish_weight_update(weight_version)
            finally:
                if not paused:
                    await self.resume_generation()

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Check all that came, and use it."""
        await self._control("finish_update", weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        await self._control("set_weight_version", new_version)

    async def get_weight_version(self) -> str:
        return str(await self._control("get_weight_version"))


class Controlled(Protocol):
    """An engine whose calls wait."""

    def _control(self, name: str, *args: Any) -> Any: ...

    @property
    def _weights_at_hand(self) -> bool: ...


class _Waiting(AsyncControlMethods):
    """Such an engine as one that is awaited: nothing here ever gives way to an event loop."""

    def __init__(self, engine: Controlled) -> None:
        self._engine = engine

    async def _control(self, name: str, *args: Any) -> Any:
        return self._engine._control(name, *args)

    async def _rest(self) -> None:
        time.sleep(POLL_SECONDS)

    @property
    def _weights_at_hand(self) -> bool:
        return self._engine._weights_at_hand


def _waits(
    method: Callable[Concatenate[AsyncControlMethods, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Controlled, P], R]:
    @functools.wraps(method)
    def call(self: Controlled, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            method(_Waiting(self), *args, **kwargs).send(None)
        except StopIteration as done:
            result: R = done.value
            return result
        raise AssertionError(f"{method.__name__} gave way")

    return call


class ControlMethods:
    """The same of an engine whose calls wait; see Controlled."""

    pause_generation = _waits(AsyncControlMethods.pause_generation)
    resume_generation = _waits(AsyncControlMethods.resume_generation)
    is_paused = _waits(AsyncControlMethods.is_paused)
    sleep = _waits(AsyncControlMethods.sleep)
    wake_up = _waits(AsyncControlMethods.wake_up)
    is_sleeping = _waits(AsyncControlMethods.is_sleeping)
    release_kv_cache_memory = _waits(AsyncControlMethods.release_kv_cache_memory)
    init_weight_transfer_engine = _waits(AsyncControlMethods.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _waits(AsyncControlMethods.shutdown_weight_transfer_engine)
    start_weight_update = _waits(AsyncControlMethods.start_weight_update)
    start_draft_weight_update = _waits(AsyncControlMethods.start_draft_weight_update)
    update_weights = _waits(AsyncControlMethods.update_weights)
    finish_weight_update = _waits(AsyncControlMethods.finish_weight_update)
    update_weight_version = _waits(AsyncControlMethods.update_weight_version)
    get_weight_version = _waits(AsyncControlMethods.get_weight_version)
