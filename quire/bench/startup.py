"""`quire bench startup`: from starting a process to its first token, split into phases."""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from quire.bench.common import bench_parser, print_report
from quire.bench.report import Metric
from quire.config import EngineConfig
from quire.config.flags import FlagParser, engine_kwargs

PROMPT = "The capital of France is"
# In order: a phase lasts from the previous mark to its own.
PHASES = ("interpreter", "import", "load", "first token")


def parser() -> FlagParser:
    description = "Start a fresh process per repetition and measure the time to its first token, by phase."
    return bench_parser("startup", description, repetitions=3)


def run(args: argparse.Namespace) -> int:
    options = engine_kwargs(args)
    EngineConfig.from_kwargs(**options)  # invalid options fail here, not in the child
    runs = [start_once(options) for _ in range(args.repetitions)]
    metrics = [Metric(phase, "s", [phases[phase] for phases in runs], lower_is_better=True) for phase in PHASES]
    totals = [sum(phases.values()) for phases in runs]
    metrics.append(Metric("start to first token", "s", totals, lower_is_better=True))
    print_report("startup", args, {"prompt": repr(PROMPT), "output_len": 1}, metrics)
    return 0


def start_once(options: dict[str, Any]) -> dict[str, float]:
    """Seconds per phase of one fresh process."""
    command = [sys.executable, "-m", "quire.bench.startup_child", json.dumps({"prompt": PROMPT, "options": options})]
    start = time.time()  # the only clock that processes share on every platform
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise ValueError(f"the measured process failed: {reason}")
    marks: dict[str, float] = json.loads(child.stdout.strip().splitlines()[-1])
    times = [start, *(marks[phase] for phase in PHASES)]
    return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}
