"""Draft heads on a GPU: the same text as without, and the drafts that plain torch computes, through graphs and
without."""

from pathlib import Path

import pytest
import torch

from quire.kernels.append_drafts import append_drafts, append_drafts_cpu
from tests.spec_decode import heads, test_eagle
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, folder)
    return str(folder)


def generate(model: str, head: dict | None = None, **options) -> list[list[int]]:
    return test_eagle.generate(model, head, max_num_seqs=8, num_gpu_blocks_override=200, **options)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_text_and_drafts_of_eagle(target: str, tmp_path: Path, name: str, eager: bool) -> None:
    folder = tmp_path / name
    folder.mkdir()
    saved = test_eagle.SAVED[name](folder)
    heads.PROPOSED.clear()
    found = generate(target, test_eagle.method(name, saved), enforce_eager=eager)
    assert found == generate(target)
    test_eagle.check_drafts(target, saved, 3)


@pytest.mark.parametrize("eager", [False, True])
def test_text_of_medusa(target: str, tmp_path: Path, eager: bool) -> None:
    saved = heads.save_medusa(tmp_path, 64, 211)
    head = {"method": "medusa", "model": saved, "num_speculative_tokens": 3}
    assert generate(target, head, enforce_eager=eager) == generate(target)


class Rows:
    def __init__(self, device: str) -> None:
        self.token_ids = torch.arange(60, dtype=torch.int32, device=device).view(4, 15)[:, 1:]
        self.num_tokens = torch.tensor([3, 5, 14, 7], device=device)
        self.num_computed = torch.tensor([3, 4, 14, 7], device=device)


@pytest.mark.parametrize("mapped", [False, True])
def test_append_drafts(mapped: bool) -> None:
    """Padding and rows with more of a prompt to come are left alone; a full row keeps its place."""
    ours, theirs = Rows("cuda"), Rows("cpu")
    drafts, rows = torch.tensor([2, -1, 5, 3, 4]), torch.tensor([3, 0, 1, -1, 2], dtype=torch.int32)
    to_target = torch.tensor([10, 20, 30, 40, 50, 60]) if mapped else None
    append_drafts(drafts.cuda(), rows.cuda(), ours, None if to_target is None else to_target.cuda())
    append_drafts_cpu(drafts, rows, theirs, to_target)
    assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
    assert torch.equal(ours.num_tokens.cpu(), theirs.num_tokens)
