"""A benchmark's result: metrics with their spread, the machine, and how it compares; as text or as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.bench.anchors import MACHINE, Anchor


@dataclass(frozen=True)
class Metric:
    """One measured quantity, a value per repetition."""

    name: str
    unit: str
    values: Sequence[float]
    lower_is_better: bool = False
    anchors: Sequence[Anchor] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return min(self.values) if self.lower_is_better else max(self.values)

    def times_faster_than(self, anchor: Anchor) -> float:
        """Above 1: ahead of the anchor, whether the metric is a time or a rate."""
        return anchor.value / self.median if self.lower_is_better else self.median / anchor.value

    def as_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "median": self.median,
            "best": self.best,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
            "anchors": {a.engine: {"value": a.value, "times_faster": self.times_faster_than(a)} for a in self.anchors},
        }

    def as_text(self) -> str:
        low, high = min(self.values), max(self.values)
        spread = f"median (best {self.best:.4g}, range {low:.4g} to {high:.4g} over {len(self.values)})"
        shown = f"  {self.name:<22}{self.median:>10.4g} {self.unit:<6} {spread if len(self.values) > 1 else ''}"
        lines = [shown.rstrip()]
        lines += [f"  {'':<22}{self.times_faster_than(a):>10.2f} x {a.engine}, {a.value:g}" for a in self.anchors]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    benchmark: str
    workload: dict[str, Any]
    engine: dict[str, Any]  # the engine options that were given
    machine: dict[str, Any]
    metrics: Sequence[Metric] = field(default_factory=list)
    anchors_taken_on: str = MACHINE
    details: dict[str, Any] = field(default_factory=dict)  # what is no metric; in the JSON only

    def as_json(self) -> str:
        parts = {
            "benchmark": self.benchmark,
            "workload": self.workload,
            "engine": self.engine,
            "machine": self.machine,
            "metrics": {metric.name.replace(" ", "_"): metric.as_json() for metric in self.metrics},
            "anchors_taken_on": self.anchors_taken_on,
        }
        if self.details:
            parts["details"] = self.details
        return json.dumps(parts, indent=2)

    def as_text(self) -> str:
        facts = {name: value for name, value in self.machine.items() if name != "probe"}
        lines = [f"quire bench {self.benchmark}: {_listed(self.workload)}", *(m.as_text() for m in self.metrics)]
        if any(metric.anchors for metric in self.metrics):
            lines.append(f"  x: times faster than the engine's reference number, measured on {self.anchors_taken_on}")
        if self.engine:
            lines.append(f"  engine: {_listed(self.engine)}")
        lines.append(f"  machine: {_listed(facts)}")
        if "probe" in self.machine:
            lines.append(f"  probe: {_listed(self.machine['probe'])}")
        return "\n".join(lines)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
