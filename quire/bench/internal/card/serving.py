"""The card's serving rows: `quire serve` on the model, and `quire bench serve` against it at each rate."""

import contextlib
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.bench import serve
from quire.bench.internal.anchors import H200_BARS, SERVING_BARS, Bar
from quire.bench.internal.card.figures import SERVER_START_UP, Figure, ModelCard, Row
from quire.bench.serve_child import serving
from quire.bench.serve_rows import ROWS

WARM_UP = {"num_prompts": 64, "random_output_len": 32, "request_rate": float("inf")}
SHOWN = ("output", "ttft p50", "ttft p99", "tpot p50", "tpot p99", "itl p99")
TINY_ROW = {"num_prompts": 8, "random_input_len": 16, "random_output_len": 4}


def row_names(cpu: bool, rates: list[str]) -> list[str]:
    """The rows of the named rates ("at-once", "32"), or all of the platform."""
    prefix = "cpu-" if cpu else "h200-"
    known = [name.removeprefix(prefix) for name in ROWS if name.startswith(prefix)]
    for rate in rates:
        if rate not in known:
            raise ValueError(f"--serving-rates: {rate!r} is unknown; allowed: {', '.join(known)}")
    return [prefix + rate for rate in rates or known]


def run_serving(
    card: ModelCard,
    options: dict[str, Any],
    rows: list[str],
    folder: Path,
    *,
    server_args: list[str],
    vocab_size: int,
    client_processes: int,
    anchored: bool,
    peers: bool,
    tiny: bool,
    log: Callable[[str], None],
) -> None:
    """Add the rows to the card. A row that fails is an error on it and leaves the others."""
    changes: dict[str, Any] = {"token_id_limit": min(ROWS[rows[0]].token_id_limit, vocab_size)}
    if tiny:
        changes |= TINY_ROW
    try:
        with serving(options, server_args) as child:
            log(f"server healthy after {child.start_up_seconds:.1f} s")
            bar = H200_BARS.get(card.name, {}).get("server_startup", Bar()) if rows[0].startswith("h200") else Bar()
            card.figures["server_startup"] = Figure(SERVER_START_UP, [child.start_up_seconds], bar)
            _measure(child.url, rows[0], 0, client_processes, WARM_UP | changes, folder)
            for number, name in enumerate(rows, start=1):
                began = time.perf_counter()
                try:
                    report = _measure(child.url, name, number, client_processes, changes, folder)
                    _add(card, name, report, anchored, peers)
                except (ValueError, OSError) as error:
                    card.errors[name] = f"{error}\n{child.log_tail()}"
                log(f"server {name} took {time.perf_counter() - began:.1f} s")
    except (ValueError, OSError) as error:
        card.errors["server"] = str(error)


def _measure(
    url: str, name: str, seed: int, client_processes: int, changes: dict[str, Any], folder: Path
) -> dict[str, Any]:
    file = folder / f"{name}.json"
    # A seed for each: prompts of an earlier row would be found in the prefix cache.
    words = ["--base-url", url, "--seed", str(seed), "--client-processes", str(client_processes)]
    args = serve.parser().parse([*words, "--json", "--result-file", str(file), "--metric-percentiles", "50,99"])
    vars(args).update(ROWS[name].flags() | changes)
    with contextlib.redirect_stdout(io.StringIO()):
        serve.run(args)
    return json.loads(file.read_text("utf-8"))


def _add(card: ModelCard, name: str, report: dict[str, Any], anchored: bool, peers: bool = True) -> None:
    output_len = report["workload"]["output_len"]
    problems = []
    for run in report["details"]["runs"]:
        if run["failed"]:
            problems.append(f"{run['failed']} requests failed: {run['errors']}")
        if run["output_tokens"] != run["completed"] * output_len:
            problems.append(f"{run['output_tokens']} tokens from {run['completed']} requests of {output_len}")
    if problems:
        card.errors[name] = "; ".join(problems)
    for metric in SHOWN:
        found = report["metrics"].get(metric.replace(" ", "_"))
        if found is None:
            continue
        row = Row(f"server {name.partition('-')[2]}: {metric}", found["unit"], metric != "output")
        bar = SERVING_BARS[name].get(metric, Bar()) if anchored else Bar()
        card.figures[f"{name} {metric}"] = Figure(row, found["values"], bar if peers else bar.without_peers())
    card.notes.setdefault("serving", {})[name] = report
