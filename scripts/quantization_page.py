"""Write the table of docs/quantization.md from what the code says of each format and from committed measurements.

python -m scripts.quantization_page
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from quire.quantization.select import choose_quantization
from tests.quantization import fp4_checkpoints, fp8_checkpoints, int_checkpoints

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quantization.md"
BEGIN, END = "<!-- table: python -m scripts.quantization_page -->\n", "<!-- end of table -->\n"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = (9, 0)

# The format, its quantization_config (None: the checkpoint is unquantized, or a GGUF), and the option `quantization`.
Row = tuple[str, dict[str, Any] | None, str | None]
FORMATS: list[Row] = [
    ("GPTQ, 4 and 8 bits", int_checkpoints.gptq().config, None),
    ("AWQ, 4 bits", int_checkpoints.awq().config, None),
    ("compressed-tensors W4A16, W8A16", int_checkpoints.w4a16().config, None),
    ("compressed-tensors W8A8, int8", int_checkpoints.w8a8().config, None),
    ("compressed-tensors fp8", fp8_checkpoints.compressed_fp8("channel").config, None),
    ("compressed-tensors fp8, weights alone", fp8_checkpoints.compressed_fp8("channel", None).config, None),
    ("fp8 in blocks (DeepSeek's)", fp8_checkpoints.block_fp8((128, 128)).config, None),
    ("ModelOpt FP8", fp8_checkpoints.modelopt_fp8().config, None),
    ("compressed-tensors NVFP4", fp4_checkpoints.nvfp4().config, None),
    ("compressed-tensors NVFP4, W4A4", fp4_checkpoints.nvfp4(True).config, None),
    ("compressed-tensors MXFP4", fp4_checkpoints.mxfp4().config, None),
    ("ModelOpt NVFP4", fp4_checkpoints.modelopt().config, None),
    ("MXFP4 (gpt-oss)", {"quant_method": "mxfp4"}, None),
    ("GGUF", None, "gguf"),
    ("unquantized", None, "fp8"),
    ("unquantized", None, "int8"),
    ("unquantized", None, "int4"),
]


def says(config: dict[str, Any] | None, option: str | None, device: torch.device) -> str:
    """How the format is kept and multiplied there, in the words of the start-up log."""
    try:
        chosen = choose_quantization(
            option, {"quantization_config": config} if config else {}, torch.bfloat16, device, is_gguf=option == "gguf"
        )
    except ValueError:
        return "no"
    return chosen.describe().partition(": ")[2].replace("|", "\\|")


def table() -> str:
    lines = ["| checkpoint | `--quantization` | on a CPU | on a GPU (Hopper) |", "|---|---|---|---|"]
    with mock.patch("torch.cuda.get_device_capability", return_value=HOPPER):
        for name, config, option in FORMATS:
            flag = f"`{option}`" + (" (default)" if option == "gguf" else "") if option else ""
            lines.append(f"| {name} | {flag} | {says(config, option, CPU)} | {says(config, option, GPU)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    print(table())
