"""Users' own logits processors: found by import path or as plugins, checked, and built in the worker.

Importing this needs no torch: the front end loads the same classes to validate requests.
"""

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import ByRow, LogitsProcessor, SampleBatch
from quire.sample.vllm_processors import METHODS as VLLM_METHODS
from quire.sample.vllm_processors import VllmProcessor

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("quire")

GROUP = "quire.logits_processors"  # of entry points: installed packages register processors there
METHODS = ("add_row", "remove_row", "apply", "sampled")
WHERE = "see docs/sampling.md, Logits processors"


class RowProcessor(ByRow):
    """Base of most processors: `add_row` stores parameters in `self.rows[new.row]` for requests that use it, `apply`
    changes `logits[place]` for each of `self.places(batch)`.

    `supports_drafts = True` says that it is right for rows that verify drafts, too (docs/sampling.md).
    `validate_params(params)`, a classmethod, may raise a ValueError for wrong `params.extra_args`.
    """

    supports_drafts = False

    def __init__(self, config: EngineConfig, device: "torch.device") -> None:
        super().__init__(device)

    def add_row(self, new: NewRow) -> None:
        raise NotImplementedError

    def apply(self, logits: "torch.Tensor", batch: SampleBatch) -> "torch.Tensor":
        raise NotImplementedError


def processor_classes(given: Sequence[str | type]) -> list[type]:
    """The given classes, or imports of "module:Class", in that order, then those of plugins."""
    found = [one if isinstance(one, type) else _import(one) for one in given]
    for point in plugins():
        try:
            found.append(point.load())
        except Exception as error:
            message = f"the plugin {point.name!r} ({point.value}, group {GROUP}) cannot be loaded: {error}"
            raise ValueError(message) from error
    found = list(dict.fromkeys(found))
    for one in found:
        _check_class(one)
    return found


@functools.cache
def plugins() -> list[importlib.metadata.EntryPoint]:
    """Cached: it reads the metadata of all installed packages."""
    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)


def validators(classes: Sequence[type]) -> list[Callable[[SamplingParams], None]]:
    """Each raises a ValueError for a request that its class rejects."""
    return [_validator(one) for one in classes if hasattr(one, "validate_params")]


def make_processors(classes: Sequence[type], config: EngineConfig, device: "torch.device") -> list[LogitsProcessor]:
    if config.speculative.num_drafts:
        for one in classes:
            if not getattr(one, "supports_drafts", False):
                raise ValueError(
                    f"speculative_config: the logits processor {_name(one)} does not say supports_drafts = True, so it "
                    f"needs steps of one token; leave one of the two out, or {WHERE}"
                )
    return [Guarded(one, config, device) for one in classes]


class Guarded:
    """Wraps a user's processor: its errors name it."""

    def __init__(self, kind: type, config: EngineConfig, device: "torch.device") -> None:
        self.name = _name(kind)
        try:
            self.inner: Any = VllmProcessor(kind, config, device) if _is_vllms(kind) else kind(config, device)
            self.changes_argmax = bool(self.inner.changes_argmax)
        except Exception as error:
            raise ValueError(f"the logits processor {self.name} cannot be created: {error!r}; {WHERE}") from error
        if not isinstance(self.inner.active, bool):
            raise ValueError(f"the logits processor {self.name} has no property `active` that is a bool; {WHERE}")

    def add_row(self, new: NewRow) -> None:
        try:
            self.inner.add_row(new)
        except Exception as error:
            raise self._failed("add_row", error) from error

    def remove_row(self, row: int) -> None:
        """An error is only logged: the request has ended, and other rows must not fail."""
        try:
            self.inner.remove_row(row)
        except Exception as error:
            logger.error("%s; it may keep state of the row", self._failed("remove_row", error), exc_info=error)

    @property
    def active(self) -> bool:
        try:
            return bool(self.inner.active)
        except Exception as error:
            raise self._failed("active", error) from error

    def apply(self, logits: "torch.Tensor", batch: SampleBatch) -> "torch.Tensor":
        try:
            changed = self.inner.apply(logits, batch)
        except Exception as error:
            raise self._failed("apply", error) from error
        if getattr(changed, "shape", None) != logits.shape or changed.dtype != logits.dtype:
            raise RuntimeError(
                f"the logits processor {self.name} returned {_describe(changed)} for {_describe(logits)}"
            )
        result: torch.Tensor = changed
        return result

    def sampled(self, token_ids: "torch.Tensor", batch: SampleBatch) -> None:
        try:
            self.inner.sampled(token_ids, batch)
        except Exception as error:
            raise self._failed("sampled", error) from error

    def _failed(self, method: str, error: Exception) -> RuntimeError:
        return RuntimeError(f"the logits processor {self.name} failed in {method}: {type(error).__name__}: {error}")


def _import(path: str) -> type:
    module, _, attribute = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not module or not attribute:
        raise ValueError(f"logits_processors has {path!r}; it must be module:Class or a class (--logits-processors)")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except Exception as error:  # also what the module itself raises
        raise ValueError(
            f"the logits processor {path!r} cannot be imported: {error}; is its module on PYTHONPATH? "
            "(--logits-processors)"
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"the logits processor {path!r} is a {type(found).__name__}; it must be a class; {WHERE}")
    return found


def _check_class(kind: type) -> None:
    if not isinstance(kind, type):
        raise ValueError(f"the logits processor {kind!r} is not a class; {WHERE}")
    methods = VLLM_METHODS if _is_vllms(kind) else METHODS
    missing = [name for name in methods if not callable(getattr(kind, name, None))]
    if missing:
        raise ValueError(f"the logits processor {_name(kind)} lacks {', '.join(missing)}; {WHERE}")


def _is_vllms(kind: type) -> bool:
    """Whether it is written for vLLM's interface."""
    return hasattr(kind, "update_state") and not hasattr(kind, "add_row")


def _validator(kind: type) -> Callable[[SamplingParams], None]:
    def validate(params: SamplingParams) -> None:
        try:
            kind.validate_params(params)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ValueError(f"extra_args: {error} ({kind.__qualname__})") from error

    return validate


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__}"
