"""What the matrices of ranks in processes run: layouts, and tiny models of each family, two of them quantized."""

import os
from pathlib import Path
from typing import Any

from tests.quantization.fp8_checkpoints import block_fp8
from tests.quantization.int_checkpoints import gptq, quantize_checkpoint
from tests.spec_decode.matrix_models import Models
from tests.structured_output.model import save_model

RUN_ALL = os.environ.get("QUIRE_TP_MATRIX") == "all"
LAYOUTS = {"tp 2": (2, 1), "tp 4": (4, 1), "pp 2": (1, 2), "pp 4": (1, 4), "tp 2 x pp 2": (2, 2)}
QUANTIZED = {"gptq": gptq(shuffled=True), "fp8": block_fp8()}
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "qwen3-moe", *QUANTIZED]


class RankModels(Models):
    def target(self, family: str, method: str | None = None) -> str:
        if family not in QUANTIZED:
            return super().target(family, method)
        return self._once(family, lambda folder: _save_quantized(folder, family))


def _save_quantized(folder: Path, family: str) -> str:
    """Wide enough for four ranks to have whole groups."""
    path = save_model(folder, 0.15, "llama", intermediate_size=128)
    quantize_checkpoint(folder, QUANTIZED[family])
    return path


def quantization(family: str, layout: str) -> str | None:
    """Dequantized where ranks share layers, as kernels may round inputs by groups that ranks split; stages run the
    kernels themselves."""
    return "dequantized" if family in QUANTIZED and LAYOUTS[layout][0] > 1 else None


def by_turns(settings: list[Any]) -> list[tuple[str, str, int]]:
    """Layout, family and which of the settings: every layout and every family meets each."""
    return [
        (layout, family, (i + j) % len(settings))
        for i, layout in enumerate(LAYOUTS)
        for j, family in enumerate(FAMILIES)
    ]
