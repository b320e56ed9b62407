"""Random blocks of GGUF's formats, and what they mean by the format's own package."""

import math

import gguf
import numpy as np
import torch

HALVES_AT = {
    "MXFP4": (),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
}  # else one at 0


def random_blocks(
    type_name: str, rows: int, columns: int, seed: int = 0, size: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [rows, bytes per row], and the numbers as float32 [rows, columns]; `size` multiplies them."""
    rng = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[type_name]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // elements, nbytes), dtype=np.uint8)
    for at in HALVES_AT.get(type_name, (0,)):
        halves = rng.standard_normal((rows, columns // elements)) * (0.001 if type_name == "Q6_K" else 0.05) * size
        blocks[:, :, at : at + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    if type_name == "MXFP4":  # exponents
        low = 122 + round(math.log2(size))
        blocks[:, :, 0] = rng.integers(low, low + 4, (rows, columns // elements))
    blocks = blocks.reshape(rows, -1)
    numbers = gguf.quants.dequantize(blocks, kind).reshape(rows, columns)
    return torch.from_numpy(blocks), torch.from_numpy(numbers.copy())


class Stored:
    """A tensor of a checkpoint, as much of it as a slot needs."""

    def __init__(self, type_name: str, blocks: torch.Tensor, rotary_half: int = 0) -> None:
        self.type_name, self._blocks, self.rotary_half = type_name, blocks, rotary_half

    def raw(self) -> torch.Tensor:
        return self._blocks
