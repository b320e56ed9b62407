"""Checkpoints as bitsandbytes writes them, with its state beside each weight, and the same weights unquantized.

Written with the nearest number of a table, unlike the quantizer under test.
"""

import json
from typing import Any

import torch

from tests.quantization.int_checkpoints import Format

# As in the format's own library, to float32.
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12
NUMBERS = {"nf4": NF4, "fp4": FP4}
NESTED_BLOCK = 256


def quantize(weight: torch.Tensor, kind: str, nested: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors under the layer's name, and what the weight became."""
    flat = weight.float().reshape(-1, 64)
    absmax = flat.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    found = {"weight.quant_map": NUMBERS[kind].clone()}
    if nested:
        offset = float(absmax.mean())
        parts = (absmax - offset).split(NESTED_BLOCK)
        scales = torch.stack([part.abs().amax() for part in parts])
        table = torch.linspace(-1, 1, 256) ** 3  # uneven, as the library's
        codes = torch.cat([
            ((part / scale)[:, None] - table).abs().argmin(1) for part, scale in zip(parts, scales, strict=True)
        ])  # fmt: skip
        absmax = table[codes] * scales.repeat_interleave(NESTED_BLOCK)[: len(codes)] + offset
        found |= {
            "weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": scales, "weight.nested_quant_map": table,
        }  # fmt: skip
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        found["weight.absmax"] = absmax
    codes = ((flat / absmax[:, None])[..., None] - NUMBERS[kind]).abs().argmin(-1).flatten()
    found["weight"] = (codes[0::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    encoded = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    found[f"weight.quant_state.bitsandbytes__{kind}"] = encoded
    meant = NUMBERS[kind][codes].view(-1, 64) * absmax[:, None]
    return found, meant.view(weight.shape)


def bitsandbytes(kind: str = "nf4", nested: bool = True, skipped: tuple[str, ...] = (), **differences: Any) -> Format:
    config = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": list(skipped) or None,
    }  # fmt: skip

    def write(name: str, weight: torch.Tensor):
        return None if any(f".{part}." in f".{name}." for part in skipped) else quantize(weight, kind, nested)

    return Format(config | differences, write)
