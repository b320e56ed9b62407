"""Facts about the machine and the code, stored with every result so that results can be compared over time."""

import importlib.metadata
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

from quire import __version__
from quire.config.environment import process_environment
from quire.platforms.cpu_cores import allowed_cpus
from quire.platforms.machine import cpu_model, git_commit


def describe_machine(probe: bool) -> dict[str, Any]:
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quire": __version__,
        "commit": git_commit(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": len(allowed_cpus()),
    }
    return facts | {"probe": run_probe()} if probe else facts


def run_probe(environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The probe's measurements; if it crashes, the completed ones and a note."""
    command = [sys.executable, "-m", "quire.bench.probe"]
    child = subprocess.run(command, capture_output=True, text=True, env=process_environment(environment))
    measured: dict[str, Any] = {}
    for line in child.stdout.splitlines():
        measured |= json.loads(line)
    if child.returncode != 0:
        measured["note"] = f"the probe ended early with exit code {child.returncode}"
    return measured
