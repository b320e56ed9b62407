"""Plots a run: percentile curves of the latencies, and a timeline of tokens and requests."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.serve_client import Run
from quire.bench.serve_stats import NAMES, Stats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 100


def check_plotting(file: str) -> None:
    """Checked before the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; install it with: pip install 'quire[plot]'")
    if Path(file).suffix.lower() != ".png":
        raise ValueError(f"{file!r}: the plot is a PNG; use a name ending in .png (--plot)")


def plot(file: str, run: Run, stats: Stats, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9, wrap=True)
    axes: Any = figure.subplots(2, 2)
    _percentiles(axes[0, 0], stats, ("ttft", "e2el"))
    _percentiles(axes[0, 1], stats, ("itl", "tpot"))
    _timeline(axes[1, 0], run, stats)
    _first_tokens(axes[1, 1], run)
    figure.savefig(file, dpi=110)


def _percentiles(axes: "Axes", stats: Stats, names: tuple[str, ...]) -> None:
    at = np.linspace(0, 100, 201)
    for name in names:
        if len(stats.latencies[name]):
            axes.plot(at, np.percentile(stats.latencies[name], at), label=NAMES[name])
    axes.set(xlabel="percentile", ylabel="ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _timeline(axes: "Axes", run: Run, stats: Stats) -> None:
    """Output tokens per second (a request's tokens spread evenly over its events), and requests in flight."""
    edges = np.linspace(0, stats.duration, NUM_BINS + 1)
    rate = np.zeros(NUM_BINS)
    for record in stats.completed:
        if record.events:
            counts, _ = np.histogram(np.array(record.events) - run.start, edges)
            rate += counts * (record.output_tokens / len(record.events))
    middle = (edges[:-1] + edges[1:]) / 2
    axes.plot(middle, rate / (edges[1] - edges[0]), label="output tokens per s")
    axes.set(xlabel="s", ylabel="tokens per s", ylim=(0, None))
    sent = np.sort([record.sent - run.start for record in run.records])
    ended = np.sort([record.ended - run.start for record in run.records])
    open_requests = np.searchsorted(sent, middle, "right") - np.searchsorted(ended, middle, "right")
    right = axes.twinx()
    right.plot(middle, open_requests, color="tab:orange", label="requests in flight")
    right.set(ylabel="requests", ylim=(0, None))
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines])
    axes.grid(alpha=0.3)


def _first_tokens(axes: "Axes", run: Run) -> None:
    found = [(r.sent - run.start, 1e3 * (r.events[0] - r.sent)) for r in run.records if r.error is None and r.events]
    axes.scatter([x for x, _ in found], [y for _, y in found], s=8)
    axes.set(xlabel="sent at, s", ylabel="time to first token, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
