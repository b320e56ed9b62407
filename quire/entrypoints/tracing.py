"""A trace span per request, with `--otlp-traces-endpoint`. OpenTelemetry is imported only then."""

import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.config.environment import OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_SERVICE_NAME
from quire.engine.outputs import RequestOutput
from quire.messages.sampling_params import SamplingParams
from quire.metrics.request import RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
TRACE_HEADERS = ("traceparent", "tracestate")
EXPORT_SECONDS = 3.0  # timeout of an export, and of the flush at shutdown

Batch = Sequence[tuple[int, RequestOutput]]  # prompt index and its new output


def check_tracing() -> None:
    """Fail early if tracing's requirements are missing."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--otlp-traces-endpoint needs OpenTelemetry, which is not installed ({error}); "
            "pip install 'quire[otel]', or leave the flag out"
        ) from None
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get()  # an unknown one is an error now


class Tracer:
    """Exports spans to `endpoint`, in batches from its own thread; or to `exporter`, one by one."""

    def __init__(self, endpoint: str, model_name: str, exporter: "SpanExporter | None" = None) -> None:
        check_tracing()
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.model_name = model_name
        service = OTEL_SERVICE_NAME.get()
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False)
        self._provider.add_span_processor(
            SimpleSpanProcessor(exporter) if exporter is not None else BatchSpanProcessor(_otlp_exporter(endpoint))
        )
        self._tracer = self._provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()

    async def traced(
        self,
        outputs: AsyncGenerator[Batch, None],
        engine_ids: Sequence[str],
        params: SamplingParams,
        headers: Mapping[str, str],
    ) -> AsyncGenerator[Batch, None]:
        """Passes outputs through. A prompt's span is created at its last output, or as an error if there is none."""
        parent = self._propagator.extract({name: headers[name] for name in TRACE_HEADERS if name in headers})
        began = time.time()
        open_spans: dict[int, RequestOutput | None] = dict.fromkeys(range(len(engine_ids)))
        cause = "aborted before the end"
        try:
            async with aclosing(outputs):
                async for batch in outputs:
                    for index, output in batch:
                        open_spans[index] = output
                        if output.finished:
                            del open_spans[index]
                            self._span(engine_ids[index], params, parent, output, began, _failure(output))
                    yield batch
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise
        finally:
            for index, last in open_spans.items():
                self._span(engine_ids[index], params, parent, last, began, cause)

    def close(self) -> None:
        """Flush remaining spans, without waiting for an unresponsive collector."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(EXPORT_SECONDS)

    def _span(
        self,
        engine_id: str,
        params: SamplingParams,
        parent: "Context",
        output: RequestOutput | None,
        began: float,
        failure: str | None,
    ) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        times = output.metrics if output is not None else None
        attributes = {"gen_ai.response.model": self.model_name, "gen_ai.request.id": engine_id, **_requested(params)}
        if output is not None:
            attributes["gen_ai.usage.prompt_tokens"] = len(output.prompt_token_ids)
        if times is not None:
            attributes |= _measured(times)
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=_nanoseconds(times.arrival_time if times is not None else began),
        )
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(_nanoseconds((times and times.finished_time) or time.time()))


def _requested(params: SamplingParams) -> dict[str, Any]:
    requested = {
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": params.n,
    }
    return {name: value for name, value in requested.items() if value is not None}


def _measured(times: RequestMetrics) -> dict[str, Any]:
    finished = times.finished_time
    measured = {
        "gen_ai.usage.completion_tokens": times.num_generation_tokens if finished is not None else None,
        "gen_ai.latency.time_in_queue": times.time_in_queue,
        "gen_ai.latency.time_to_first_token": times.time_to_first_token,
        "gen_ai.latency.e2e": finished - times.arrival_time if finished is not None else None,
        "gen_ai.latency.time_in_model_prefill": times.time_in_prefill,
        "gen_ai.latency.time_in_model_decode": times.time_in_decode,
        "gen_ai.latency.time_in_model_inference": times.time_in_inference,
    }
    return {name: value for name, value in measured.items() if value is not None}


def _failure(output: RequestOutput) -> str | None:
    reasons = {choice.finish_reason for choice in output.outputs}
    if "error" in reasons:
        return output.error or "the engine failed this request"
    return "aborted" if "abort" in reasons else None


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _otlp_exporter(endpoint: str) -> "SpanExporter":
    if OTEL_EXPORTER_OTLP_TRACES_PROTOCOL.get() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint, timeout=EXPORT_SECONDS)
