from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import open_tensors


def checkpoint(*files: Path) -> Checkpoint:
    return Checkpoint("test", "safetensors", files[0].parent, files)


def save(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def read(tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(tensor.shape, dtype=dtype)
    tensor.read_into(out)
    return out


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_cast_into_the_model(tmp_path, stored, wanted):
    weight = torch.randn(7, 5).to(stored)
    (tensor,) = open_tensors(checkpoint(save(tmp_path / "model.safetensors", w=weight)))
    assert (tensor.name, tensor.shape) == ("w", (7, 5))
    assert torch.equal(read(tensor, wanted), weight.to(wanted))


def test_read_into_a_view_of_a_larger_parameter(tmp_path):
    weight = torch.randn(4, 6)
    (tensor,) = open_tensors(checkpoint(save(tmp_path / "model.safetensors", k=weight)))
    fused = torch.zeros(12, 6)
    tensor.read_into(fused[4:8])
    assert torch.equal(fused[4:8], weight)
    assert not fused[:4].any() and not fused[8:].any()


def test_tensors_of_odd_sizes_between_others(tmp_path):
    tensors = {
        "a": torch.arange(3, dtype=torch.uint8),
        "b": torch.randn(3),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 4),
    }
    for tensor in open_tensors(checkpoint(save(tmp_path / "model.safetensors", **tensors))):
        assert torch.equal(read(tensor, tensors[tensor.name].dtype), tensors[tensor.name])


def test_shards_come_in_order_and_are_counted(tmp_path):
    one = save(tmp_path / "1.safetensors", a=torch.ones(2), b=torch.ones(3))
    two = save(tmp_path / "2.safetensors", c=torch.ones(4))
    assert [tensor.name for tensor in open_tensors(checkpoint(one, two))] == ["a", "b", "c"]


def test_the_same_tensor_in_two_shards(tmp_path):
    one = save(tmp_path / "1.safetensors", a=torch.ones(2), twice=torch.ones(3))
    two = save(tmp_path / "2.safetensors", twice=torch.ones(3))
    with pytest.raises(ValueError, match=r"Tensor twice is in both .*1\.safetensors and .*2\.safetensors"):
        next(open_tensors(checkpoint(one, two)))


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_truncated_file(tmp_path, size):
    file = save(tmp_path / "model.safetensors", a=torch.ones(100))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt or truncated"):
        list(open_tensors(checkpoint(file)))


def test_garbage(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((8).to_bytes(8, "little") + b"not json" + b"\0" * 100)
    with pytest.raises(ValueError, match="header is malformed"):
        list(open_tensors(checkpoint(file)))


def test_wrong_shape(tmp_path):
    (tensor,) = open_tensors(checkpoint(save(tmp_path / "model.safetensors", w=torch.ones(2, 3))))
    with pytest.raises(ValueError, match=r"Tensor w .* shape \(2, 3\) .* expects \(3, 2\)"):
        tensor.read_into(torch.empty(3, 2))


def test_dummy_has_no_tensors(tmp_path):
    assert list(open_tensors(Checkpoint("test", "dummy", tmp_path, ()))) == []


def test_integers_are_read_without_loss_or_refused(tmp_path):
    files = {
        "fits": torch.tensor([1.0, -3.0]),
        "wide": torch.tensor([7, -128]),
        "words": torch.tensor([2**32 - 1, 5], dtype=torch.uint32),
        "fraction": torch.tensor([0.5, 1.0]),
        "large": torch.tensor([128, 0]),
        "nan": torch.tensor([torch.nan, 0]),
    }
    found = {t.name: t for t in open_tensors(checkpoint(save(tmp_path / "model.safetensors", **files)))}
    assert read(found["fits"], torch.int8).tolist() == [1, -3] and read(found["wide"], torch.int8).tolist() == [7, -128]
    assert read(found["words"], torch.int32).tolist() == [-1, 5]
    for name in ("fraction", "large", "nan"):
        with pytest.raises(ValueError, match=rf"Tensor {name} .*that torch\.int8 does not hold"):
            read(found[name], torch.int8)


def test_fp8_is_read_without_loss_or_refused(tmp_path):
    files = {
        "fits": torch.tensor([1.5, -448.0]),
        "octets": torch.arange(256).to(torch.uint8),
        "fine": torch.tensor([0.3]),
    }
    found = {t.name: t for t in open_tensors(checkpoint(save(tmp_path / "model.safetensors", **files)))}
    assert read(found["fits"], torch.float8_e4m3fn).float().tolist() == [1.5, -448.0]
    for name in ("octets", "fine"):
        with pytest.raises(ValueError, match=rf"Tensor {name} .*that torch\.float8_e4m3fn does not hold"):
            read(found[name], torch.float8_e4m3fn)


def test_exponents_are_read_as_bytes_or_numbers(tmp_path):
    stored = torch.tensor([120, 127, 130], dtype=torch.uint8)
    file = save(tmp_path / "model.safetensors", scale=stored.view(torch.float8_e8m0fnu))
    (tensor,) = open_tensors(checkpoint(file))
    assert torch.equal(read(tensor, torch.uint8), stored)
    assert read(tensor, torch.float32).tolist() == [2.0**-7, 1.0, 8.0]
