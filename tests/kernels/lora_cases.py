"""Low-rank terms against their torch reference, on any device: C and Triton's interpreter here, a GPU in tests/gpu."""

import torch

from quire.kernels.lora import (
    LowRank,
    add_low_rank,
    add_low_rank_torch,
    slots_of_tokens_torch,
    write_slots_of_tokens,
)

LAYERS = {  # inputs, sizes of the outputs' parts, rank
    "plain": (192, (72,), 8),
    "merged": (64, (96, 96), 16),
    "query, key, value": (130, (128, 32, 32), 5),
    "wide": (1100, (40, 24, 24), 20),
}
SLOTS = {
    "one": [1],
    "none": [-1, -1, -1],
    "mixed": [0, -1, 2, 2, -1, 1, 0, 2],
    "many": [2] * 20 + [-1] * 20 + [0, 1] * 5,
}


def make(layer: str, slots: str, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    num_inputs, sizes, rank = LAYERS[layer]
    a = torch.randn(3, len(sizes) * rank, num_inputs) / num_inputs**0.5
    b = torch.randn(3, sum(sizes), rank) / rank**0.5
    count = len(SLOTS[slots])
    x, out = torch.randn(count, num_inputs), torch.randn(count, sum(sizes))
    of_rows = torch.tensor([*SLOTS[slots], 0, 0], dtype=torch.int32)  # a step's buffer goes on after its tokens
    return *(tensor.to(device, dtype) for tensor in (a, b, x, out)), of_rows.to(device)


def ranks_of(b: torch.Tensor) -> torch.Tensor:
    """Of all slots the highest."""
    return torch.full((len(b),), b.shape[2], dtype=torch.int32, device=b.device)


def check(layer: str, slots: str, device: str, dtype: torch.dtype) -> None:
    a, b, x, out, of_rows = make(layer, slots, device, dtype)
    w = LowRank(a, b, tuple(torch.tensor(LAYERS[layer][1]).cumsum(0).tolist()), ranks_of(b))
    wanted, before = out.clone(), out.clone()
    add_low_rank_torch(wanted, x, of_rows, w)
    add_low_rank(out, x, of_rows, w)
    exact = dtype is torch.float32
    torch.testing.assert_close(out, wanted, atol=2e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)
    without = of_rows[: len(x)] < 0
    assert torch.equal(out[without], before[without])
    for row in range(0, len(x), 7):  # the same bits alone
        alone = before[row : row + 1].clone()
        add_low_rank(alone, x[row : row + 1], of_rows[row : row + 1].clone(), w)
        assert torch.equal(alone[0], out[row])


def check_an_infinite_weight_stays_with_its_rows(device: str, dtype: torch.dtype) -> None:
    a, b, x, out, of_rows = make("merged", "mixed", device, dtype)
    a[2, 0, 0] = b[1, 0, 0] = float("inf")
    add_low_rank(out, x, of_rows, LowRank(a, b, (96, 192), ranks_of(b)))
    finite = out.isfinite().all(1).tolist()
    assert finite == [slot in (-1, 0) for slot in SLOTS["mixed"]]
    assert out[5, 1:].isfinite().all() and out[2, 96:].isfinite().all()


def check_rank_0_leaves_outputs_as_they_are(device: str, dtype: torch.dtype) -> None:
    """Whatever its slot holds."""
    a, b, x, out, of_rows = make("merged", "mixed", device, dtype)
    wanted, ranks = out.clone(), ranks_of(b)
    add_low_rank_torch(wanted, x, of_rows, LowRank(a, b, (96, 192), ranks))
    skipped = of_rows[: len(x)] == 2
    wanted[skipped] = out[skipped]
    a[2] = b[2] = float("nan")
    ranks[2] = 0
    add_low_rank(out, x, of_rows, LowRank(a, b, (96, 192), ranks))
    assert torch.equal(out[skipped], wanted[skipped])
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


def check_slots_of_tokens(device: str) -> None:
    row_slots = torch.tensor([1, -1, 0, 2, 1], dtype=torch.int32, device=device)
    rows = torch.tensor([3, 0, -1, 1], dtype=torch.int32, device=device)
    tokens = torch.tensor([0, 0, 1, 2, 3, 3, -1, -1], dtype=torch.int32, device=device)
    for token_rows, wanted in ((None, [2, 1, -1, -1]), (tokens, [2, 2, 1, -1, -1, -1, -1, -1])):
        out = torch.full((10,), 7, dtype=torch.int32, device=device)
        write_slots_of_tokens(out, rows, token_rows, row_slots)
        assert out.tolist() == wanted + [7] * (10 - len(wanted))
        assert slots_of_tokens_torch(rows, token_rows, row_slots).tolist() == wanted
