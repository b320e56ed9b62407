"""A worker's side of an update: collect tensors, check all of them, then replace the weights in use."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import CheckpointTensor
from quire.config.shown import shown
from quire.config.weight_transfer import WeightTransferConfig
from quire.layers.fused_moe import FusedMoE
from quire.layers.load_slot import all_load_slots
from quire.models.decoder import DecoderModel
from quire.models.loading.packed_cache import leaves_panels_only
from quire.models.loading.weight_loader import abbreviated, load_weights
from quire.weights.in_place import Replacement, replace_all, replacements, tensors_of
from quire.weights.sources import outlines, read_source
from quire.weights.transfer import TransferEngine, make_transfer_engine

logger = logging.getLogger("quire")

MISSING_START = "no update of weights has been started (start_weight_update)"


class LoadsModel(Protocol):
    """`load_model` with the engine's options; `device` is the engine's unless given."""

    def __call__(
        self,
        ckpt: Checkpoint,
        *,
        tensors: Sequence[CheckpointTensor],
        device: torch.device | str = ...,
        moe_backend: str = ...,
    ) -> Any: ...


class WeightUpdates:
    """Nothing is written before all tensors are known to fit: `prepare` raises, or `commit` only copies. Ranks prepare
    together, so that none has new weights where another has old ones."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        load: LoadsModel,
        config: WeightTransferConfig,
        device: torch.device,
        rank: int,
        refusal: str | None = None,
    ) -> None:
        """`checkpoint`: what the engine was started with. `refusal`: why this engine cannot get other weights."""
        self._model, self._checkpoint, self._load, self._device = model, checkpoint, load, device
        self._config, self._rank = config, rank
        if getattr(model, "mapped_bytes", 0):
            refusal = "its weights are mapped from a file; leave out --packed-weights-cache"
        elif not isinstance(model, DecoderModel):
            refusal = "transformers runs its model"
        self._refusal = refusal
        self._engine: TransferEngine | None = None
        self._given: dict[str, CheckpointTensor] | None = None  # while an update is under way
        self.updated = False  # whether the weights are not those that the engine was started with
        self._replacements: list[Replacement] | None = None  # None: tensors are read into the model's own parameters

    def call(self, step: str, info: Any = None) -> None:
        """A step of an update, by its name."""
        steps: dict[str, Callable[[Any], None]] = {
            "check": lambda _: self._check_reload(),
            "init": self._init,
            "shutdown": lambda _: self.shutdown(),
            "start": lambda _: self._start(),
            "add": self._add,
            "prepare": lambda _: self._prepare(),
            "commit": lambda _: self._commit(),
            "abandon": lambda _: self._abandon(),
        }
        steps[step](info)

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def reloadable(self) -> list[torch.Tensor]:
        """What an update fills again, if weights are discarded."""
        if not loads_in_place(self._model):
            return tensors_of(self._model)
        return [slot.view for slot in all_load_slots(self._model).values()]

    def others(self) -> list[torch.Tensor]:
        """The rest, such as tables of positions."""
        again = {tensor.untyped_storage().data_ptr() for tensor in self.reloadable()}
        return [held for held in tensors_of(self._model) if held.untyped_storage().data_ptr() not in again]

    def _init(self, info: Any) -> None:
        if not isinstance(info, Mapping):
            raise ValueError(f"init_info is {shown(info)}; it must be an object")
        self.shutdown()
        self._engine = make_transfer_engine(self._config, info, self._device, self._rank)

    def _check(self) -> None:
        if self._refusal is not None:
            raise ValueError(f"this engine cannot get new weights: {self._refusal}")

    def _check_reload(self) -> None:
        """Whether weights that are discarded could be had again."""
        self._check()
        if self._checkpoint.format == "sharded_state":
            raise ValueError("sharded state cannot be read again yet; sleep at level 1")

    def _start(self) -> None:
        self._check()
        if self._given is not None:
            raise ValueError("an update of weights is under way; finish it first (finish_weight_update)")
        self._given = {}

    def _add(self, info: Any) -> None:
        if self._given is None:
            raise ValueError(MISSING_START)
        parts = info if isinstance(info, (list, tuple)) else [info]
        for part in parts:
            if not isinstance(part, Mapping):
                raise ValueError(f"update_info is {shown(part)}; it must be an object")
            received = "names" in part
            if received and self._engine is None:
                raise ValueError("tensors by their names come from a trainer; connect it (init_weight_transfer_engine)")
            tensors = self._engine.receive(part) if received and self._engine else read_source(part, self._checkpoint)
            twice = [tensor.name for tensor in tensors if tensor.name in self._given]
            if twice:
                raise ValueError(f"the update has {abbreviated(twice)} twice")
            self._given.update((tensor.name, tensor) for tensor in tensors)

    def _prepare(self) -> None:
        if self._given is None:
            raise ValueError(MISSING_START)
        tensors = list(self._given.values())
        if loads_in_place(self._model):
            self._take_tied_heads()
            self._load(self._checkpoint, tensors=outlines(self._given.values()), device="meta", moe_backend="auto")
            self._replacements = None
            return
        try:
            new = self._load(self._checkpoint, tensors=tensors)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                "weights that are converted while they load need room for a second copy; give the KV cache's up "
                f"meanwhile (pause, release_kv_cache_memory): {error}"
            ) from None
        self._replacements = replacements(self._model, new)

    def _commit(self) -> None:
        assert self._given is not None, MISSING_START
        try:
            if self._replacements is None:
                load_weights(self._model, list(self._given.values()))
            else:
                replace_all(self._replacements)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the tensors may be someone else's memory
            self.updated = True
            logger.info("%d tensors of new weights are in use", len(self._given))
        finally:
            self._abandon()

    def _abandon(self) -> None:
        self._given = self._replacements = None

    def _take_tied_heads(self) -> None:
        """Out of the update, once they are known to equal the embedding: loading would find that too late."""
        assert self._given is not None
        model = self._model
        embeddings = [
            self._given[n] for n in model.family_weights().names_of("embed_tokens.weight") if n in self._given
        ]
        for name in model.head_names() if model.has_tied_head else ():
            head = self._given.pop(name, None)
            if head is not None and embeddings and not _equal(head, embeddings[0]):
                raise ValueError(f"{name} differs from the embedding, but in this engine they are tied")


def _equal(one: CheckpointTensor, other: CheckpointTensor) -> bool:
    if tuple(one.shape) != tuple(other.shape):
        return False
    read = [torch.empty(tuple(tensor.shape)) for tensor in (one, other)]
    for tensor, out in zip((one, other), read, strict=True):
        tensor.read_into(out)
    return torch.equal(*read)


def loads_in_place(model: nn.Module) -> bool:
    """Whether parameters are what the checkpoint has, unconverted: unquantized, and on a GPU or in float32."""
    for module in model.modules():
        method = getattr(module, "method", None)
        for holder in (module, getattr(method, "base", method)):
            plain = isinstance(holder, FusedMoE) and not holder.backend.packs_weights
            if (not plain and not leaves_panels_only(type(holder))) or hasattr(holder, "multiply"):
                return False
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    slots = all_load_slots(model).values()
    return all(not slot.view.is_meta and slot.view.untyped_storage().data_ptr() in own for slot in slots)
