"""Drafts that are looked up, on a GPU: the kernel of prompt lookup, and both methods through the engine."""

import functools

import pytest
import torch

from quire.kernels.ngram_drafts import new_workspace, ngram_drafts
from tests.kernels import ngram_cases
from tests.spec_decode.lookup_texts import PARAMS, PROMPTS, engine, texts
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tile", [16, 256, 2048])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_found(seed, tile):
    from quire.kernels.triton import ngram_drafts as kernel

    workspace = kernel.NgramWorkspace(torch.device("cuda"), 12)
    find = functools.partial(kernel.ngram_drafts, workspace=workspace, tile=tile)
    for _ in range(3):  # the workspace is as it was
        ngram_cases.check(seed, "cuda", find)


def test_long_rows_are_split_among_programs():
    """The n-gram is the very first of a row of 131,072 tokens; in every second row there is none."""
    rows, width = 64, 131_072
    ids = torch.arange(width + 8, dtype=torch.int32, device="cuda").repeat(rows, 1)
    known = torch.full((rows,), width - 100, device="cuda")
    ids[::2, width - 104 : width - 100] = torch.arange(4, dtype=torch.int32, device="cuda")
    found = torch.zeros(rows, dtype=torch.int32, device="cuda")
    state = ngram_cases.Rows(ids, known, known - 1, known + 50, found)
    workspace = new_workspace(torch.device("cuda"), rows)
    for _ in range(20):
        ngram_drafts(torch.arange(rows, dtype=torch.int32, device="cuda"), state, 2, 4, 5, workspace)
        assert found.tolist() == [5, 0] * (rows // 2)
    assert ids[::2, width - 100 : width - 95].tolist() == [[4, 5, 6, 7, 8]] * (rows // 2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    save_tiny("llama", model)
    return str(model)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_the_text_is_that_of_one_token_a_step(tiny, method, eager):
    """Twice, as outputs of the first time are drafts of the second; with rows that other requests have left."""
    prompts, params = PROMPTS * 3, PARAMS * 3
    found = []
    for config in (None, {"method": method, "num_speculative_tokens": 5}):
        options = {"max_num_seqs": 6, "num_gpu_blocks_override": 200, "enforce_eager": eager}
        llm = engine(tiny, **options, **({"speculative_config": config} if config else {}))
        try:
            found.append([texts(llm, prompts, params) for _ in range(2)])
        finally:
            llm.shutdown()
    assert found[0] == found[1]
