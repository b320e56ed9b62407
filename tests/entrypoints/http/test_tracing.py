"""Spans, received in memory instead of by a collector."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.config.server import ServerConfig
from quire.entrypoints.tracing import Tracer, check_tracing
from tests.entrypoints.stub_server import MODEL, StubServer, stub_engine, stub_server

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    def __init__(self, server: StubServer) -> None:
        self.server = server
        self.exporter = InMemorySpanExporter()
        server.server.context.tracer = Tracer("", MODEL, self.exporter)

    def spans(self, count: int) -> list[ReadableSpan]:
        """A client may get its response before the server has closed the span."""
        self.server.wait_until(lambda: len(self.exporter.get_finished_spans()) >= count)
        spans = list(self.exporter.get_finished_spans())
        assert len(spans) == count
        return spans


@pytest.fixture
def traced(server: StubServer) -> Iterator[Traced]:
    yield Traced(server)
    server.server.context.tracer = None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span(traced: Traced, stream: bool) -> None:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stream": stream}
    response = traced.server.post("/v1/completions", body, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"})
    assert response.status_code == 200
    (span,) = traced.spans(1)
    assert span.name == "llm_request" and span.kind == SpanKind.SERVER and span.status.status_code == StatusCode.UNSET
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None and f"{span.parent.span_id:016x}" == SPAN
    got = dict(span.attributes or {})
    assert got.pop("gen_ai.request.id").startswith("cmpl-")
    first, total = got.pop("gen_ai.latency.time_to_first_token"), got.pop("gen_ai.latency.e2e")
    assert 0 < first <= total
    assert 0 <= got.pop("gen_ai.latency.time_in_model_decode") <= total
    assert span.start_time is not None and span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(total, abs=1e-5)
    assert got == {
        "gen_ai.response.model": MODEL,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.n": 1,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
    }


def test_every_prompt_has_a_span_and_without_a_header_a_new_trace(traced: Traced) -> None:
    body = {"model": MODEL, "prompt": [[1, 2], [1, 2, 3]], "max_tokens": 2, "n": 2}
    assert traced.server.post("/v1/completions", body).status_code == 200
    spans = traced.spans(2)
    assert sorted((span.attributes or {})["gen_ai.usage.prompt_tokens"] for span in spans) == [2, 3]
    assert {(span.attributes or {})["gen_ai.usage.completion_tokens"] for span in spans} == {4}
    assert all(span.parent is None for span in spans)


def test_a_malformed_header_is_ignored(traced: Traced) -> None:
    body = {"model": MODEL, "prompt": [1], "max_tokens": 1}
    assert traced.server.post("/v1/completions", body, headers={"traceparent": "nonsense"}).status_code == 200
    assert traced.spans(1)[0].parent is None


def test_a_disconnect_is_an_error(slow: StubServer) -> None:
    traced = Traced(slow)
    stream = slow.client().completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True)
    next(stream)
    stream.close()
    (span,) = traced.spans(1)
    assert span.status.status_code == StatusCode.ERROR
    assert "gen_ai.latency.time_to_first_token" in (span.attributes or {})


def test_an_administrator_s_abort_is_an_error(slow: StubServer) -> None:
    traced = Traced(slow)
    stream = slow.client().completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True)
    first = next(stream)
    assert slow.post("/abort_requests", {"request_ids": [first.id]}).status_code == 200
    (span,) = traced.spans(1)
    assert span.status.status_code == StatusCode.ERROR and span.status.description == "aborted"
    assert (span.attributes or {})["gen_ai.usage.completion_tokens"] >= 1


def test_the_engines_cause_of_death_is_in_the_span(slow: StubServer) -> None:
    traced = Traced(slow)
    stream = slow.client().completions.create(model=MODEL, prompt=[1], max_tokens=4000, stream=True)
    next(stream)
    slow.in_loop(lambda: slow.engine.die("it was hit by a meteorite"))
    (span,) = traced.spans(1)
    assert span.status.status_code == StatusCode.ERROR and "meteorite" in (span.status.description or "")


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_missing_collector_fails_no_request(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with stub_server(stub_engine(), ServerConfig(otlp_traces_endpoint="http://127.0.0.1:9")) as server:
        assert server.post("/v1/completions", {"prompt": [1], "max_tokens": 2}).status_code == 200


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'quire\[otel\]'"):
        check_tracing()


def test_an_unknown_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
    with pytest.raises(ValueError, match="allowed: grpc, http/protobuf"):
        check_tracing()


def test_opentelemetry_is_imported_only_if_enabled() -> None:
    program = "import sys, quire.entrypoints.http.app; print([m for m in sys.modules if 'opentelemetry' in m])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
