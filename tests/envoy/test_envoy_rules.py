"""The scripted Envoy tells the truth: the real one does with each violation what the scripted one says it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import pytest

from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.processes import envoy_process
from tests.support.engines import Answer, StubEngine
from tests.support.scripted_envoy import Mode, ScriptedEnvoy
from tests.support.scripted_service import (
    BODY,
    Handler,
    Script,
    chunk,
    header,
    immediate,
    length,
    on_body,
    on_headers,
    on_response,
    overriding,
    scripted,
    serving,
)
from tests.support.violations import BUFFERED_VIOLATIONS, FULL_DUPLEX_VIOLATIONS, HANGS, HEADERS, Violation

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


def playing(scripts: Mapping[str, Script]) -> Handler:
    """A service that plays the script which the request's x-case header names."""

    async def handle(context: Any) -> None:
        first = await context.read()
        names = [line.raw_value for line in first.request_headers.headers.headers if line.key == "x-case"]
        await scripted(scripts[names[0].decode()])(FirstRead(context, first))

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
        serving(playing({name: case.script for name, case in cases.items()})) as (service, _),
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


GOOD: dict[Mode, dict[str, Script]] = {
    "BUFFERED": {
        "nothing": {},
        "headers": {
            HEADERS: [on_headers(header("X-Dup", b"3"), header(":path", b"/p"), remove=["x-dup", "X-L"])],
            "request_body": [on_body(header("x-dup", b"\xff"), header("x-new", b""))],
            "response_headers": [on_response(header("x-up", b"2"), header(":status", b"201"))],
        },
        "body": {"request_body": [on_body(length(3), body=b"abc")]},
        "emptied body": {"request_body": [on_body(length(0), body=b"")]},
        "body without length": {
            HEADERS: [on_headers(remove=["content-length"])],
            "request_body": [on_body(body=b"abc")],
        },
        "replaced body": {HEADERS: [on_headers(length(3), status=1, body_mutation=ext_proc.BodyMutation(body=b"abc"))]},
        "no body shown": {HEADERS: [overriding(on_headers(header("x-a", b"1")), request_body_mode="NONE")]},
        "no response shown": {
            HEADERS: [overriding(on_headers(), request_body_mode="BUFFERED", response_header_mode="SKIP")]
        },
        "answered": {"request_body": [immediate(header("content-type", b"a/b"), details="a b")]},
    },
    "FULL_DUPLEX_STREAMED": {
        "chunks": {
            HEADERS: [on_headers(header("x-a", b"1"), remove=["x-l"])],
            "request_body": [chunk(b"x" * 65_536), chunk(b""), chunk(b"y", end=True)],
            "response_headers": [on_response(header("x-up", b"2"))],
        },
        "answered": {HEADERS: [immediate()], "request_body": []},
    },
}
# Lines that real clients and the real Envoy add, and how the body is framed.
NOT_COMPARED = frozenset(
    "host accept accept-encoding connection user-agent x-request-id x-case transfer-encoding date server x-details "
    "x-envoy-upstream-service-time x-envoy-expected-rq-timeout-ms".split()
)


def comparable(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((name.lower(), value) for name, value in headers if name.lower() not in NOT_COMPARED)


@pytest.mark.parametrize("mode", GOOD)
async def test_good_replies(mode: Mode) -> None:
    """Upstream and client get the same from both."""
    answer = [("content-length", "10"), ("x-up", "1")]
    async with (
        StubEngine("decode", respond=lambda _: Answer(headers=answer[1:], body=b"0123456789")) as engine,
        serving(playing(GOOD[mode])) as (service, _),
        envoy_process(bootstrap(service, engine.endpoint, mode), concurrency=1) as envoy,
        ScriptedEnvoy(service, mode=mode) as scripted_envoy,
        httpx.AsyncClient(base_url=f"http://{(await envoy.listeners())['gateway']}") as http,
    ):
        for name in GOOD[mode]:
            request: list[tuple[str, str | bytes]] = [
                ("x-case", name),
                ("X-Dup", "1"),
                ("x-dup", "2"),
                ("x-l", b"\xe9"),
            ]
            exchange = await scripted_envoy.request("POST", "/v1/x?q=1", request, BODY)
            client = exchange.immediate or await exchange.response(200, answer)
            await exchange.finish()
            engine.requests.clear()
            response = await http.post("/v1/x?q=1", content=BODY, headers=request)  # type: ignore[arg-type]
            got = (response.status_code, comparable(response.headers.multi_items()))
            assert got == (client.status, comparable(client.headers)), name
            if exchange.immediate is not None:
                got_answer = (response.content, response.headers.get("x-details", ""))
                assert got_answer == (client.body, exchange.immediate.details), name
                assert engine.requests == []
            else:
                (real,) = engine.requests
                upstream = exchange.upstream
                expected = (upstream.method, upstream.path, comparable(upstream.headers), upstream.body)
                assert (real.method, real.target, comparable(real.headers), real.body) == expected, name
