"""Low-rank terms against their torch reference, on any device: C and Triton's interpreter here, a GPU in tests/gpu."""

import torch

from quire.kernels.lora import (
    LowRank,
    RowTerms,
    add_low_rank,
    add_low_rank_torch,
    gated_low_rank,
    group_tokens,
    row_words,
    slots_of_tokens_torch,
    write_slots_of_tokens,
)
from quire.kernels.silu_mul import silu_mul
from quire.kernels.skinny_linear import expand_scales, prepare_skinny_linear, skinny_linear, skinny_linear_torch
from quire.kernels.skinny_table import SkinnyConfig

LAYERS = {  # inputs, sizes of the outputs' parts, rank
    "plain": (192, (72,), 8),
    "merged": (64, (96, 96), 16),
    "query, key, value": (130, (128, 32, 32), 5),
    "wide": (1100, (40, 24, 24), 20),
    "whole blocks of outputs": (64, (256, 128, 128), 16),
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
        step = torch.tensor([5], dtype=torch.int32, device=device)
        write_slots_of_tokens(out, rows, token_rows, row_slots, step)
        assert step.item() == 6
        assert out.tolist() == wanted + [7] * (10 - len(wanted))
        assert slots_of_tokens_torch(rows, token_rows, row_slots).tolist() == wanted


def check_many_tokens(device: str, dtype: torch.dtype, count: int) -> None:
    """A tile has one slot, whatever the order of tokens and the number of slots."""
    torch.manual_seed(count)
    num_slots, sizes, rank = 5, (96, 32, 32), 8
    a = torch.randn(num_slots, 3 * rank, 128) / 128**0.5
    b = torch.randn(num_slots, sum(sizes), rank) / rank**0.5
    x, out = torch.randn(count, 128), torch.randn(count, sum(sizes))
    a, b, x, out = (tensor.to(device, dtype) for tensor in (a, b, x, out))
    slots = torch.randint(-1, num_slots, (count,), dtype=torch.int32)
    slots[count // 3 : count // 2] = 2
    ranks = torch.tensor([8, 3, 8, 0, 8], dtype=torch.int32)
    for slot, own in enumerate(ranks.tolist()):
        a.view(num_slots, 3, rank, 128)[slot, :, own:] = 0
        b[slot, :, own:] = 0
    slots, ranks = slots.to(device), ranks.to(device)
    w = LowRank(a, b, (96, 128, 160), ranks)
    wanted, before = out.clone(), out.clone()
    add_low_rank_torch(wanted, x, slots, w)
    add_low_rank(out, x, slots, w)
    exact = dtype is torch.float32
    torch.testing.assert_close(out, wanted, atol=5e-5 if exact else 4e-2, rtol=1e-4 if exact else 2e-2)
    untouched = (slots < 0) | (slots == 3)
    assert torch.equal(out[untouched], before[untouched])


def check_gated(device: str, dtype: torch.dtype, count: int, width: int) -> None:
    """As by two kernels, to the bit: of tokens with and without adapters, and of an adapter that leaves it as it is."""
    torch.manual_seed(count)
    rank = 12
    a = torch.randn(4, 2 * rank, 128) / 128**0.5
    b = torch.randn(4, 2 * width, rank) / rank**0.5
    x, gate_up = torch.randn(count, 128), torch.randn(count, 2 * width)
    a, b, x, gate_up = (tensor.to(device, dtype) for tensor in (a, b, x, gate_up))
    slots = torch.randint(-1, 4, (count,), dtype=torch.int32, device=device)
    ranks = torch.tensor([rank, rank, 0, rank], dtype=torch.int32, device=device)
    w = LowRank(a, b, (width, 2 * width), ranks)
    grouped = group_tokens(slots, 4)
    assert grouped is not None
    found = gated_low_rank(gate_up.clone(), x, w, grouped)
    add_low_rank(gate_up, x, slots, w, grouped)
    assert torch.equal(found, silu_mul(gate_up))


ROW_CASES = {  # inputs, sizes of the outputs' parts, rank, kernel, norm, silu
    "query, key, value in one step": (256, (64, 24, 24), 8, SkinnyConfig("gemv", 4, 256), True, False),
    "gate and up in one step": (256, (48, 48), 20, SkinnyConfig("gemv", 4, 256), True, True),
    "blocks of two parts": (256, (66, 21, 21), 20, SkinnyConfig("gemv", 4, 256), True, False),
    "down in steps": (300, (72,), 16, SkinnyConfig("gemv", 4, 128), False, False),
    "down in a pipeline": (512, (72,), 40, SkinnyConfig("gemv", 2, 128, stages=2), False, False),
}


GROUPS = {"by output": None, "by 8 outputs and 64 inputs": (8, 64), "by 4 outputs and 128 inputs": (4, 128)}


def check_rows(case: str, slots: list[int], device: str, dtype: torch.dtype, quantized: str | None = None) -> None:
    """One or two rows, whose terms the base's product has. `quantized`: its weight, with scales as GROUPS has them."""
    num_inputs, sizes, rank, config, has_norm, silu = ROW_CASES[case]
    torch.manual_seed(1)
    rows, outputs = len(slots), sum(sizes)
    shapes = {
        "a": (3, len(sizes) * rank, num_inputs),
        "b": (3, outputs, rank),
        "x": (rows, num_inputs),
        "weight": (outputs, num_inputs),
        "gain": (num_inputs,),
        "residual": (rows, outputs // 2 if silu else outputs),
    }
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    scales = {"a": num_inputs**-0.5, "b": rank**-0.5, "weight": num_inputs**-0.5}
    given = {name: (tensor * scales.get(name, 1.0)).to(device, dtype) for name, tensor in drawn.items()}
    of_rows = torch.tensor([*slots, 0], dtype=torch.int32, device=device)
    ranks = torch.tensor([rank, rank - 3, 0], dtype=torch.int32, device=device)
    given["b"][1, :, rank - 3 :] = 0
    words = row_words(2, num_inputs, len(sizes) * rank, outputs, torch.device(device))
    w = LowRank(given["a"], given["b"], tuple(torch.tensor(sizes).cumsum(0).tolist()), ranks, *words)
    norm = (given["gain"], 1e-5) if has_norm else None
    residual = None if silu else given["residual"]
    prepare_skinny_linear(torch.device(device))
    step = torch.zeros(1, dtype=torch.int32, device=device)
    terms = RowTerms(of_rows, step, w)
    options = {"norm": norm, "silu": silu, "residual": residual, "terms": terms}
    full = given["weight"].float()
    if quantized is not None:
        groups = GROUPS[quantized]
        given["weight"] = torch.randint(-127, 128, (outputs, num_inputs), dtype=torch.int8, device=device)
        places = (outputs,) if groups is None else (outputs // groups[0], num_inputs // groups[1])
        scale = torch.rand(places, device=device) * num_inputs**-0.5 / 127
        full = given["weight"].float() * (scale[:, None] if groups is None else expand_scales(scale, groups))
        options |= {"weight_scale": scale, "groups": groups}
    for inputs in (torch.full_like(given["x"], 3.0), given["x"]):  # the second step's products are not the first's
        step += 1
        out = skinny_linear(inputs, given["weight"], config=config, **options)

    plain = given["x"].float()
    if norm is not None:
        plain = plain * torch.rsqrt((plain * plain).mean(1, keepdim=True) + norm[1]) * norm[0].float()
    product = plain @ full.T
    add_low_rank_torch(product, plain, of_rows, LowRank(w.a.float(), w.b.float(), w.ends, ranks))
    if silu:
        gate, up = product.chunk(2, dim=1)
        product = torch.nn.functional.silu(gate) * up
    wanted = product if residual is None else product + residual.float()
    exact = dtype is torch.float32
    tolerance = {"atol": 1e-4 if exact else 3e-2, "rtol": 1e-4 if exact else 2e-2}
    torch.testing.assert_close(out.float(), wanted, **tolerance)
    reference = skinny_linear_torch(given["x"], given["weight"], **options)
    torch.testing.assert_close(reference.float(), wanted, **tolerance)
