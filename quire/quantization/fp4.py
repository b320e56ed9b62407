"""4-bit floats as checkpoints store them: two in a byte, with exponents or fp8 scales for groups of inputs."""

import torch

MXFP4_GROUP = 32


def codes_of_bytes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n], the first number in the low bits -> uint8 [..., 2 * n]: sign, exponent (2 bits), mantissa."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 with a bias of 127, as e8m0 has it -> bfloat16, which has the same exponents."""
    bits = exponents.to(torch.int16)
    return torch.where(bits == 0, 0x40, bits << 7).to(torch.int16).view(torch.bfloat16)  # 2^-127 is subnormal
