import os
import pickle
from pathlib import Path

import pytest
import torch

from quire.checkpoint.resolve import Checkpoint
from quire.checkpoint.tensors import open_tensors


def checkpoint(*files: Path) -> Checkpoint:
    return Checkpoint("test", "pt", files[0].parent, files)


def save(path: Path, content: object, **options) -> Path:
    torch.save(content, path, **options)
    return path


class Malicious:
    """Would leave a file behind when unpickled without care."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tensors_are_cast_into_the_model(tmp_path, zipped, wanted):
    weight = torch.randn(7, 5)
    tensors = {"w": weight, "t": weight.t(), "tied": weight, "scalar": torch.tensor(2.5)}
    file = save(tmp_path / "pytorch_model.bin", tensors, _use_new_zipfile_serialization=zipped)
    opened = list(open_tensors(checkpoint(file)))
    assert [(t.name, t.shape) for t in opened] == [(name, tuple(value.shape)) for name, value in tensors.items()]
    for tensor in opened:
        out = torch.empty(tensor.shape, dtype=wanted)
        tensor.read_into(out)
        assert torch.equal(out, tensors[tensor.name].to(wanted))


def test_shards(tmp_path):
    one = save(tmp_path / "1.bin", {"a": torch.ones(2)})
    two = save(tmp_path / "2.bin", {"b": torch.ones(2)})
    assert [tensor.name for tensor in open_tensors(checkpoint(one, two))] == ["a", "b"]
    with pytest.raises(ValueError, match=r"a is in both .*1\.bin and .*3\.bin"):
        list(open_tensors(checkpoint(one, save(tmp_path / "3.bin", {"a": torch.ones(2)}))))


@pytest.mark.parametrize("form", ["zip", "before-1.6", "pickle"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, form):
    mark = tmp_path / "was-here"
    file = tmp_path / "pytorch_model.bin"
    content = {"w": Malicious(mark)}
    if form == "pickle":
        file.write_bytes(pickle.dumps(content, protocol=2))
    else:
        save(file, content, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is refused.*run code.*safetensors"):
        list(open_tensors(checkpoint(file)))
    assert not mark.exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_truncated_file(tmp_path, zipped, kept):
    file = save(tmp_path / "pytorch_model.bin", {"w": torch.ones(50)}, _use_new_zipfile_serialization=zipped)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is (corrupt or truncated|refused)"):
        list(open_tensors(checkpoint(file)))


def test_other_things_than_tensors(tmp_path):
    with pytest.raises(ValueError, match="holds a list"):
        list(open_tensors(checkpoint(save(tmp_path / "a.bin", [torch.ones(2)]))))
    with pytest.raises(ValueError, match="'state_dict' is a dict"):
        list(open_tensors(checkpoint(save(tmp_path / "b.bin", {"state_dict": {"w": torch.ones(2)}}))))


def test_wrong_shape(tmp_path):
    (tensor,) = open_tensors(checkpoint(save(tmp_path / "a.bin", {"w": torch.ones(2, 3)})))
    with pytest.raises(ValueError, match=r"Tensor w .* shape \(2, 3\) .* expects \(3, 2\)"):
        tensor.read_into(torch.empty(3, 2))
