"""Metrics in Prometheus' text format, and the HTTP server's own counters."""

from collections import Counter as Tally
from collections.abc import Iterable

from quire.entrypoints.http.process_metrics import PROCESS_HELP
from quire.metrics.engine import HELP, REQUEST_SECONDS
from quire.metrics.kinds import Counter, Gauge, Histogram, Metric, Observations

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "quire:"
HELP_TEXTS = (
    HELP
    | PROCESS_HELP
    | {
        "quire:admission_rejections": "Requests refused with 503, because too many were waiting.",
        "quire:http_requests": "HTTP requests completed.",
        "quire:http_requests_in_progress": "HTTP requests in progress.",
        "quire:http_request_duration_seconds": "From an HTTP request's headers to the last byte of its response.",
    }
)


class HttpMetrics:
    def __init__(self) -> None:
        self.in_progress = 0
        self.rejections = 0
        self.requests: Tally[tuple[str, str, int]] = Tally()
        self.seconds: dict[str, Observations] = {}

    def record(self, method: str, handler: str, status: int, seconds: float) -> None:
        """`handler` is a known route, never a raw path: labels must be bounded."""
        self.requests[method, handler, status] += 1
        self.seconds.setdefault(handler, Observations(REQUEST_SECONDS)).add(seconds)

    def snapshot(self) -> list[Metric]:
        counters = [
            Counter("quire:http_requests", {"method": method, "handler": handler, "status": str(status)}, count)
            for (method, handler, status), count in sorted(self.requests.items())
        ]
        times = [
            seconds.histogram("quire:http_request_duration_seconds", {"handler": handler})
            for handler, seconds in sorted(self.seconds.items())
        ]
        load = [
            Gauge("quire:http_requests_in_progress", {}, self.in_progress),
            Counter("quire:admission_rejections", {}, self.rejections),
        ]
        return [*load, *counters, *times]


def prometheus_text(metrics: Iterable[Metric], prefix: str = "quire") -> str:
    """Metrics of one name are grouped under one HELP and one TYPE line, as the format requires; `prefix` replaces
    ours."""
    families: dict[str, list[str]] = {}
    for metric in metrics:
        name, kind = metric.name, _kind(metric)
        if name.startswith(PREFIX):
            name = f"{prefix}:{name.removeprefix(PREFIX)}"
        if isinstance(metric, Counter) and not name.endswith("_total"):
            name += "_total"
        if name not in families:
            families[name] = [f"# HELP {name} {HELP_TEXTS.get(metric.name, '')}".rstrip(), f"# TYPE {name} {kind}"]
        lines = families[name]
        if isinstance(metric, Histogram):
            for bound, count in metric.buckets.items():
                lines.append(f"{name}_bucket{_labels({**metric.labels, 'le': bound})} {count}")
            lines.append(f"{name}_sum{_labels(metric.labels)} {metric.sum!r}")
            lines.append(f"{name}_count{_labels(metric.labels)} {metric.count}")
        elif isinstance(metric, (Counter, Gauge)):
            lines.append(f"{name}{_labels(metric.labels)} {metric.value!r}")
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def _kind(metric: Metric) -> str:
    return type(metric).__name__.lower()


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
