"""What a wrapper launches, compiled for a Hopper device without one: sizes and tuning are those that it chooses."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.kernels.test_compile import HOPPER

MAX_SHARED = 227 << 10
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True)
class Launched:
    name: str
    kernel: Any

    @property
    def fits(self) -> bool:
        return bool(self.kernel.metadata.shared <= MAX_SHARED)

    def spilled_bytes(self, folder: Path) -> int:
        if not PTXAS.exists():
            pytest.skip("needs ptxas")
        (folder / "kernel.ptx").write_text(self.kernel.asm["ptx"])
        command = [PTXAS, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return max(int(count) for count in re.findall(r"(\d+) bytes spill", said))


def launched(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[Launched]:
    """By `call`, whose tensors are a CPU's; nothing is computed."""
    found = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.params):
            value = given.pop(parameter.name)
            whole = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (whole and value == 1):
                signature[parameter.name], constants[i,] = "constexpr", True if parameter.name == "PDL" else value
                continue
            if isinstance(value, TensorDescriptor):
                kind = TYPES[value.base.dtype].removeprefix("*")
                signature[parameter.name] = f"tensordesc<{kind}{list(value.block_shape)}>"
                continue
            plain = "fp32" if isinstance(value, float) else "i32"
            signature[parameter.name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else plain
            if isinstance(value, torch.Tensor) or (whole and value % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        found.append(Launched(self.__name__, triton.compile(source, target=HOPPER, options=given)))

    monkeypatch.setattr(JITFunction, "run", run)
    call()
    return found
