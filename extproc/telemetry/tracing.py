"""OpenTelemetry traces: the exchange, each prefill attempt, each release. W3C ``traceparent`` in and out.

Nothing of OpenTelemetry is imported unless ``tracing.endpoint`` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from extproc import config

Header = tuple[str, bytes]
_PROPAGATED = ("traceparent", "tracestate")


class Span:
    """One span, or nothing at all when tracing is off: every call is then free of effect."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        """Add attributes; those that are None are left out."""
        if self._span is not None:
            self._span.set_attributes({f"extproc.{k}": v for k, v in attributes.items() if v is not None})

    def fail(self, reason: str) -> None:
        """Mark the span as an error."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, reason)

    def end(self) -> None:
        if self._span is not None:
            self._span.end()


NO_SPAN = Span()


class Tracing:
    """Makes spans. Without an endpoint it makes none, and passes clients' trace headers on as they are."""

    def __init__(self, settings: config.Tracing) -> None:
        self._tracer: Any = None
        self._provider: Any = None
        if settings.endpoint:
            self._provider = _provider(settings)
            self._tracer = self._provider.get_tracer("extproc")

    def exchange(self, headers: Sequence[Header]) -> Span:
        """The span of one HTTP request, a child of what its ``traceparent`` names."""
        if self._tracer is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: value.decode("latin-1") for name, value in headers if name in _PROPAGATED}
        context = TraceContextTextMapPropagator().extract(carrier)
        return Span(self._tracer.start_span("extproc exchange", context=context, kind=SpanKind.SERVER))

    def child(self, parent: Span, name: str, *, client: bool = False) -> Span:
        """A span below ``parent``; ``client``: of a call to another server."""
        if self._tracer is None or parent._span is None:
            return NO_SPAN
        from opentelemetry.trace import SpanKind, set_span_in_context

        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        return Span(self._tracer.start_span(name, context=set_span_in_context(parent._span), kind=kind))

    def inject(self, span: Span, headers: Sequence[Header]) -> Sequence[Header]:
        """Headers for a call made within ``span``: its ``traceparent`` in place of the client's."""
        if span._span is None:
            return headers
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, context=set_span_in_context(span._span))
        kept = [(name, value) for name, value in headers if name not in _PROPAGATED]
        return [*kept, *((name, value.encode()) for name, value in carrier.items())]

    def shutdown(self) -> None:
        """Send what is left. Blocks for at most a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(settings: config.Tracing) -> Any:
    """Raises ConfigError where the OpenTelemetry SDK is not installed."""
    from extproc.errors import ConfigError

    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError:
        raise ConfigError("tracing.endpoint: needs OpenTelemetry; pip install 'extproc[otlp]'") from None
    attributes: Mapping[str, str] = {"service.name": settings.service_name}
    provider = TracerProvider(
        resource=Resource.create(attributes), sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio))
    )
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, insecure=settings.insecure, timeout=2)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider
