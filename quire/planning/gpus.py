"""GPUs by name: memory, read bandwidth, peak arithmetic, and the link between those of one machine."""

import difflib
import re
from dataclasses import dataclass

GB, GIB = 10**9, 2**30
MAX_GPUS = 64


@dataclass(frozen=True)
class Link:
    """Between the GPUs of a machine, in one direction. Not measured by this project: vendors' rates and NCCL's usual
    latency."""

    name: str
    bytes_per_s: float
    latency_s: float  # of a small all-reduce


NVLINK_3 = Link("NVLink 300 GB/s", 300e9, 12e-6)
NVLINK_4 = Link("NVLink 450 GB/s", 450e9, 10e-6)
NVLINK_5 = Link("NVLink 900 GB/s", 900e9, 10e-6)
PCIE_4 = Link("PCIe 4", 22e9, 25e-6)
PCIE_5 = Link("PCIe 5", 45e9, 20e-6)


@dataclass(frozen=True)
class GPU:
    name: str
    memory: int  # bytes that the driver reports
    bandwidth: float  # bytes per second
    flops: float  # dense, bf16
    fp8_flops: float  # as bf16 where there is no fp8 arithmetic
    link: Link


@dataclass(frozen=True)
class Machine:
    gpu: GPU
    count: int

    @property
    def name(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def _gpu(name: str, gib: float, tb_per_s: float, tflops: float, fp8: float | None, link: Link) -> GPU:
    return GPU(name, int(gib * GIB), tb_per_s * 1e12, tflops * 1e12, (fp8 or tflops) * 1e12, link)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("B300", 267.0, 8.0, 2250, 4500, NVLINK_5),
        _gpu("B200", 178.3, 8.0, 2250, 4500, NVLINK_5),
        _gpu("H200", 139.8, 4.8, 989, 1979, NVLINK_4),
        _gpu("H100", 79.1, 3.35, 989, 1979, NVLINK_4),
        _gpu("H100-PCIe", 79.1, 2.0, 756, 1513, PCIE_5),
        _gpu("H100-NVL", 93.1, 3.9, 835, 1671, PCIE_5),
        _gpu("H20", 95.1, 4.0, 148, 296, NVLINK_4),
        _gpu("A100-80GB", 79.1, 2.04, 312, None, NVLINK_3),
        _gpu("A100-40GB", 39.4, 1.555, 312, None, NVLINK_3),
        _gpu("A40", 44.4, 0.696, 150, None, PCIE_4),
        _gpu("A30", 23.5, 0.933, 165, None, PCIE_4),
        _gpu("A10", 22.0, 0.6, 125, None, PCIE_4),
        _gpu("A6000", 47.4, 0.768, 155, None, PCIE_4),
        _gpu("L40S", 44.4, 0.864, 362, 733, PCIE_4),
        _gpu("L40", 44.4, 0.864, 181, 362, PCIE_4),
        _gpu("L4", 22.0, 0.3, 121, 242, PCIE_4),
        _gpu("RTX5090", 31.4, 1.792, 209, 419, PCIE_5),
        _gpu("RTX4090", 23.5, 1.008, 165, 330, PCIE_4),
        _gpu("RTX3090", 23.6, 0.936, 71, None, PCIE_4),
    )
}
ALIASES = {"A100": "A100-80GB", "4090": "RTX4090", "3090": "RTX3090", "5090": "RTX5090", "RTXA6000": "A6000"}
CUSTOM = re.compile(
    r"(?P<memory>[\d.]+)(?P<unit>GB|GIB)@(?P<bandwidth>[\d.]+)(?P<scale>TB|GB)/S,(?P<flops>[\d.]+)TF"
    r"(,(?P<link>[\d.]+)GB/S)?"
)
FORM = '"8xH100", "H200", or your own as "4x80GB@3.35TB/s,989TF" (with a link: ",450GB/s" behind it)'


def read_machine(text: str) -> Machine:
    """GPUs of one kind, as "8xH100"."""
    given = text.strip()
    counted = re.fullmatch(r"(\d+)\s*[xX*]\s*(.+)", given)
    count, name = (int(counted[1]), counted[2]) if counted else (1, given)
    if not 1 <= count <= MAX_GPUS:
        raise ValueError(f"--gpus {text!r} names {count} GPUs; allowed: 1 to {MAX_GPUS}")
    custom = CUSTOM.fullmatch(name.upper().replace(" ", ""))
    if custom:
        return Machine(_custom(name, custom), count)
    found = {_plain(known): known for known in GPUS} | {_plain(alias): known for alias, known in ALIASES.items()}
    known = found.get(_plain(name))
    if known is None:
        near = difflib.get_close_matches(_plain(name), found, n=1)
        hint = f"did you mean {found[near[0]]}? " if near else ""
        raise ValueError(f"--gpus {text!r}: unknown GPU; {hint}allowed: {', '.join(GPUS)}, in the form {FORM}")
    return Machine(GPUS[known], count)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Z0-9]|NVIDIA|SXM\d?|GEFORCE", "", name.upper())


def _custom(name: str, found: re.Match[str]) -> GPU:
    try:
        memory, bandwidth, flops, link = (float(found[key] or 0) for key in ("memory", "bandwidth", "flops", "link"))
    except ValueError as error:
        raise ValueError(f"--gpus: {name!r} has a number that cannot be read; the form is {FORM}") from error
    if min(memory, bandwidth, flops) <= 0:
        raise ValueError(f"--gpus: {name!r} has a number that is not above zero; the form is {FORM}")
    between = Link(f"{link:g} GB/s", link * 1e9, PCIE_5.latency_s) if link else PCIE_5
    size = int(memory * (GB if found["unit"] == "GB" else GIB))
    return GPU(name, size, bandwidth * (1e12 if found["scale"] == "TB" else 1e9), flops * 1e12, flops * 1e12, between)
