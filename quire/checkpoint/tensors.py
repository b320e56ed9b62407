"""The weights of a checkpoint in any format: named tensors that copy themselves into parameters."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.safetensors_file import open_safetensors

if TYPE_CHECKING:
    import torch

    from quire.checkpoint.upload import Upload


class CheckpointTensor(Protocol):
    """One weight. Read only in `read_into`, slice by slice, so that little memory is used beside `out`."""

    name: str  # the Hugging Face name, also for GGUF
    shape: tuple[int, ...]

    def read_into(self, out: "torch.Tensor") -> None:
        """Copy (cast, dequantize) into `out`, a view of this shape, any float type, on any device."""


class SizedTensor(CheckpointTensor, Protocol):
    """As stored in a file."""

    nbytes: int


@runtime_checkable
class ReadsParts(Protocol):
    """A weight whose parts can be read without the rest."""

    def read_part(self, out: "torch.Tensor", dim: int, start: int) -> None:
        """Copy what begins at `start` along `dim` into `out`, otherwise of this shape."""


def read_part(tensor: CheckpointTensor, out: "torch.Tensor", dim: int, start: int) -> None:
    """Of any weight: one that cannot read parts is read whole."""
    if isinstance(tensor, ReadsParts):
        tensor.read_part(out, dim, start)
        return
    full = out.new_empty(tensor.shape)
    tensor.read_into(full)
    out.copy_(full.narrow(dim, start, out.shape[dim]))


def open_tensors(checkpoint: Checkpoint, upload: "Upload | None" = None) -> Iterator[SizedTensor]:
    """All weights in the order of the files; none for a dummy checkpoint. `upload`: what takes those of safetensors to
    a device."""
    if checkpoint.format == "gguf":
        from quire.checkpoint.gguf_file import open_gguf

        yield from open_gguf(checkpoint.path)
    elif checkpoint.format == "pt":
        from quire.checkpoint.pt_file import open_pt

        yield from open_pt(checkpoint.files)
    elif checkpoint.format == "sharded_state":
        raise ValueError(
            f"{checkpoint.path} holds the weights of layers in parts, one for each rank; the tensors that are needed "
            "beside them are in the checkpoint that they were made of: load that one (--load-format auto)"
        )
    else:
        yield from open_safetensors(checkpoint.files, upload)


@contextmanager
def reader_pool(threads: int | None = None) -> Iterator[Executor]:
    """Threads that call `read_into`, one tensor each, while torch's own threads are disabled.

    Torch splits each of the many short operations of dequantization over its threads and waits for the slowest: on busy
    cores ten times slower than a single thread. Whole tensors per thread need no such waits. A single thread is the
    caller's own, whose memory pool is that of all that it allocates.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pool_of(threads or min(before, os.cpu_count() or 1), "weights") as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def pool_of(threads: int, name: str) -> Executor:
    """A single thread is the caller's own."""
    return _InPlace() if threads <= 1 else ThreadPoolExecutor(threads, name)


class _InPlace(Executor):
    """Calls are made by whoever submits them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
