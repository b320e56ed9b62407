"""Weights from a trainer's process, broadcast by NCCL or gloo to every worker; the trainer's side is trainer.py."""

import datetime
from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from quire.checkpoint.safetensors_file import DTYPES, MAX_ELEMENTS
from quire.checkpoint.tensors import CheckpointTensor
from quire.config.shown import shown
from quire.config.values import whole_number
from quire.config.weight_transfer import WeightTransferConfig
from quire.weights.sources import TensorAtHand

MEETING_SECONDS = 60.0  # for which the engine waits for a trainer, and makes no steps
SECONDS = 300.0  # for a tensor to come
SENDER = 0  # the trainer's rank; workers follow
INIT_KEYS = ("master_address", "master_port", "rank_offset", "world_size")
UPDATE_KEYS = ("names", "dtype_names", "shapes")
TORCH_NAMES = frozenset(name for name, _ in DTYPES.values())


class TransferGroup(Protocol):
    """A process group of torch's, of which its stubs do not know this."""

    def broadcast(self, tensors: list[torch.Tensor], options: Any, /) -> Any: ...


class TransferEngine(Protocol):
    """What connects a worker with a trainer."""

    def receive(self, info: Mapping[str, Any]) -> list[CheckpointTensor]:
        """The tensors that an update_info announces, in its order."""
        ...

    def close(self) -> None: ...


class BroadcastEngine:
    def __init__(self, group: TransferGroup, device: torch.device) -> None:
        """`device`: where tensors are received; they are kept on the host until all have come."""
        self._group: TransferGroup | None = group
        self._device = device

    def receive(self, info: Mapping[str, Any]) -> list[CheckpointTensor]:
        announced = read_announcement(info)  # before anything is waited for
        return [self._receive(name, dtype, shape) for name, dtype, shape in announced]

    def close(self) -> None:
        self._group = None

    def _receive(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> CheckpointTensor:
        assert self._group is not None
        received = torch.empty(shape, dtype=dtype, device=self._device)
        broadcast(self._group, received)
        return TensorAtHand(name, received.cpu())


def make_transfer_engine(
    config: WeightTransferConfig, info: Mapping[str, Any], device: torch.device, rank: int
) -> TransferEngine:
    """Meets the trainer. `rank`: this worker's among all."""
    if config.backend is None:
        raise ValueError("the engine was started without a way to a trainer (--weight-transfer-config)")
    if config.backend == "nccl" and device.type != "cuda":
        raise ValueError('weight_transfer_config: backend "nccl" needs a GPU; allowed here: gloo')
    if "nccl_unique_id_b64" in info or info.get("packed"):
        raise ValueError(f"init_info: nccl_unique_id_b64 and packed are not available; allowed: {', '.join(INIT_KEYS)}")
    lacking = [key for key in INIT_KEYS if key not in info and key != "rank_offset"]
    if lacking:
        raise ValueError(f"init_info lacks {', '.join(lacking)}; it must have {', '.join(INIT_KEYS)}")
    address = info["master_address"]
    if not isinstance(address, str):
        raise ValueError(f"init_info: master_address is {shown(address)}; it must be the trainer's address")
    port = whole_number("init_info: master_port", info["master_port"], 1, 65535)
    size = whole_number("init_info: world_size", info["world_size"], 2, 2**16)
    own = whole_number("init_info: rank_offset", info.get("rank_offset", 1), 1, size - 1) + rank
    if own >= size:
        raise ValueError(f"init_info: world_size is {size}; with the trainer and all workers it is at least {own + 1}")
    try:
        group = connect(config.backend, address, port, own, size, device)
    except (RuntimeError, ValueError) as error:  # torch's, of sockets
        raise ValueError(f"the trainer at {address}:{port} cannot be reached: {error}") from None
    return BroadcastEngine(group, device if config.backend == "nccl" else torch.device("cpu"))


def connect(
    backend: str, address: str, port: int, rank: int, size: int, device: torch.device, seconds: float = MEETING_SECONDS
) -> TransferGroup:
    """A process group of the trainer, at whose address all meet, and the workers; no other group knows of it."""
    meeting, limit = datetime.timedelta(seconds=seconds), datetime.timedelta(seconds=SECONDS)
    store = dist.TCPStore(address, port, size, rank == SENDER, meeting, wait_for_workers=False)
    scoped = dist.PrefixStore("quire-weights", store)
    if backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL  # not there in torch's builds without CUDA
        options = nccl.Options()
        options._timeout = limit
        with torch.cuda.device(device):
            return cast(TransferGroup, nccl(scoped, rank, size, options))
    return cast(TransferGroup, dist.ProcessGroupGloo(scoped, rank, size, limit))


def broadcast(group: TransferGroup, tensor: torch.Tensor) -> None:
    """From the trainer. As bytes: neither library knows all types."""
    options = dist.BroadcastOptions()
    options.rootRank = SENDER
    group.broadcast([tensor.view(-1).view(torch.uint8)], options).wait()


def read_announcement(info: Mapping[str, Any]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of tensors on their way. ValueError for anything else."""
    if info.keys() != set(UPDATE_KEYS) or not all(isinstance(info[key], (list, tuple)) for key in UPDATE_KEYS):
        raise ValueError(f"update_info must have lists of tensors' {', '.join(UPDATE_KEYS)}, and nothing else")
    names, dtypes, shapes = (info[key] for key in UPDATE_KEYS)
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(f"update_info has {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} shapes")
    found = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(name, str) or dtype not in TORCH_NAMES or not isinstance(shape, (list, tuple)):
            types = ", ".join(sorted(TORCH_NAMES))
            raise ValueError(f"update_info has {shown([name, dtype, shape])}; types are {types}")
        sizes = tuple(whole_number(f"update_info: a size of {name}", size, 0, MAX_ELEMENTS) for size in shape)
        found.append((name, getattr(torch, dtype), sizes))
    return found
