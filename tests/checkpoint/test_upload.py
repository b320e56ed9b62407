"""Tensors that go to a device through page-locked buffers, which are used again only when a copy is done."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.safetensors_file import open_safetensors
from quire.checkpoint.upload import Upload


class LateLink:
    """A device that copies only when somebody waits for it, in order: a buffer that was used again would be seen."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.pending: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.enqueued = self.done = self.buffers = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        with self.lock:
            self.buffers += 1
        return torch.full((nbytes,), 99, dtype=torch.uint8)

    def copy(self, staged: torch.Tensor, out: torch.Tensor) -> None:
        with self.lock:
            self.pending.append((staged, out))
            self.enqueued += 1

    def mark(self) -> "LateMark":
        with self.lock:
            return LateMark(self, self.enqueued)


class LateMark:
    def __init__(self, link: LateLink, number: int) -> None:
        self.link, self.number = link, number

    def query(self) -> bool:
        return self.link.done >= self.number

    def synchronize(self) -> None:
        with self.link.lock:
            while self.link.done < self.number:
                staged, out = self.link.pending.popleft()
                out.copy_(staged)
                self.link.done += 1


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "long": lambda: torch.randn(100, 70),
    "half": lambda: torch.randn(64, 33).half(),
    "wide": lambda: torch.randn(2, 3, 1000),
    "numbers": lambda: torch.arange(5000, dtype=torch.int32).view(50, 100),
    "odd": lambda: torch.arange(3, dtype=torch.uint8),  # what follows is not aligned
    "one": lambda: torch.tensor(7.0),
    "none": lambda: torch.empty(0, 4),
}


@pytest.mark.parametrize("threads", [1, 4])
def test_what_arrives_is_what_is_stored(tmp_path: Path, threads: int) -> None:
    stored = {name: make() for name, make in TENSORS.items()}
    save_file(stored, tmp_path / "model.safetensors")
    link = LateLink()
    upload = Upload(link, threads, buffer_bytes=1000)
    tensors = list(open_safetensors((tmp_path / "model.safetensors",), upload))
    arrived = {tensor.name: torch.zeros(tensor.shape, dtype=stored[tensor.name].dtype) for tensor in tensors}
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda tensor: tensor.read_into(arrived[tensor.name]), tensors))
    upload.wait()
    assert all(torch.equal(arrived[name], stored[name]) for name in stored)
    assert link.buffers == 2 * threads and link.enqueued > 60


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_into_views_of_another_type(tmp_path: Path, dim: int) -> None:
    """Rows, and columns, which are not neighbours in the file; to where they are not neighbours either."""
    weight = torch.randn(40, 600)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    upload = Upload(LateLink(), 2, buffer_bytes=1000)
    (tensor,) = open_safetensors((tmp_path / "model.safetensors",), upload)
    part = weight.narrow(dim, 10, 20)
    fused = torch.zeros(3 * part.shape[0], part.shape[1], dtype=torch.bfloat16)
    tensor.read_part(fused[1::3], dim, 10)
    upload.wait()
    assert torch.equal(fused[1::3], part.bfloat16()) and not fused[0::3].any()


def test_what_a_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.full((40, 600), 0.3)}, tmp_path / "model.safetensors")
    (tensor,) = open_safetensors((tmp_path / "model.safetensors",), Upload(LateLink(), 2, buffer_bytes=1000))
    with pytest.raises(ValueError, match=r"has numbers of torch\.float32 that torch\.int32 does not hold"):
        tensor.read_into(torch.zeros(40, 600, dtype=torch.int32))
    with pytest.raises(ValueError, match="has shape"):
        tensor.read_into(torch.zeros(600, 40))
