"""A benchmark's result: metrics with their spread, and the machine; as text or as JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One measured quantity, a value per repetition."""

    name: str
    unit: str
    values: Sequence[float]
    lower_is_better: bool = False

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return min(self.values) if self.lower_is_better else max(self.values)

    def as_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "median": self.median,
            "best": self.best,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
        }

    def as_text(self) -> str:
        low, high = min(self.values), max(self.values)
        spread = f"median (best {self.best:.4g}, range {low:.4g} to {high:.4g} over {len(self.values)})"
        shown = f"  {self.name:<22}{self.median:>10.4g} {self.unit:<6} {spread if len(self.values) > 1 else ''}"
        return shown.rstrip()


@dataclass(frozen=True)
class Report:
    benchmark: str
    workload: dict[str, Any]
    engine: dict[str, Any]  # the engine options that were given
    machine: dict[str, Any]
    metrics: Sequence[Metric] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)  # other results; in the JSON only

    def as_json(self) -> str:
        parts = {
            "benchmark": self.benchmark,
            "workload": self.workload,
            "engine": self.engine,
            "machine": self.machine,
            "metrics": {metric.name.replace(" ", "_"): metric.as_json() for metric in self.metrics},
        }
        if self.details:
            parts["details"] = self.details
        return json.dumps(parts, indent=2)

    def as_text(self) -> str:
        facts = {name: value for name, value in self.machine.items() if name != "probe"}
        lines = [f"quire bench {self.benchmark}: {_listed(self.workload)}", *(m.as_text() for m in self.metrics)]
        if self.engine:
            lines.append(f"  engine: {_listed(self.engine)}")
        lines.append(f"  machine: {_listed(facts)}")
        if "probe" in self.machine:
            lines.append(f"  probe: {_listed(self.machine['probe'])}")
        return "\n".join(lines)


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
