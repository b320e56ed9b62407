"""The load in a response's header, for balancers that ask for it (ORCA's endpoint-load-metrics)."""

import json

from starlette.datastructures import Headers
from starlette.types import Scope

from quire.messages.requests import SchedulerStats

ASKED, REPORT = b"endpoint-load-metrics-format", "endpoint-load-metrics"


def load_report(scope: Scope, stats: SchedulerStats) -> dict[str, str] | None:
    """The header, in the format that the request's own names: TEXT or JSON."""
    if not any(name == ASKED for name, _ in scope["headers"]):
        return None
    metrics = {"kv_cache_usage_perc": stats.kv_cache_usage, "num_requests_waiting": float(stats.num_waiting)}
    format = Headers(scope=scope)[ASKED.decode()].upper()
    if format == "TEXT":
        return {REPORT: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())}
    return {REPORT: "JSON " + json.dumps({"named_metrics": metrics})} if format == "JSON" else None
