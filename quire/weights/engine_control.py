"""What operators and trainers do to a running engine: pause it, let it sleep, give it new weights."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.messages.requests import EngineCoreOutputs, EngineCoreRequest, FinishReason

logger = logging.getLogger("quire")

MODES = ("abort", "wait", "keep")
TAGS = ("weights", "kv_cache")
SCHEDULING = "scheduling"  # a tag of vLLM's: nothing but to go on

# Methods of workers that change no weights. Others, and users' functions, may.
READING_METHODS = (
    "adapter_news",
    "describe",
    "draft_needs",
    "feature_support",
    "get_draft_profile",
    "kv_cache_memory",
    "kv_cache_specs",
    "save_sharded_state",
    "start_profile",
    "stop_profile",
    "weights_identity",
)
# Those that an engine must know of, and its own method.
ENGINE_METHODS = {
    "sleep": "sleep",
    "wake_up": "wake_up",
    "discard_kv_cache": "release_kv_cache_memory",
    "update_weights": "update_weights",
    "load_adapter": "add_lora",
    "place_adapter": "add_lora",
    "use_adapter": "add_lora",
    "drop_adapter": "remove_lora",
    "execute_model": "generate",
    "sample_tokens": "generate",
    "initialize_kv_cache": "wake_up",
    "close_connectors": "shutdown",
}


class CallsWorkers(Protocol):
    def collective_rpc(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]: ...


class Moving(Protocol):
    @property
    def moving(self) -> bool: ...


class ControlledScheduler(Protocol):
    sleep_level: int
    admits: bool

    @property
    def requests(self) -> Mapping[str, Any]: ...

    @property
    def transfers(self) -> Moving: ...

    def forget(self, key: bytes = b"") -> None: ...


class ControlledCore(Protocol):
    """EngineCore, as far as it is controlled from here."""

    @property
    def executor(self) -> CallsWorkers: ...

    @property
    def scheduler(self) -> ControlledScheduler: ...

    def finish_requests(self, request_ids: list[str]) -> list[int]: ...

    def add_or_fail(self, request: EngineCoreRequest) -> None: ...

    def buffer(self, outputs: EngineCoreOutputs) -> None: ...

    def drain(self) -> None: ...


class EngineControl:
    """Calls between two steps. While the engine is paused new requests are held, and added when it goes on; `wait` lets
    those that it has end first, the other modes leave none running."""

    def __init__(self, core: ControlledCore, sleep_mode: bool) -> None:
        """`sleep_mode`: whether workers can give memory back."""
        self._core, self._sleep_mode = core, sleep_mode
        self.paused = False
        self.frozen = False  # nothing is scheduled
        self.held: list[EngineCoreRequest] = []
        self._asleep: set[str] = set()  # tags
        self._discarded = False  # there are no weights until an update brings some
        self._version = "default"

    def call(self, name: str, args: Sequence[Any]) -> Any:
        calls: dict[str, Callable[..., Any]] = {
            "pause": self.pause,
            "resume": self.resume,
            "is_paused": lambda: self.paused,
            "check_sleep": self.check_sleep,
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "is_sleeping": lambda: self.paused or bool(self._asleep),
            "release_kv_cache_memory": self.release_kv_cache_memory,
            "update": self.update,
            "finish_update": self.finish_update,
            "set_weight_version": self.set_weight_version,
            "get_weight_version": lambda: self._version,
        }
        return calls[name](*args)

    def pause(self, mode: str, clear_cache: bool) -> bool:
        """Whether nothing runs any more, and no blocks are on their way. That may take several calls."""
        core = self._core
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}; allowed: {', '.join(MODES)}")
        self.paused = True
        core.scheduler.admits = mode != "keep"  # or more and more blocks would be loaded
        if mode == "abort":
            ended = core.finish_requests(list(core.scheduler.requests))
            ended += [request.index + i for request in self.held for i in range(request.sampling.n)]
            self.held = []
            if ended:
                core.buffer(EngineCoreOutputs.ended(ended, FinishReason.ABORT))
        left = mode == "wait" and bool(core.scheduler.requests)
        if not self.frozen and (left or core.scheduler.transfers.moving):
            return False  # a frozen engine would never hear that blocks are loaded
        self.frozen = True
        core.drain()
        if clear_cache:
            core.scheduler.forget()
        return True

    def resume(self) -> None:
        if self._asleep:
            raise ValueError(
                f"the engine has given back its {' and '.join(sorted(self._asleep))}; wake it up (wake_up)"
            )
        self._reload_discarded()
        self.paused, self.frozen, self._core.scheduler.admits = False, False, True
        held, self.held = self.held, []
        for request in held:
            self._core.add_or_fail(request)

    def check_sleep(self, level: int) -> None:
        """Before anything is paused for it."""
        if type(level) is not int or level not in (0, 1, 2):
            raise ValueError(f"level is {level!r}; allowed: 0, 1, 2")
        if level and not self._sleep_mode:
            raise ValueError("the engine was started without sleep mode (--enable-sleep-mode)")
        if level == 2:
            self.update("check", None)  # whether weights that are discarded could be had again

    def sleep(self, level: int) -> None:
        """After a pause. 0: nothing is given back."""
        self.check_sleep(level)
        self._require_pause()
        if level:
            self._core.scheduler.forget()
            # First: if a worker fails half-way, only waking up brings back what is gone.
            self._discarded |= level == 2 and "weights" not in self._asleep
            self._asleep.update(TAGS)
            self._core.executor.collective_rpc("sleep", (level,), {})
        self._note_state()

    def wake_up(self, tags: Sequence[str] | None) -> bool:
        """Whether all memory is there again; then the engine goes on."""
        wanted = [*TAGS, SCHEDULING] if tags is None else list(tags)
        unknown = [tag for tag in wanted if tag not in (*TAGS, SCHEDULING)]
        if unknown:
            raise ValueError(f"tags are {wanted!r}; allowed: {', '.join((*TAGS, SCHEDULING))}")
        asleep = [tag for tag in TAGS if tag in wanted and tag in self._asleep]
        if asleep:
            self._core.executor.collective_rpc("wake_up", (asleep,), {})
            self._asleep.difference_update(asleep)
        self._note_state()
        if self._asleep:
            return False
        self.resume()
        return True

    def release_kv_cache_memory(self) -> None:
        self.check_sleep(1)
        self._require_pause()
        if self._asleep:
            raise ValueError("the engine sleeps already: its memory has been given back")
        self._core.scheduler.forget()
        self._asleep.add("kv_cache")
        self._core.executor.collective_rpc("discard_kv_cache", (), {})
        self._note_state()

    def collective_rpc(self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """A user's call of a method of all workers by its name, or of a function. Whatever may have changed weights,
        nothing computed before is used again."""
        if method == "reload_weights":
            return self._reload(*args, **kwargs)
        if method in ENGINE_METHODS:
            raise ValueError(f"{method} is the engine's to call; use its own method ({ENGINE_METHODS[method]})")
        if method in READING_METHODS:
            return self._core.executor.collective_rpc(method, args, kwargs)
        self._core.drain()
        try:
            return self._core.executor.collective_rpc(method, args, kwargs)
        finally:
            self._core.scheduler.forget(secrets.token_bytes(16))

    def _reload(self, weights_iterator: Any = None, weights_path: str | None = None) -> list[Any]:
        """As vLLM's: the checkpoint that the engine was started with, or another."""
        if weights_iterator is not None:
            raise ValueError("reload_weights takes no weights_iterator; use update_weights with tensors by their names")
        results = self.update("start", None)
        self.update("add", {"path": weights_path})
        self.finish_update("default" if weights_path is None else None)
        return results

    def update(self, step: str, info: Any) -> list[Any]:
        """`check`, `init`, `start`, `add` or `shutdown` of WeightUpdates, on all workers; an error ends the update."""
        if step in ("start", "add") and "weights" in self._asleep:
            raise ValueError('the weights\' memory has been given back; wake it up first (wake_up(["weights"]))')
        try:
            return self._core.executor.collective_rpc("update_weights", (step, info), {})
        except Exception:
            if step == "add":
                self._core.executor.collective_rpc("update_weights", ("abandon",), {})
            raise

    def finish_update(self, version: str | None) -> None:
        """New weights are checked on all workers, then used by all. Nothing computed with the old ones is reused."""
        core = self._core
        if "weights" in self._asleep:
            raise ValueError('the weights\' memory has been given back; wake it up first (wake_up(["weights"]))')
        core.drain()
        if core.scheduler.transfers.moving:
            core.executor.collective_rpc("update_weights", ("abandon",), {})
            raise ValueError("the engine transfers KV blocks; pause it first (pause_generation)")
        try:
            if version is not None:
                _check_version(version)
            core.executor.collective_rpc("update_weights", ("prepare",), {})
        except Exception:
            core.executor.collective_rpc("update_weights", ("abandon",), {})
            raise
        try:
            core.executor.collective_rpc("update_weights", ("commit",), {})
        except Exception:
            # Some weights may be new: nothing runs until `resume` has read the checkpoint again.
            self._discarded = self.paused = self.frozen = True
            raise
        self._discarded = False
        core.scheduler.forget(secrets.token_bytes(16))  # no other engine's update has the same name in a store
        if version is not None:
            self._version = version

    def set_weight_version(self, version: str) -> None:
        _check_version(version)
        self._version = version

    def _require_pause(self) -> None:
        if not self.frozen or self._core.scheduler.transfers.moving:
            raise ValueError("the engine is running, or transfers KV blocks; pause it first (pause_generation)")

    def _reload_discarded(self) -> None:
        """Weights that were discarded and not replaced come from the engine's checkpoint."""
        if self._discarded:
            logger.info("weights were discarded; they are read again from the checkpoint")
            self._reload()

    def _note_state(self) -> None:
        level = (2 if self._discarded else 1) if "weights" in self._asleep else 0
        self._core.scheduler.sleep_level = level


def _check_version(version: Any) -> None:
    if not isinstance(version, str):
        raise ValueError(f"weight_version is {version!r}; it must be a string")
