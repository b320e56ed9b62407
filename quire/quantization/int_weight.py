"""Integer weights of any checkpoint format in one form: codes, and a scale and a zero point per group of inputs. Codes
may be those of 4-bit floats, which have no zero points."""

from dataclasses import dataclass, replace

import torch

from quire.kernels.int_linear import E2M1, NUMBERS, Kind

ROWS_AT_A_TIME = 1024  # limits the float32 copy


@dataclass(frozen=True)
class IntWeight:
    """w[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g]); g is group_of[k], or k // group_size where that is None.
    With codes of floats it is scales[n, g] * float(codes[n, k])."""

    bits: int  # 4 or 8
    codes: torch.Tensor  # uint8 [outputs, inputs]
    scales: torch.Tensor  # float32 [outputs, groups]
    zeros: torch.Tensor | None  # int16 [outputs, groups]; None: 2 ** (bits - 1)
    group_size: int
    group_of: torch.Tensor | None = None  # int64 [inputs]
    input_scale: torch.Tensor | None = None  # float32 [1]: a fixed one of activations in int8
    kind: Kind = "int"  # of codes
    factors: torch.Tensor | None = None  # float32 [outputs]: of w, beside the scales

    @property
    def zero(self) -> int:
        """The zero point of symmetric weights."""
        return 1 << (self.bits - 1)

    def groups(self) -> torch.Tensor:
        """int64 [inputs]: the group of each input."""
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.codes.shape[1], device=self.codes.device) // self.group_size

    def in_group_order(self) -> tuple["IntWeight", torch.Tensor | None]:
        """With the inputs of a group next to each other, and their order: the new input j is the old order[j]. None if
        nothing changes. Groups may be of different sizes, if this is a part of a weight (`group_of` is then kept)."""
        if self.group_of is None:
            return self, None
        groups, order = self.group_of.sort(stable=True)
        moved = not torch.equal(order, torch.arange(len(order), device=order.device))
        whole = torch.arange(len(order), device=order.device) // self.group_size
        ordered = replace(self, group_of=None if torch.equal(groups, whole) else groups)
        if not moved:
            return ordered, None
        return replace(ordered, codes=self.codes[:, order]), order

    def checked(self) -> "IntWeight":
        """Itself; a ValueError if a checkpoint's scales or zero points cannot be meant."""
        if not bool(self.scales.isfinite().all()):
            raise ValueError("its scales are not all finite numbers")
        if self.zeros is not None and not bool(((self.zeros >= 0) & (self.zeros < 1 << self.bits)).all()):
            raise ValueError(f"its zero points are not all numbers of {self.bits} bits")
        return self

    def simplified(self) -> "IntWeight":
        """Without zero points that are all those of symmetric weights, which some formats store."""
        return replace(self, zeros=None) if self.zeros is not None and bool((self.zeros == self.zero).all()) else self

    def dequantize_into(self, out: torch.Tensor) -> None:
        """[outputs, inputs] in any float type: the product in float32, rounded once."""
        groups = self.groups()
        for first in range(0, len(out), ROWS_AT_A_TIME):
            rows = slice(first, first + ROWS_AT_A_TIME)
            zeros = self.zero if self.zeros is None else self.zeros[rows][:, groups].float()
            if self.kind != "int":
                numbers = torch.tensor(NUMBERS[self.kind], device=self.codes.device)[self.codes[rows].int()]
            else:
                numbers = self.codes[rows].float() - zeros
            made = numbers * self.scales[rows][:, groups]
            out[rows].copy_(made if self.factors is None else made * self.factors[rows, None])

    def as_integers(self) -> "IntWeight":
        """4-bit floats as integers of 8 bits, exactly: twice e2m1 is whole."""
        if self.kind == "int":
            return self
        assert self.kind == "e2m1"
        doubled = torch.tensor([int(2 * value) for value in E2M1], dtype=torch.int16, device=self.codes.device)
        codes = (doubled[self.codes.int()] + 128).to(torch.uint8)
        scales = self.scales / 2 if self.factors is None else self.scales / 2 * self.factors[:, None]
        return replace(self, bits=8, codes=codes, scales=scales, kind="int", factors=None)

    def part_of_inputs(self, start: int) -> "IntWeight":
        """Of a weight whose codes are the inputs from `start` on, while scales and zeros are of all groups."""
        inputs, size = self.codes.shape[1], self.group_size
        natural = (torch.arange(inputs, device=self.codes.device) + start) // size
        if self.group_of is not None and not torch.equal(self.group_of, natural):
            return self  # inputs may be in any group
        first, last = start // size, (start + inputs - 1) // size + 1
        zeros = None if self.zeros is None else self.zeros[:, first:last]
        group_of = natural - first if start % size else None
        return replace(self, scales=self.scales[:, first:last], zeros=zeros, group_of=group_of)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] of 4- or 8-bit numbers, the first in the lowest bits -> uint8 [..., n * 32 // bits]."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def checked_groups(stored: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """A checkpoint's group of each input, within those that there are."""
    if stored is None or len(stored) == 0:
        return None
    low, high = int(stored.min()), int(stored.max())
    if low < 0 or high >= count:
        raise ValueError(f"its inputs are in groups {low} to {high}; allowed: 0 to {count - 1}")
    return stored
