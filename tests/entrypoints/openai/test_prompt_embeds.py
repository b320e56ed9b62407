"""Prompts of embeddings in requests: what is read, and what is refused before it takes memory."""

import io
import zipfile
from base64 import b64encode

import pytest
import torch

from quire.entrypoints.openai.prompt_embeds import SPARSE_BYTES, read_prompt_embeds


def saved(value: object, **options: bool) -> bytes:
    held = io.BytesIO()
    torch.save(value, held, **options)
    return held.getvalue()


def deflated(archive: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    return held.getvalue()


def sparse(*shape: int) -> torch.Tensor:
    return torch.sparse_coo_tensor([[1], [0]], [2.0], shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_becomes_a_prompt(dtype: torch.dtype) -> None:
    embeds = torch.randn(5, 8).to(dtype)
    prompt = read_prompt_embeds(b64encode(saved(embeds)).decode())
    assert len(prompt.token_ids) == 5 and prompt.features is not None
    data = torch.from_numpy(prompt.features[0].data.copy())
    assert torch.equal(data.float() if data.dtype.is_floating_point else data.view(dtype).float(), embeds.float())


def test_a_sparse_one_too() -> None:
    prompt = read_prompt_embeds(b64encode(saved(sparse(3, 4))).decode())
    assert len(prompt.token_ids) == 3 and prompt.features is not None and prompt.features[0].data[1, 0] == 2


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"not a tensor", "not a tensor"),
        (saved(torch.zeros(4, 8), _use_new_zipfile_serialization=False), "not a tensor"),
        (deflated(saved(torch.zeros(1000, 1000))), "not a tensor"),  # 4 MB in a few KB
        (saved(torch.zeros(1).expand(10_000, 10_000)), "makes more than"),
        (saved(sparse(SPARSE_BYTES, 4)), "makes more than"),
        (saved({"a": torch.zeros(2, 2)}), "one tensor"),
        (saved(torch.zeros(4, 8, dtype=torch.int64)), "floating-point"),
        (saved(print), "not a tensor"),  # code
    ],
)
def test_refused(sent: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompt_embeds(b64encode(sent).decode())


def test_no_base64() -> None:
    with pytest.raises(ValueError, match="in base64"):
        read_prompt_embeds("***")
