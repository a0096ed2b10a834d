"""The scripted Envoy tells the truth: the real one does with each violation what the scripted one says it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from extproc.processes import envoy_process
from tests.support.engines import Answer, StubEngine
from tests.support.scripted_service import BODY, Handler, scripted, serving
from tests.support.violations import BUFFERED_VIOLATIONS, FULL_DUPLEX_VIOLATIONS, HANGS, Violation

pytestmark = pytest.mark.envoy


def bootstrap(service: str, upstream: str, mode: str) -> str:
    """One listener with an ext_proc filter of default rules. Envoy reads JSON as the YAML it is."""

    def typed(name: str, **values: object) -> dict[str, object]:
        return {"@type": f"type.googleapis.com/envoy.{name}", **values}

    def address(host: str, port: int) -> dict[str, object]:
        return {"socket_address": {"address": host, "port_value": port}}

    def cluster(name: str, target: str, **http: object) -> dict[str, object]:
        host, _, port = target.rpartition(":")
        endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(host, int(port))}}]}]
        return {
            "name": name,
            "type": "STATIC",
            "load_assignment": {"cluster_name": name, "endpoints": endpoints},
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": typed(
                    "extensions.upstreams.http.v3.HttpProtocolOptions", **http
                )
            },
        }

    filters = "extensions.filters.http"
    processor = typed(
        f"{filters}.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "service"}},
        allow_mode_override=True,
        message_timeout="2s",
        max_message_timeout="60s",
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb", "extproc"]}},
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": mode,
            "response_header_mode": "SEND",
            "request_trailer_mode": "SEND" if mode == "FULL_DUPLEX_STREAMED" else "SKIP",
        },
    )
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="http",
        route_config={
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "up"}}]}
            ],
            "response_headers_to_add": [{"header": {"key": "x-details", "value": "%RESPONSE_CODE_DETAILS%"}}],
        },
        http_filters=[
            {"name": "envoy.filters.http.ext_proc", "typed_config": processor},
            {"name": "envoy.filters.http.router", "typed_config": typed(f"{filters}.router.v3.Router")},
        ],
    )
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return json.dumps(
        {
            "admin": {"address": address("127.0.0.1", 0)},
            "static_resources": {
                "listeners": [{"name": "gateway", "address": address("127.0.0.1", 0), "filter_chains": [chain]}],
                "clusters": [
                    cluster(
                        "up",
                        upstream,
                        explicit_http_config={"http_protocol_options": {}},
                        common_http_protocol_options={"max_requests_per_connection": 1},
                    ),
                    cluster("service", service, explicit_http_config={"http2_protocol_options": {}}),
                ],
            },
        }
    )


class FirstRead:
    """A gRPC context whose first message was looked at already."""

    def __init__(self, context: Any, first: Any) -> None:
        self._context = context
        self._first = [first]
        self.write = context.write

    async def read(self) -> Any:
        return self._first.pop() if self._first else await self._context.read()


def playing(cases: Mapping[str, Violation]) -> Handler:
    """A service that breaks the protocol in the way that the request's x-case header names."""

    async def handle(context: Any) -> None:
        first = await context.read()
        names = [line.raw_value for line in first.request_headers.headers.headers if line.key == "x-case"]
        await scripted(cases[names[0].decode()].script)(FirstRead(context, first))

    return handle


async def outcome(client: httpx.AsyncClient, name: str) -> tuple[int, str]:
    """Status and response code details that the client gets."""
    try:
        async with client.stream("POST", "/v1/x", content=BODY, headers={"x-case": name}) as response:
            return response.status_code, response.headers.get("x-details", "")
    except httpx.ReadTimeout:
        return HANGS


@pytest.mark.parametrize(
    ("mode", "cases"), [("BUFFERED", BUFFERED_VIOLATIONS), ("FULL_DUPLEX_STREAMED", FULL_DUPLEX_VIOLATIONS)]
)
async def test_violations(mode: str, cases: Mapping[str, Violation]) -> None:
    async with (
        StubEngine("decode", respond=lambda _: Answer.json({"padding": "0123456789"})) as engine,
        serving(playing(cases)) as (service, _),
        envoy_process(bootstrap(service, engine.endpoint, mode), concurrency=1) as envoy,
    ):
        address = (await envoy.listeners())["gateway"]
        # A content-length that lies spoils its connection, so each case gets one of its own, on this side too.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=f"http://{address}", limits=limits, timeout=5.0) as client:
            outcomes = await asyncio.gather(*(outcome(client, name) for name in cases))
    expected = {
        name: case.real or ((case.status, case.details) if case.status else (200, "via_upstream"))
        for name, case in cases.items()
    }
    assert dict(zip(cases, outcomes, strict=True)) == expected
