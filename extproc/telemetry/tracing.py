"""OpenTelemetry traces: the exchange, each pick and prefill attempt, each release. W3C ``traceparent`` in and out.

::

    extproc exchange            child of Envoy's span, where Envoy traces; else of what the request's traceparent names
    ├── pick                    choosing a prefiller, with the wait for a place on one
    └── prefill                 one call; its traceparent goes to the prefiller
        └── release             freeing what that call left pinned, whichever replica does it

Nothing of OpenTelemetry is imported unless ``tracing.endpoint`` is set.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from extproc import configsections

Header = tuple[str, bytes]
_PROPAGATED: Final = ("traceparent", "tracestate")
_EXPORT_TIMEOUT_S: Final = 2
_REFERENCE: Final = struct.Struct("!16s8sB")


class Span:
    """One span, or nothing at all when tracing is off: every call is then free of effect."""

    __slots__ = ("_api", "_span")

    def __init__(self, span: Any = None, api: Any = None) -> None:
        self._span = span
        self._api = api

    def set(self, **attributes: Any) -> None:
        """Add attributes; those that are None are left out."""
        if self._span is not None:
            self._span.set_attributes({f"extproc.{k}": v for k, v in attributes.items() if v is not None})

    def fail(self, reason: str) -> None:
        """Mark the span as an error."""
        if self._span is not None:
            self._span.set_status(self._api.StatusCode.ERROR, reason)

    def end(self) -> None:
        if self._span is not None:
            self._span.end()

    @property
    def reference(self) -> bytes:
        """The span as 25 bytes (trace id, span id, flags) for :meth:`Tracing.resumed`; none where there is no span."""
        if self._span is None:
            return b""
        context = self._span.get_span_context()
        return _REFERENCE.pack(context.trace_id.to_bytes(16), context.span_id.to_bytes(8), context.trace_flags)


NO_SPAN: Final = Span()


class Tracing:
    """Makes spans. Without an endpoint it makes none, and passes clients' trace headers on as they are."""

    def __init__(self, settings: configsections.Tracing) -> None:
        """Raises ConfigError where the OpenTelemetry SDK is not installed."""
        self._api: Any = None
        if settings.endpoint:
            self._provider = _provider(settings)
            # Imported here and not in each call: the first one would hold up the event loop for 100 ms.
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            self._api = trace
            self._propagator = TraceContextTextMapPropagator()
            self._tracer = self._provider.get_tracer("extproc")

    def called(self, context: Any) -> Sequence[Header]:
        """What an Envoy that traces says of its own span, in the metadata of its gRPC call."""
        if self._api is None:
            return ()
        return [(key, value.encode()) for key, value in context.invocation_metadata() or () if key in _PROPAGATED]

    def exchange(self, headers: Sequence[Header]) -> Span:
        """The span of one HTTP request, a child of what the ``traceparent`` names."""
        if self._api is None:
            return NO_SPAN
        carrier: dict[str, str] = {}
        for name, value in headers:
            if name in _PROPAGATED:  # lines of a tracestate belong together; a second traceparent makes both invalid
                carrier[name] = ",".join(filter(None, (carrier.get(name), value.decode("latin-1"))))
        context = self._propagator.extract(carrier)
        return self._started("extproc exchange", context, self._api.SpanKind.SERVER)

    def child(self, parent: Span, name: str, *, client: bool = False) -> Span:
        """A span below ``parent``; ``client``: of a call to another server."""
        if self._api is None or parent._span is None:
            return NO_SPAN
        kind = self._api.SpanKind.CLIENT if client else self._api.SpanKind.INTERNAL
        return self._started(name, self._api.set_span_in_context(parent._span), kind)

    def resumed(self, reference: bytes, name: str) -> Span:
        """A span below one that has ended, maybe in another process. None, where there is no such reference."""
        if self._api is None or len(reference) != _REFERENCE.size:
            return NO_SPAN
        trace_id, span_id, flags = _REFERENCE.unpack(reference)
        parent = self._api.SpanContext(
            int.from_bytes(trace_id), int.from_bytes(span_id), is_remote=True, trace_flags=self._api.TraceFlags(flags)
        )
        context = self._api.set_span_in_context(self._api.NonRecordingSpan(parent))
        return self._started(name, context, self._api.SpanKind.INTERNAL)

    def _started(self, name: str, context: Any, kind: Any) -> Span:
        return Span(self._tracer.start_span(name, context=context, kind=kind), self._api)

    def inject(self, span: Span, headers: Sequence[Header]) -> Sequence[Header]:
        """Headers for a call made within ``span``: its ``traceparent`` in place of the client's."""
        if self._api is None or span._span is None:
            return headers
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._api.set_span_in_context(span._span))
        kept = [(name, value) for name, value in headers if name not in _PROPAGATED]
        return [*kept, *((name, value.encode("latin-1", "replace")) for name, value in carrier.items())]

    def shutdown(self) -> None:
        """Send what is left. Blocks for at most a few seconds."""
        if self._api is not None:
            self._provider.shutdown()


def _provider(settings: configsections.Tracing) -> Any:
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
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, insecure=settings.insecure, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider
