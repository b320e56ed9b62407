"""The PTX that unpacks weights, executed in Python: the interpreter does not run it, and few machines have a GPU."""

import itertools
import re

import numpy as np
import pytest
import torch

from quire.kernels.int_linear import E2M1, E2M1_BITS, LOOKED_UP, NUMBERS, offset
from quire.kernels.triton.int_unpack import look_up_ptx, unpack_e2m1_ptx, unpack_ptx

HALF = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def pair(bits: np.ndarray, kind: str) -> torch.Tensor:
    """Registers of 32 bits as two numbers each, in float32."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(HALF[kind]).float()


def registers(numbers: torch.Tensor, kind: str) -> np.ndarray:
    return numbers.to(HALF[kind]).view(torch.int16).numpy().view(np.uint32)


def run(ptx: str, words: np.ndarray, added: np.ndarray, result: str = "$0") -> np.ndarray:
    """The few instructions that there are, on arrays of registers."""
    values = {"$1": words, "$2": added}

    def read(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full_like(words, int(name[2:], 16))
        return values[name] if name in values else np.full_like(words, int(name, 0))

    body = re.sub(r"\.reg[^;]*;", "", ptx.strip().strip("{}"))
    for line in filter(None, (line.strip() for line in body.split(";"))):
        op, rest = line.split(None, 1)
        to, *names = [name.strip() for name in rest.split(",")]
        a = [read(name) for name in names]
        if op == "mov.b32":
            values[to] = a[0]
        elif op == "shr.b32":
            values[to] = a[0] >> a[1]
        elif op == "shl.b32":
            values[to] = a[0] << a[1]
        elif op == "and.b32":
            values[to] = a[0] & a[1]
        elif op == "lop3.b32":
            forms = {"0xea": (a[0] & a[1]) | a[2], "0xca": (a[0] & a[1]) | (~a[0] & a[2])}
            values[to] = forms[names[3]]
        elif op == "prmt.b32":
            octets = np.concatenate((a[0].view(np.uint8).reshape(-1, 4), a[1].view(np.uint8).reshape(-1, 4)), 1)
            chosen = np.stack([a[2] >> 4 * i & 15 for i in range(4)], 1)
            assert int(chosen.max()) < 8, "the highest bit of a selector means something else"
            values[to] = np.take_along_axis(octets, chosen.astype(np.int64), 1).view(np.uint32).ravel()
        elif op == "sub.f32":
            values[to] = (a[0].view(np.float32) - a[1].view(np.float32)).view(np.uint32)
        elif op == "cvt.rn.bf16x2.f32":  # the first operand becomes the upper half
            both = torch.from_numpy(np.stack((a[1].view(np.float32), a[0].view(np.float32)), 1).ravel())
            values[to] = registers(both, "bf16x2")
        else:
            kind = op.removeprefix("fma.rn.")
            values[to] = registers(pair(a[0], kind) * pair(a[1], kind) + pair(a[2], kind), kind)
    return values[result]


@pytest.mark.parametrize(("bits", "bf16", "zeros"), list(itertools.product((4, 8), (False, True), (False, True))))
def test_every_field_of_every_word(bits, bf16, zeros):
    kind = "bf16x2" if bf16 else "f16x2"
    halves = np.arange(1 << 16, dtype=np.uint16)
    np.random.default_rng(0).shuffle(halves)
    top = 1 << bits
    points = torch.randint(top, (1 << 16,)) if zeros else torch.full((1 << 16,), top // 2)
    added = registers(-(points.float() + offset(bits, HALF[kind])), kind)
    for field in range(16 // bits):
        got = pair(run(unpack_ptx(field, bits, bf16, zeros), halves.view(np.uint32), added), kind)
        codes = torch.from_numpy((halves >> (bits * field)).astype(np.int32) & (top - 1))
        assert torch.equal(got, (codes - points).float()), field


@pytest.mark.parametrize("bf16", [False, True])
def test_every_field_of_7_bits(bf16):
    kind = "bf16x2" if bf16 else "f16x2"
    halves = np.arange(1 << 16, dtype=np.uint16) & 0x7F7F
    for field in (0, 1):
        got = pair(run(unpack_ptx(field, 8, bf16, False, True), halves.view(np.uint32), halves.view(np.uint32)), kind)
        codes = torch.from_numpy((halves >> (8 * field)).astype(np.int32) & 127)
        assert torch.equal(got, (codes - 64).float()), field


@pytest.mark.parametrize("bf16", [False, True])
def test_every_field_of_4_bit_floats(bf16):
    kind = "bf16x2" if bf16 else "f16x2"
    halves = np.arange(1 << 16, dtype=np.uint16)
    np.random.default_rng(0).shuffle(halves)
    for field, (low, sign) in enumerate(E2M1_BITS):
        got = pair(run(unpack_e2m1_ptx(field, bf16), halves.view(np.uint32), halves.view(np.uint32)), kind)
        wide = halves.astype(np.int32)
        codes = torch.from_numpy(wide >> low & 7 | (wide >> sign & 1) << 3)
        assert torch.equal(got, torch.tensor(E2M1)[codes]), field


def test_fields_of_4_bit_floats_fill_a_word():
    assert sorted(bit for low, sign in E2M1_BITS for bit in (low, low + 1, low + 2, sign)) == list(range(16))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", LOOKED_UP)
def test_every_field_that_is_looked_up(name, bf16):
    kind = "bf16x2" if bf16 else "f16x2"
    halves = np.arange(1 << 16, dtype=np.uint16)
    np.random.default_rng(0).shuffle(halves)
    words, numbers = halves.view(np.uint32), torch.tensor(NUMBERS[name]).to(HALF[kind]).float()
    for field in range(4):
        made = run(look_up_ptx(field // 2, bf16, NUMBERS[name]), words, words, f"${field % 2}")
        codes = torch.from_numpy((halves >> (4 * field)).astype(np.int64) & 15)
        assert torch.equal(pair(made, kind), numbers[codes]), field
