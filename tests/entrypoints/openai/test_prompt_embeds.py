"""Prompts of embeddings in requests: what is read, and what is refused before it takes memory."""

import io
import zipfile
from base64 import b64encode

import pytest
import torch

from quire.entrypoints.openai.prompt_embeds import read_prompt_embeds


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


def pickled(code: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/data/0", b"0" * 64)
    return held.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["whole", "part", "transposed", "parameter"])
def test_a_tensor_becomes_a_prompt(dtype: torch.dtype, kind: str) -> None:
    embeds = torch.randn(5, 8).to(dtype)
    embeds = {"part": embeds[1:3], "transposed": embeds.T, "parameter": torch.nn.Parameter(embeds)}.get(kind, embeds)
    prompt = read_prompt_embeds(b64encode(saved(embeds)).decode())
    assert len(prompt.token_ids) == len(embeds) and prompt.features is not None
    assert torch.equal(torch.from_numpy(prompt.features[0].data.copy()).float(), embeds.detach().float())


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"not a tensor", "not a dense tensor"),
        (saved(torch.zeros(4, 8), _use_new_zipfile_serialization=False), "not a dense tensor"),
        (deflated(saved(torch.zeros(1000, 1000))), "compressed"),  # 4 MB in a few KB
        (saved(torch.zeros(1).expand(10_000, 10_000)), "not all there"),
        (saved(torch.zeros(2, 2).to_sparse()), "_rebuild_sparse_tensor"),
        (saved(torch.zeros(2, 2).to(torch.float8_e4m3fn)), "not a dense tensor"),
        (saved(torch.zeros(2, 2, device="meta")), "not a dense tensor"),
        (saved({"a": torch.zeros(2, 2)}), "one tensor"),
        (saved(torch.zeros(4, 8, dtype=torch.int64)), "LongStorage"),
        (saved(print), "print"),  # code
        (pickled(b"\x80\x02cbuiltins\nbytearray\n(\x8a\x04\x00\xa3\xe1\x11tR."), "bytearray"),  # 300 MB
        (pickled(b"\x80\x02]r\xff\xff\xff\x7f."), "more than a tensor"),  # 16 GB of places
        (pickled(b"\x80\x02" + b"]" * 5000 + b"."), "more than a tensor"),
        (pickled(b"\x80\x02R."), "not a dense tensor"),
        (pickled(b"\x80\x02."), "not a dense tensor"),
    ],
)
def test_refused(sent: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_prompt_embeds(b64encode(sent).decode())


def test_no_base64() -> None:
    with pytest.raises(ValueError, match="in base64"):
        read_prompt_embeds("***")
