"""What a rank reads of a checkpoint: its own part, and what every rank has whole."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.checkpoint import mapped
from quire.checkpoint.config import load_hf_config
from quire.checkpoint.gguf_file import GGUFTensor
from quire.checkpoint.resolve import resolve_model
from quire.checkpoint.tensors import open_tensors
from quire.layers.embedding import VocabEmbedding
from quire.layers.parallel import TensorParallel
from quire.models.loading.loader import load_model
from tests.gguf_models import write_random_llama
from tests.quantization.fp8_checkpoints import block_fp8
from tests.quantization.int_checkpoints import awq, gptq, save_checkpoints
from tests.tiny_models import save_tiny


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int, int], int]:
    """Of a checkpoint's files, by a rank of so many."""
    sizes: list[int] = []
    copy = mapped.copy_into

    def counted(name: str, stored: torch.Tensor, out: torch.Tensor) -> None:
        sizes.append(stored.numel() * stored.dtype.itemsize)
        copy(name, stored, out)

    monkeypatch.setattr(mapped, "copy_into", counted)

    def read(folder: Path, rank: int, size: int) -> int:
        sizes.clear()
        checkpoint = resolve_model(str(folder))
        load_model(checkpoint, load_hf_config(checkpoint), torch.float32, "cpu", TensorParallel(rank, size))
        return sum(sizes)

    return read


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "phi3", "mixtral", "qwen3-moe", "olmo2"])
def test_a_rank_reads_its_part(tmp_path: Path, family: str, bytes_read: Callable[[Path, int, int], int]) -> None:
    """Tensors of single and fused layers, and experts. Whole are norms and routers, a few percent of a tiny model."""
    save_tiny(family, tmp_path, vocab_size=212)
    whole = bytes_read(tmp_path, 0, 1)
    routers = 3 * 6 * 64 * 4 if family in ("mixtral", "qwen3-moe") else 0
    for size in (2, 4):
        # With four ranks the two KV heads are read twice.
        repeated = 0 if size == 2 else 4 * 2 * 64 * 64 * 4 // 4
        for rank in range(size):
            assert bytes_read(tmp_path, rank, size) <= whole // size + whole * 0.04 + routers + repeated


@pytest.mark.parametrize("made", [gptq(), awq(), block_fp8()], ids=["gptq", "awq", "fp8 blocks"])
def test_packed_weights_are_read_in_parts(
    tmp_path: Path, made: object, bytes_read: Callable[[Path, int, int], int]
) -> None:
    """Of GPTQ and AWQ the scales and zero points of a row-parallel layer are whole: groups may be split."""
    folder, _ = save_checkpoints("llama", tmp_path, made, intermediate_size=128)  # type: ignore[arg-type]
    whole = bytes_read(folder, 0, 1)
    assert all(bytes_read(folder, rank, 2) < 0.6 * whole for rank in range(2))


def test_weights_that_are_transformed_are_read_whole(
    tmp_path: Path, bytes_read: Callable[[Path, int, int], int]
) -> None:
    """GPT-2 stores them transposed."""
    save_tiny("gpt2", tmp_path)
    assert bytes_read(tmp_path, 0, 2) > 0.9 * bytes_read(tmp_path, 0, 1)


def test_parts_of_any_tensor(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tensor,) = [t for t in open_tensors(resolve_model(str(tmp_path))) if t.name == "model.embed_tokens.weight"]
    embedding = VocabEmbedding(211, 64, torch.float32, torch.device("cpu"), tp=TensorParallel(1, 2))
    ((_, slot),) = embedding.load_slots().items()
    full, part = torch.empty(tensor.shape), torch.empty(105, 64)
    tensor.read_into(full)
    ((_, dim, start),) = slot.pieces(slot.view)
    tensor.read_part(part, dim, start)  # type: ignore[attr-defined]
    assert torch.equal(part, full[106:])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "F16"])
def test_parts_of_gguf_tensors(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, heads in the order of rotary pairs, and columns. Those that begin within a block are read with it."""
    path = write_random_llama(tmp_path / "model.gguf", lambda name: "F32" if "norm" in name else kind)
    read: list[int] = []
    dequantize = GGUFTensor._values

    def counted(self: GGUFTensor, stored: torch.Tensor) -> torch.Tensor:
        read.append(stored.numel())
        return dequantize(self, stored)

    monkeypatch.setattr(GGUFTensor, "_values", counted)
    for tensor in open_tensors(resolve_model(str(path))):
        full = torch.empty(tensor.shape)
        tensor.read_into(full)
        whole = sum(read)
        for dim, size in enumerate(tensor.shape):
            part = torch.empty([n // 2 if i == dim else n for i, n in enumerate(tensor.shape)])
            read.clear()
            tensor.read_part(part, dim, size // 2)  # type: ignore[attr-defined]
            assert torch.equal(part, full.narrow(dim, size // 2, size // 2))
            block = {"Q4_0": 32, "Q4_K": 256, "F16": 1}[kind]
            if len(tensor.shape) == 2 and (dim == 0 or size // 2 % block == 0):
                assert sum(read) == whole // 2
        read.clear()
