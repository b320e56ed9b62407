"""Block sizes of GGUF's quantization types."""

from typing import NamedTuple


class BlockType(NamedTuple):
    name: str
    elements: int  # numbers per block
    nbytes: int  # bytes per block


# By type id. Only those that Quire dequantizes itself; others come from the gguf package.
_BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}


def block_type(type_id: int) -> BlockType | None:
    """The layout of a GGUF type, or None if neither Quire nor the gguf package knows it."""
    if type_id in _BLOCK_TYPES:
        return _BLOCK_TYPES[type_id]
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
        return BlockType(kind.name, *GGML_QUANT_SIZES[kind])
    except (ValueError, KeyError):
        return None
