"""Facts about the machine and the code, kept with every result so that results of different days can be compared."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire import __version__


def describe_machine(probe: bool) -> dict[str, Any]:
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quire": __version__,
        "commit": git_commit(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
    }
    return facts | {"probe": run_probe()} if probe else facts


def git_commit() -> str | None:
    """The commit of a source checkout, with `-dirty` if files differ from it; None for an installed package."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    # Installed inside someone else's repository, git would answer with that one's commit.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else commit


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_probe(environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The probe's measurements; if it dies half-way, those it made and a note."""
    command = [sys.executable, "-m", "quire.bench.probe"]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | (environment or {}))
    measured: dict[str, Any] = {}
    for line in child.stdout.splitlines():
        measured |= json.loads(line)
    if child.returncode != 0:
        measured["note"] = f"the probe ended early with exit code {child.returncode}"
    return measured
