"""Write the table of docs/quantization.md from what the code chooses for each format, and from committed measurements.

python -m scripts.quantization_page
"""

import json
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire.quantization.base import LinearMethod, Quantization, StoresFusedExperts
from quire.quantization.block_quantized import BlockQuantizedLinearMethod
from quire.quantization.fp4_linear import RoundedInputsMethod
from quire.quantization.fp8_blocks import GroupedFp8LinearMethod
from quire.quantization.fp8_dequantized import DequantizedFp8LinearMethod
from quire.quantization.fp8_linear import Fp8LinearMethod
from quire.quantization.int8_channel import Int8ChannelLinearMethod
from quire.quantization.int8_triton import W8A8Kernel
from quire.quantization.int_kernels import DequantizedKernel, PanelKernel
from quire.quantization.int_triton import TritonIntKernel
from quire.quantization.select import choose_quantization
from tests.quantization import bitsandbytes_checkpoints, fp4_checkpoints, fp8_checkpoints, int_checkpoints

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quantization.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- table: python -m scripts.quantization_page -->\n", "<!-- end of table -->\n"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = (9, 0)
LAYER = "model.layers.0.mlp.down_proj"
GGUF = "gguf"

# The format, its quantization_config (None: the checkpoint is unquantized, or a GGUF), and the option `quantization`.
Row = tuple[str, dict[str, Any] | None, str | None]
ROWS: list[Row] = [
    ("GPTQ, 4 bits", int_checkpoints.gptq().config, None),
    ("GPTQ, 8 bits", int_checkpoints.gptq(8).config, None),
    ("AWQ", int_checkpoints.awq().config, None),
    ("W4A16", int_checkpoints.w4a16().config, None),
    ("W8A16", int_checkpoints.w4a16(8).config, None),
    ("W8A8 in int8", int_checkpoints.w8a8().config, None),
    ("fp8", fp8_checkpoints.compressed_fp8("channel").config, None),
    ("fp8, weights alone", fp8_checkpoints.compressed_fp8("channel", None).config, None),
    ("fp8 in blocks", fp8_checkpoints.block_fp8((128, 128)).config, None),
    ("ModelOpt FP8", fp8_checkpoints.modelopt_fp8().config, None),
    ("NVFP4, W4A16", fp4_checkpoints.nvfp4().config, None),
    ("NVFP4, W4A4", fp4_checkpoints.nvfp4(True).config, None),
    ("ModelOpt NVFP4", fp4_checkpoints.modelopt().config, None),
    ("MXFP4, W4A16", fp4_checkpoints.mxfp4().config, None),
    ("MXFP4, W4A4", fp4_checkpoints.mxfp4(True).config, None),
    ("gpt-oss, MXFP4", {"quant_method": "mxfp4"}, None),
    ("bitsandbytes NF4", bitsandbytes_checkpoints.bitsandbytes("nf4").config, None),
    ("bitsandbytes FP4", bitsandbytes_checkpoints.bitsandbytes("fp4").config, None),
    ("GGUF", None, GGUF),
    ("unquantized", None, "int8"),
    ("unquantized", None, "int8_per_channel"),
    ("unquantized", None, "int4"),
    ("unquantized", None, "fp8"),
    ("unquantized", None, "fp8_per_tensor"),
    ("unquantized", None, "bitsandbytes"),
]

