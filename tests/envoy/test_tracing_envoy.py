"""One trace for one request, at both engines, whoever begins it: the client, Envoy, or the service."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.gateway import Gateway
from tests.support.otlp import Collector, ReceivedSpan

pytestmark = pytest.mark.envoy

CLIENTS: Final = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT: Final = f"00-{CLIENTS}-b7ad6b7169203331-01"


def tracing_to(collector: Collector) -> Any:
    """Envoy's own tracer, as a mesh would set it up."""
    address = {"socket_address": {"address": "127.0.0.1", "port_value": int(collector.endpoint.rpartition(":")[2])}}
    http2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    cluster = {
        "name": "otel",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": http2,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "otel",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}],
        },
    }
    tracer = {
        "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
        "grpc_service": {"envoy_grpc": {"cluster_name": "otel"}},
        "service_name": "envoy",
        "sampler": {
            "name": "envoy.tracers.opentelemetry.samplers.always_on",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.tracers.opentelemetry.samplers.v3.AlwaysOnSamplerConfig"
            },
        },
    }

    def change(bootstrap: dict[str, Any]) -> None:
        bootstrap["static_resources"]["clusters"].append(cluster)
        (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
        provider = {"name": "envoy.tracers.opentelemetry", "typed_config": tracer}
        chain["filters"][0]["typed_config"]["tracing"] = {"provider": provider}

    return change


async def _exchange(gateway: Gateway, collector: Collector, **headers: str) -> tuple[ReceivedSpan, str, str]:
    """One request: the service's span of it, and the trace and parent that the decoder was told."""
    collector.spans.clear()
    assert (await gateway.post(headers=headers)).status_code == 200

    def whole(spans: list[ReceivedSpan]) -> bool:
        return {"extproc exchange", "prefill"} <= {span.name for span in spans}

    spans = {span.name: span for span in await collector.until(whole) if span.resource["service.name"] != "envoy"}
    exchange = spans["extproc exchange"]
    assert spans["prefill"].parent_id == exchange.span_id
    assert spans["prefill"].sent(gateway.prefills[-1].header("traceparent"))
    told = str(gateway.decodes[-1].header("traceparent")).split("-")
    assert told[1] == exchange.trace_id  # the same at both engines
    return exchange, told[1], told[2]


@pytest.mark.parametrize("envoy_traces", [True, False])
async def test_both_engines_are_told_of_one_trace(envoy_traces: bool) -> None:
    async with Collector() as collector:
        change = tracing_to(collector) if envoy_traces else None
        async with Gateway.started({"tracing": {"endpoint": collector.endpoint}}, change=change) as gateway:
            exchange, _, decoders_parent = await _exchange(gateway, collector)
            assert exchange.trace_id != CLIENTS
            # Envoy's span is above ours; where it makes none, ours is above the decoder's.
            assert bool(exchange.parent_id) is envoy_traces
            assert (decoders_parent == exchange.span_id) is not envoy_traces

            exchange, trace_id, decoders_parent = await _exchange(gateway, collector, traceparent=TRACEPARENT)
            assert trace_id == CLIENTS
            clients_span = TRACEPARENT.split("-")[2]
            assert (exchange.parent_id == clients_span) is not envoy_traces
            assert (decoders_parent == clients_span) is not envoy_traces
