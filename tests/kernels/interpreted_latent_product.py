"""Products with each head's weight, of many units: larger tiles, with parts that are combined on the way."""

import pytest
import torch

import tests.kernels.interpreter_fix  # noqa: F401
from quire.kernels.triton.latent_product import ManyTuning, Parts, into_latent, out_of_latent

HEADS, RANK, NOPE, V = 3, 48, 24, 20
UNITS = 70  # more than are multiplied in the smaller tiles


def half(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape) * 0.3).half()  # the interpreter multiplies matrices in float16, but not in bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), wanted.float(), atol=4e-3, rtol=4e-3)


def parts_of(most: int) -> tuple[Parts, torch.Tensor]:
    """Some, and what they are together; past a unit's count is what must not be read."""
    parts = Parts.empty(UNITS, HEADS, most, RANK, torch.device("cpu"))
    parts.out.fill_(float("nan"))
    parts.sums.fill_(float("nan"))
    parts.counts.copy_(torch.randint(1, most + 1, (UNITS,)))
    wanted = torch.zeros(UNITS, HEADS, RANK)
    for unit, count in enumerate(parts.counts.tolist()):
        most_of_all, sums = torch.randn(HEADS, count), torch.rand(HEADS, count) + 0.5
        values = torch.randn(HEADS, count, RANK) * 0.3
        parts.out[unit, :, :count] = values
        parts.sums[unit, :, :count] = torch.stack((most_of_all, sums), -1)
        shares = torch.exp2(most_of_all)
        wanted[unit] = (values * shares[..., None]).sum(1) / (sums * shares).sum(1, keepdim=True)
    return parts, wanted


@pytest.mark.parametrize("most", [1, 3, 8, 11])
@pytest.mark.parametrize("tuning", [None, ManyTuning(16, 64, 16), ManyTuning(32, 16, 32)])
def test_out_of_parts(most, tuning):
    (parts, vectors), w = parts_of(most), half(HEADS, V, RANK)
    out = torch.full((UNITS, HEADS, V), float("nan")).half()
    out_of_latent(parts, w, out, tuning=tuning)
    close(out, torch.einsum("uhr,hvr->uhv", vectors.half().float(), w.float()))


def test_a_unit_without_keys_is_zero():
    parts, _ = parts_of(2)
    parts.counts[5] = 1
    parts.out[5, :, 0], parts.sums[5, :, 0] = 0.0, torch.tensor([float("-inf"), 0.0])
    out = torch.full((UNITS, HEADS, V), float("nan")).half()
    out_of_latent(parts, half(HEADS, V, RANK), out)
    assert not out[5].any() and out.isfinite().all()


@pytest.mark.parametrize("tuning", [None, ManyTuning(64, 16, 16)])
def test_into(tuning):
    q, w = half(UNITS, HEADS, NOPE + 8)[..., :NOPE], half(HEADS, NOPE, RANK)
    close(into_latent(q, w, tuning=tuning), torch.einsum("uhn,hnr->uhr", q.float(), w.float()))


@pytest.mark.parametrize("tuning", [None, ManyTuning(16, 32, 16)])
def test_units_of_some_tokens(tuning):
    tokens = torch.full((UNITS,), -1, dtype=torch.int32)
    tokens[[0, 3, 66]] = torch.tensor([4, 0, 2], dtype=torch.int32)
    units, taken = torch.tensor([0, 3, 66]), torch.tensor([4, 0, 2])
    q, w = half(5, HEADS, NOPE), half(HEADS, NOPE, RANK)
    got = into_latent(q, w, tokens, many=True, tuning=tuning)
    close(got[units], torch.einsum("uhn,hnr->uhr", q[taken].float(), w.float()))
    x, w, out = half(UNITS, HEADS, RANK), half(HEADS, V, RANK), torch.zeros(5, HEADS, V).half()
    out_of_latent(x, w, out, tokens, many=True, tuning=tuning)
    close(out[taken], torch.einsum("uhr,hvr->uhv", x[units].float(), w.float()))
    assert not out[[1, 3]].any()