# Rows by format and option, and who measured them.
ON_A_CPU = {
    ("GPTQ, 4 bits", None): "gptq-4",
    ("W8A16", None): "W8A16",
    ("W8A8 in int8", None): "W8A8",
    ("GGUF", GGUF): "Q4_1",
    ("unquantized", "int8"): "int8",
}
CPU_FILE = "2026-11-16-cpu-int-checkpoints.json"
ON_A_GPU = {
    ("fp8 in blocks", None): ("2026-11-16-h200-card-llama3-8b-fp8-blocks.json", "llama3-8b"),
    ("unquantized", "int4"): ("2026-11-16-h200-card-llama3-8b-int4.json", "llama3-8b"),
    ("unquantized", "fp8"): ("2026-11-15-h200-card-llama3-8b-fp8.json", "llama3-8b-fp8"),
}
UNQUANTIZED = ("2026-11-15-h200-card-llama3-8b.json", "llama3-8b")
FIGURES = {"b1_tpot": "decode", "nano": "batch", "prefill": "prefill"}
HEADINGS = ("checkpoint", "`quant_method`, or `--quantization`", "CPU", "GPU (Hopper)", "speed")


def cell(config: dict[str, Any] | None, option: str | None, device: torch.device) -> str:
    """How the format is kept and multiplied there in bfloat16."""
    stored = {"quantization_config": config} if config else {}
    try:
        chosen = choose_quantization(option, stored, torch.bfloat16, device, is_gguf=option == GGUF)
    except ValueError:
        return "no"
    return in_words(chosen, online=config is None and option != GGUF)


def in_words(chosen: Quantization, online: bool) -> str:
    method = chosen.linear_method(LAYER)
    if method is None:
        return "as stored, bfloat16 activations" if isinstance(chosen, StoresFusedExperts) else "dequantized"
    kept, activations = _kept(method)
    if kept == "as stored" and online:
        kept = "quantized"
    if isinstance(method, RoundedInputsMethod):
        activations = "4-bit activations"
    return ", ".join(filter(None, (kept, activations)))


def _kept(method: LinearMethod) -> tuple[str, str]:
    """The weights, and the activations unless they are those of an unquantized layer."""
    how = getattr(method, "kernel", method)
    match how:
        case DequantizedKernel() | DequantizedFp8LinearMethod():
            return "dequantized", ""
        case PanelKernel() | BlockQuantizedLinearMethod() | Int8ChannelLinearMethod():
            return "panels", "int8 activations"
        case TritonIntKernel():
            return "as stored", "bfloat16 activations"
        case W8A8Kernel():
            return "as stored", "int8 activations"
        case GroupedFp8LinearMethod() if how.scheme.activations == "none":
            return "as stored", "bfloat16 activations"
        case Fp8LinearMethod():
            return "as stored", "fp8 activations"
    raise TypeError(f"no words for {how}")


def speed(name: str, option: str | None) -> str:
    """By how much faster than bfloat16."""
    row = (name, option)
    if row in ON_A_CPU:
        runs = json.loads((RESULTS / CPU_FILE).read_text("utf-8"))["runs"]
        bf16, here = (statistics.median(run["seconds"] for run in runs[case]) for case in ("bf16", ON_A_CPU[row]))
        return f"CPU: decode {bf16 / here:.2f}x"
    if row not in ON_A_GPU:
        return ""
    here, bf16 = _figures(*ON_A_GPU[row]), _figures(*UNQUANTIZED)
    both = [figure for figure in FIGURES if figure in here and figure in bf16]
    return "GPU: " + ", ".join(f"{FIGURES[key]} {_times(here[key], bf16[key]):.2f}x" for key in both)


def _figures(file: str, model: str) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = json.loads((RESULTS / file).read_text("utf-8"))["models"][model]["figures"]
    return figures


def _times(here: dict[str, Any], other: dict[str, Any]) -> float:
    faster = here["value"] / other["value"]
    return 1 / faster if here["unit"] == "ms" else float(faster)


def table() -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|"]
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=HOPPER),
        mock.patch("quire.kernels.native.quantized.is_available", return_value=True),
        mock.patch("quire.kernels.native.quantized.is_fast", return_value=True),
    ):
        for name, config, option in ROWS:
            flag = f"`{config['quant_method']}`" if config else f"`{option}`"
            cells = (name, flag, cell(config, option, CPU), cell(config, option, GPU), speed(name, option))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
