"""The metrics for Prometheus and Grafana."""

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import CacheConfig
from quire.config.server import ServerConfig
from quire.entrypoints.http.metrics import HELP_TEXTS, prometheus_text
from quire.messages.kv_transfer import TierStats
from quire.metrics.engine import RESIDENCY, cache_config_info, tier_metrics
from quire.metrics.kinds import Counter
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples" / "grafana.json"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


@pytest.fixture
def text(client: openai.OpenAI, server: StubServer) -> str:
    client.completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4)
    # The stub engine has no blocks, so it does not add this line.
    return server.get("/metrics").text + prometheus_text([cache_config_info(CacheConfig(), 8, "m", 64)])


def exposed(text: str) -> dict[str, str]:
    """Metric names and their types."""
    pairs = (line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    return {name: kind for name, kind in pairs}


def test_prometheus_reads_it(text: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    assert all(family.documentation for family in families.values())
    latency = families["quire:e2e_request_latency_seconds"]
    buckets = [sample for sample in latency.samples if sample.name.endswith("_bucket")]
    assert buckets[-1].labels["le"] == "+Inf"
    (count,) = (sample.value for sample in latency.samples if sample.name.endswith("_count"))
    assert buckets[-1].value == count >= 1
    assert [bucket.value for bucket in buckets] == sorted(bucket.value for bucket in buckets)
    between = families["quire:inter_token_latency_seconds"]
    (count,) = (sample.value for sample in between.samples if sample.name.endswith("_count"))
    assert count >= 3


def test_labels_are_escaped() -> None:
    name = 'a "model" \\ of\nmine'
    (family,) = text_string_to_metric_families(
        prometheus_text([Counter("quire:prompt_tokens", {"model_name": name}, 1)])
    )
    assert family.samples[0].labels == {"model_name": name}


def test_the_documentation_lists_all_and_only_what_is_there(text: str) -> None:
    rows = re.findall(
        r"^\| `((?:quire:|process_)\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.MULTILINE
    )
    with_flag = {f"quire:{name}": "histogram" for name in RESIDENCY}  # of --kv-cache-metrics
    with_flag |= {f"{name}_total": "counter" for name in HELP_TEXTS if name.startswith("quire:spec_decode_")}
    counters = ("quire:lora_adapters_loaded", "quire:lora_adapters_evicted")  # these and gauges of --enable-lora
    with_flag |= {f"{name}_total": "counter" for name in counters}
    with_flag |= {n: "gauge" for n in HELP_TEXTS if n.startswith("quire:lora_") and n not in counters}
    stats = TierStats("cpu", dropped_blocks={"busy": 1}, errors={"load": 1}, latencies={"load": {50: 0.1}})
    tier = tier_metrics(stats, {}, 0.0)  # of --kv-offloading-size and -path
    assert {metric.name for metric in tier} == {name for name in HELP_TEXTS if name.startswith("quire:kv_tier_")}
    with_flag |= exposed(prometheus_text(tier))
    assert dict(rows) == exposed(text) | with_flag
    assert len(HELP_TEXTS) == len(rows)


def test_the_names_of_vllm() -> None:
    with stub_server(stub_engine(), ServerConfig(metrics_prefix="vllm")) as server:
        server.client().completions.create(model=MODEL, prompt=[1, 2, 3], max_tokens=4)
        text = server.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert not any(name.startswith("quire:") for name in families)
    assert families["vllm:num_requests_running"].samples[0].labels == {"model_name": MODEL, "engine": "0"}
    reasons = {sample.labels["reason"] for sample in families["vllm:num_requests_waiting_by_reason"].samples}
    assert reasons == {"capacity", "deferred"}
    assert families["process_resident_memory_bytes"].samples[0].value > 1e6
    assert families["process_cpu_seconds"].type == "counter"
    with pytest.raises(ValueError, match="--metrics-prefix"):
        ServerConfig(metrics_prefix="my:")


def expressions(panel: dict[str, Any]) -> list[str]:
    inner = [one for child in panel.get("panels", []) for one in expressions(child)]
    return [target["expr"] for target in panel.get("targets", [])] + inner


def test_the_dashboard_shows_what_the_server_exposes(text: str) -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    shown = [one for panel in dashboard["panels"] for one in expressions(panel)]
    shown += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    samples = {name + suffix for name, kind in exposed(text).items() for suffix in SUFFIXES[kind]}
    used = {name for expression in shown for name in re.findall(r"quire:\w+", expression)}
    assert used and used <= samples
    for expression in shown:
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_the_dashboard_can_be_imported() -> None:
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    assert dashboard["schemaVersion"] >= 36 and dashboard["title"] == "Quire"
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model_name": "query"}
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
