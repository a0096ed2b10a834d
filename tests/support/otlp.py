"""An OTLP collector in process: the real gRPC service for traces, which keeps what exporters send.

::

    async with Collector() as collector:
        ...                                   # tracing.endpoint: collector.endpoint
        spans = await collector.until(lambda spans: len(spans) >= 3)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class ReceivedSpan:
    """Ids are in hex, as ``traceparent`` has them; an absent parent is an empty string."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    """``SERVER``, ``CLIENT`` or ``INTERNAL``."""
    error: str | None
    """The status' message, where the status is an error."""
    attributes: Mapping[str, Any]
    resource: Mapping[str, Any]
    start: int
    end: int
    """Unix nanoseconds."""

    def sent(self, traceparent: str | None) -> bool:
        """Whether a call with that header was made within this span, and told that it is sampled."""
        if traceparent is None:
            return False
        version, trace_id, span_id, flags = traceparent.split("-")
        sampled = int(flags, 16) & 1 == 1  # 2 says that the trace id is random
        return (version, trace_id, span_id, sampled) == ("00", self.trace_id, self.span_id, True)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``opentelemetry.proto.collector.trace.v1.TraceService`` on a free port."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        """In the order received: a span is sent when it has ended."""
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self._changed = asyncio.Condition()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(None)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, _: grpc.aio.ServicerContext[Any, Any]
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        async with self._changed:
            for group in request.resource_spans:
                resource = _plain(group.resource.attributes)
                self.spans += [_received(span, resource) for scope in group.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(
        self, condition: Callable[[list[ReceivedSpan]], bool], within_s: float = 10.0
    ) -> list[ReceivedSpan]:
        """The spans so far, once that holds for them. Raises TimeoutError, which names them."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: condition(self.spans))
        except TimeoutError:
            raise TimeoutError(f"received only {[span.name for span in self.spans]}") from None
        return list(self.spans)


def _received(span: trace_pb2.Span, resource: Mapping[str, Any]) -> ReceivedSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        error=span.status.message if failed else None,
        attributes=_plain(span.attributes),
        resource=resource,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    def value(of: AnyValue) -> Any:
        kind = of.WhichOneof("value")
        return getattr(of, kind) if kind else None

    return {attribute.key: value(attribute.value) for attribute in attributes}
