"""Logits processors written for vLLM's interface: `update_state` hears of changes to the batch, `apply` edits logits.

An index in the batch is a row here: rows stay where they are, so requests are added and removed but never moved.
"""

import enum
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config import EngineConfig
from quire.messages.plan import NewRow
from quire.messages.sampling_params import SamplingParams
from quire.sample.processors import SampleBatch

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
METHODS = ("update_state", "apply", "is_argmax_invariant")
# (output ids, logits) or (prompt ids, output ids, logits) -> logits of one request
RequestLogitsProcessor = Callable[..., Any]


class MoveDirectionality(enum.Enum):
    UNIDIRECTIONAL = enum.auto()
    SWAP = enum.auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Changes since the last step: removed, then added. The output ids of an added request grow as it generates."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(ABC):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a request with wrong extra_args."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: "torch.device", is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: "torch.Tensor") -> "torch.Tensor": ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each `apply`; None if the batch is as it was."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base of processors that are one function for each request."""

    def __init__(self, vllm_config: EngineConfig, device: "torch.device", is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """None: the request does not use it."""

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Any], Any] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        with_prompt = len(inspect.signature(process).parameters) == 3
        return functools.partial(process, *([prompt_ids, output_ids] if with_prompt else [output_ids]))

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        for index, process in self.req_info.items():
            logits[index] = process(logits[index])
        return logits


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Apply changes to a dict of states by index, of the requests that have one; whether it changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        req_entries.pop(index, None)
        if state is not None:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return req_entries != before or bool(batch_update.added)


class VllmProcessor:
    """A processor of that kind with our interface."""

    def __init__(self, kind: type, config: EngineConfig, device: "torch.device") -> None:
        self._inner = kind(config, device, device.type != "cpu")
        self.changes_argmax = not self._inner.is_argmax_invariant()
        self._outputs: dict[int, list[int]] = {}  # by row: what each request has generated
        self._added: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self._removed: set[int] = set()

    @property
    def active(self) -> bool:
        return bool(self._outputs)

    def add_row(self, new: NewRow) -> None:
        known = new.token_ids.tolist()
        self._outputs[new.row] = known[new.num_prompt_tokens :]
        self._added[new.row] = new.params, known[: new.num_prompt_tokens], self._outputs[new.row]
        self._removed.discard(new.row)

    def remove_row(self, row: int) -> None:
        if self._added.pop(row, None) is None:
            self._removed.add(row)
        self._outputs.pop(row, None)

    def apply(self, logits: "torch.Tensor", batch: SampleBatch) -> "torch.Tensor":
        if len(set(batch.row_list)) < len(batch.row_list):
            raise RuntimeError("a logits processor of vLLM's interface cannot be used with draft tokens")
        update = None
        if self._added or self._removed:
            added = [(row, *request) for row, request in self._added.items()]
            update = BatchUpdate(len(self._outputs), sorted(self._removed), added)
            self._added, self._removed = {}, set()
        self._inner.update_state(update)
        by_row = logits.new_zeros(1 + max(self._outputs), logits.shape[1])
        by_row[batch.rows] = logits
        changed: torch.Tensor = self._inner.apply(by_row)
        return changed[batch.rows]

    def sampled(self, token_ids: "torch.Tensor", batch: SampleBatch) -> None:
        for row, token, done in zip(batch.row_list, token_ids.tolist(), batch.done.tolist(), strict=True):
            if done:
                self._outputs[row].append(token)
