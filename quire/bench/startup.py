"""`quire bench startup`: from starting a process to its first token, split into phases."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.common import add_output_json, bench_parser, percentiles, positive, print_report, write_json
from quire.bench.report import Metric
from quire.bench.vllm_flags import add_offline_flags
from quire.config import EngineConfig
from quire.config.environment import XDG_CACHE_HOME, process_environment
from quire.config.flags import FlagParser, engine_kwargs, integer

PROMPT = "The capital of France is"
# In order: a phase lasts from the previous mark to its own.
PHASES = ("interpreter", "import", "load", "first token")


def parser() -> FlagParser:
    description = "Start a fresh process per repetition and measure the time to its first token, by phase."
    parser = bench_parser("startup", description, repetitions=3)
    iters: dict[str, Any] = {"dest": "repetitions", "type": positive, "metavar": "N", "default": argparse.SUPPRESS}
    parser.add_argument("--num-iters-warm", help="the same as --repetitions", **iters)
    cold = "starts with empty caches of compiled kernels, measured first (default: 0)"
    parser.add_argument("--num-iters-cold", type=integer, default=0, metavar="N", help=cold)
    warm_up = "starts before the warm ones that are not measured (default: 0)"
    parser.add_argument("--num-iters-warmup", type=integer, default=0, metavar="N", help=warm_up)
    add_output_json(parser)
    add_offline_flags(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    options = engine_kwargs(args)
    EngineConfig.from_kwargs(**options)  # invalid options fail here, not in the child
    cold = [start_cold(options) for _ in range(args.num_iters_cold)]
    for _ in range(args.num_iters_warmup):
        start_once(options)
    warm = [start_once(options) for _ in range(args.repetitions)]
    metrics = [*_metrics(warm), *_metrics(cold, " (cold)")]
    print_report("startup", args, {"prompt": repr(PROMPT), "output_len": 1}, metrics)
    results: dict[str, Any] = {}
    for name, runs in (("cold", cold), ("warm", warm)):
        if runs:
            times = [phases["load"] for phases in runs]
            results |= {f"avg_{name}_startup_time": sum(times) / len(times), f"{name}_startup_times": times}
            results[f"{name}_startup_percentiles"] = percentiles(times)
    write_json(args.output_json, results)
    return 0


def _metrics(runs: list[dict[str, float]], kind: str = "") -> list[Metric]:
    if not runs:
        return []
    found = [Metric(phase + kind, "s", [phases[phase] for phases in runs], lower_is_better=True) for phase in PHASES]
    totals = [sum(phases.values()) for phases in runs]
    return [*found, Metric("start to first token" + kind, "s", totals, lower_is_better=True)]


def start_cold(options: dict[str, Any], prompt: Any = PROMPT) -> dict[str, float]:
    """One start that finds no compiled kernels; downloaded models stay."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        names = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        environment = process_environment({name: f"{folder}/{name}" for name in names})
        models = Path(XDG_CACHE_HOME.get() or "~/.cache").expanduser() / "huggingface"
        environment.setdefault("HF_HOME", str(models))
        return start_once(options, environment, prompt)


def start_once(
    options: dict[str, Any], environment: dict[str, str] | None = None, prompt: Any = PROMPT
) -> dict[str, float]:
    """Seconds per phase of one fresh process."""
    command = [sys.executable, "-m", "quire.bench.startup_child", json.dumps({"prompt": prompt, "options": options})]
    start = time.time()  # the only clock that processes share on every platform
    child = subprocess.run(command, capture_output=True, text=True, env=environment)
    if child.returncode != 0:
        reason = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise ValueError(f"the measured process failed: {reason}")
    marks: dict[str, float] = json.loads(child.stdout.strip().splitlines()[-1])
    times = [start, *(marks[phase] for phase in PHASES)]
    return {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}
