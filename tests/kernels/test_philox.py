import torch

from quire.kernels.philox import Purpose, philox_uniform, philox_uniform_torch, philox_words


def words(seed: int, position: int, purpose: int = 0) -> list[str]:
    found = philox_words(torch.tensor([seed]), torch.tensor([position]), purpose)
    return [f"{int(w):08x}" for w in found]


def test_known_answer():
    """The published vector of philox4x32-10 for a zero key and counter."""
    assert words(0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_negative_seeds_use_all_64_bits():
    assert words(-1, 5) == words(2**64 - 1 - 2**64, 5) != words(1, 5)


def test_draws_are_uniform_and_differ_by_seed_position_and_purpose():
    position = torch.arange(20_000)
    draws = philox_uniform(torch.zeros_like(position), position)
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws.float(), bins=20, min=0, max=1)
    assert counts.sub(1000).abs().max() < 150
    other = [
        philox_uniform(torch.ones_like(position), position),
        philox_uniform(torch.zeros_like(position), position, Purpose.ACCEPT),
    ]
    for draw in other:
        assert (draw != draws).all()
        assert abs(float(torch.corrcoef(torch.stack([draw, draws]))[0, 1])) < 0.03


def test_numbers_are_the_same_in_c():
    seeds = torch.tensor([0, 1, -5, 2**63 - 1, -(2**63), 987654321987])
    positions = torch.tensor([0, 1, 2**32 + 5, 77, 3, 2**40])
    for purpose in Purpose:
        assert torch.equal(philox_uniform(seeds, positions, purpose), philox_uniform_torch(seeds, positions, purpose))
