"""`quire collect-env`: facts about the machine and what is installed, to paste into a bug report."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire import __version__
from quire.config.environment import ONEDNN_MAX_CPU_ISA, VARIABLES, process_environment
from quire.config.flags import FlagParser

# Besides the metadata's: an editable install's may be older than the code.
PACKAGES = (
    "torch",
    "numpy",
    "msgspec",
    "tokenizers",
    "safetensors",
    "pyzmq",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
)
OPTIONAL_PACKAGES = ("triton", "flash-attn", "flashinfer-python", "xformers", "torchvision", "sentencepiece", "vllm")
ATTENTION_PACKAGES = ("flash-attn", "flashinfer-python", "xformers", "triton")
CPU_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "sve", "bf16", "i8mm"),
)
KNOWN_VARIABLES = frozenset(variable.name for variable in VARIABLES)
# Those of libraries that affect results or speed, and misspelt ones of Quire's own.
OTHER_VARIABLES = re.compile(
    r"(QUIRE|OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|CUDA|NVIDIA|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|HF|TOKENIZERS|"
    r"MALLOC|UVLOOP)_\w+|OPENAI_BASE_URL|LD_PRELOAD|LD_LIBRARY_PATH|PYTHONPATH|PYTHONUNBUFFERED|SSL_CERT_FILE"
)
SECRET_WORDS = frozenset({"KEY", "KEYS", "TOKEN", "TOKENS", "SECRET", "PASSWORD", "PASS", "AUTH", "CREDENTIALS"})
SECONDS = 60.0  # timeout of a subprocess

Facts = dict[str, Any]


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire collect-env",
        usage="%(prog)s [flags]",
        description="Print versions, hardware and settings for a bug report. Keys and other secrets are not shown.",
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    facts = collect()
    print(json.dumps(facts, indent=2, ensure_ascii=False) if args.json else as_text(facts))
    return 0


def collect() -> dict[str, Facts]:
    sections: dict[str, Callable[[], Facts]] = {
        "quire": quire_facts,
        "system": system_facts,
        "cpu": cpu_facts,
        "memory": memory_facts,
        "gpu": gpu_facts,
        "torch": torch_facts,
        "attention extras": lambda: package_versions(ATTENTION_PACKAGES),
        "packages": lambda: installed(package_versions((*required_packages(), *OPTIONAL_PACKAGES))),
        "environment": lambda: environment(process_environment()),
    }
    return {name: attempt(gather) for name, gather in sections.items()}


def attempt(gather: Callable[[], Any]) -> Any:
    """An error becomes the fact's value."""
    try:
        return gather()
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}"}


def each(**facts: Callable[[], Any]) -> Facts:
    found = {name.replace("_", " "): attempt(gather) for name, gather in facts.items()}
    return {name: value["unknown"] if isinstance(value, dict) else value for name, value in found.items()}


def quire_facts() -> Facts:
    from quire.platforms.machine import git_commit

    return each(version=lambda: __version__, commit=git_commit, folder=lambda: str(Path(__file__).parents[2]))


def system_facts() -> Facts:
    return each(
        os=platform.platform,
        distribution=lambda: platform.freedesktop_os_release().get("PRETTY_NAME"),
        libc=lambda: " ".join(platform.libc_ver()).strip() or None,
        python=lambda: f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        in_container=lambda: Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    )


def cpu_facts() -> Facts:
    from quire.platforms import cpu_facts
    from quire.platforms.cpu_cores import usable_cores
    from quire.platforms.cpuid import load_cpuid
    from quire.platforms.machine import cpu_model

    def shown_flags() -> str:
        present = cpu_facts.cpu_flags()
        return " ".join(flag for flag in CPU_FLAGS if flag in present) or "none of those that matter"

    def onednn() -> str:
        cpuid = load_cpuid()
        if cpuid is None:
            return "CPUID is not available"
        limit = ONEDNN_MAX_CPU_ISA.get()
        if limit is not None:
            return f"{limit}, from the environment"
        if cpu_facts.amx_is_broken(cpuid):
            return f"{cpu_facts.SAFE_ISA}, because AMX is advertised without its tiles"
        return "not capped"

    return each(
        model=cpu_model,
        logical_cores=os.cpu_count,
        usable_cores=usable_cores,
        flags=shown_flags,
        fast_bfloat16=lambda: cpu_facts.has_fast_bf16(load_cpuid()),
        oneDNN_limit=onednn,
    )


def memory_facts() -> Facts:
    from quire.platforms.cpu_facts import available_memory

    def total() -> str:
        return in_gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

    return each(total=total, available=lambda: in_gib(available_memory()), shared_memory=shared_memory)


def shared_memory() -> str:
    stat = os.statvfs("/dev/shm")
    return f"{in_gib(stat.f_bavail * stat.f_frsize)} free in /dev/shm"


def in_gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def gpu_facts() -> Facts:
    columns = ("index", "name", "memory.total", "driver_version", "compute_cap")
    try:
        listed = output_of("nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader")
    except FileNotFoundError:
        return {"nvidia-smi": "not found; no NVIDIA driver, or not in this container"}
    facts: Facts = {}
    for line in listed.splitlines():
        index, name, memory, driver, capability = (word.strip() for word in line.split(",", 4))
        facts[f"GPU {index}"] = f"{name}, {memory}, compute capability {capability}"
        facts["driver"] = driver
    version = attempt(lambda: re.search(r"CUDA Version:\s*([\d.]+)", output_of("nvidia-smi")))
    if isinstance(version, re.Match):
        facts["CUDA of the driver"] = version[1]
    return facts or {"nvidia-smi": "finds no GPU"}


def torch_facts() -> Facts:
    return json.loads(output_of(sys.executable, "-m", "quire.entrypoints.cli.torch_facts"))


def output_of(*command: str) -> str:
    child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if child.returncode:
        problem = (child.stderr or child.stdout).strip().splitlines()
        last = problem[-1] if problem else "no output"
        raise RuntimeError(f"{Path(command[0]).name} ended with exit code {child.returncode}: {last}")
    return child.stdout


def required_packages() -> list[str]:
    """Everything that Quire's metadata names, extras included."""
    try:
        listed = importlib.metadata.requires("quire") or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    return [*PACKAGES, *(re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in listed)]


def package_versions(names: tuple[str, ...]) -> Facts:
    return {name: version_of(name) for name in names}


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception as error:  # broken metadata of one package
        return f"unknown: {error}"


def installed(versions: Facts) -> Facts:
    return {name: version for name, version in versions.items() if version is not None}


def environment(variables: Mapping[str, str]) -> Facts:
    """Only relevant names, and never the value of a secret."""
    shown: Facts = {}
    for name in sorted(variables):
        if name in KNOWN_VARIABLES or OTHER_VARIABLES.fullmatch(name):
            is_secret = bool(SECRET_WORDS & set(name.upper().split("_")))
            shown[name] = "set, not shown" if is_secret else variables[name]
    return shown


def as_text(facts: dict[str, Facts]) -> str:
    lines: list[str] = []
    for section, found in facts.items():
        lines += ["", section] if lines else [section]
        lines += [f"  {name}: {_as_word(value)}" for name, value in found.items()] or ["  nothing"]
    return "\n".join(lines)


def _as_word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
