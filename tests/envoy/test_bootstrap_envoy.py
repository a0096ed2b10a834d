"""The printed bootstrap in a real Envoy, against an ext_proc service and upstreams of this file's own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
import uvicorn
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import replies
from extproc.bootstrap import HANDOFF_BYTES, render
from extproc.config import build
from extproc.pb.envoy.config.core.v3 import base_pb2
from extproc.pb.envoy.config.endpoint.v3 import endpoint_pb2
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.pb.envoy.service.discovery.v3 import discovery_pb2
from extproc.pb.envoy.service.endpoint.v3 import eds_pb2_grpc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from extproc.processes import EnvoyProcess, envoy_process, free_port

pytestmark = pytest.mark.envoy

LIMIT = 256 * 1024
CHAT = "/v1/chat/completions"
EDS_TYPE = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
DESTINATION = "x-gateway-destination-endpoint"

Answer = Callable[[pb.ProcessingRequest], AsyncIterator[pb.ProcessingResponse]]


# ---- the ext_proc service ----


@dataclass
class Stream:
    """What one ext_proc stream brought: its messages' oneof names, and the request's headers and body."""

    phases: list[str] = field(default_factory=list)
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes | None = None
    end_of_stream: bool = False


class Service(
    external_processor_pb2_grpc.ExternalProcessorServicer,
    als_pb2_grpc.AccessLogServiceServicer,
    eds_pb2_grpc.EndpointDiscoveryServiceServicer,
):
    """Answers each message with what ``answers`` says for its phase, else changes nothing."""

    def __init__(self, **answers: Answer) -> None:
        self.answers = answers
        self.streams: list[Stream] = []
        self.log: list[accesslog_pb2.HTTPAccessLogEntry] = []
        self.health = health.aio.HealthServicer()
        self.server: grpc.aio.Server | None = None
        self.address = ""
        self.decoders: tuple[str, ...] = ()
        self.decoders_changed = asyncio.Event()

    async def Process(self, requests: AsyncIterator[pb.ProcessingRequest], context: Any) -> Any:
        stream = Stream()
        self.streams.append(stream)
        async for request in requests:
            phase = request.WhichOneof("request")
            stream.phases.append(phase)
            if phase == "request_headers":
                stream.headers = [(h.key, h.raw_value.decode()) for h in request.request_headers.headers.headers]
                stream.end_of_stream = request.request_headers.end_of_stream
            elif phase == "request_body":
                stream.body = request.request_body.body
            async for response in self.answers.get(phase, no_change)(request):
                yield response

    async def StreamAccessLogs(self, messages: AsyncIterator[als_pb2.StreamAccessLogsMessage], context: Any) -> Any:
        async for message in messages:
            self.log.extend(message.http_logs.log_entry)
        return als_pb2.StreamAccessLogsResponse()

    async def StreamEndpoints(self, requests: AsyncIterator[discovery_pb2.DiscoveryRequest], context: Any) -> Any:
        """Every change of ``decoders`` is told, with a version of its own; acknowledgements are read and forgotten."""
        name = (await anext(requests)).resource_names[0]
        reader = asyncio.create_task(_drain(requests))
        try:
            for version in itertools.count(1):
                await self.decoders_changed.wait()
                self.decoders_changed.clear()
                answer = discovery_pb2.DiscoveryResponse(
                    version_info=str(version), nonce=str(version), type_url=EDS_TYPE
                )
                answer.resources.add(type_url=EDS_TYPE, value=assignment(name, self.decoders).SerializeToString())
                yield answer
        finally:
            reader.cancel()

    def tell_decoders(self, *addresses: str) -> None:
        self.decoders = addresses
        self.decoders_changed.set()

    async def start(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self.server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_send_message_length", 64 << 20),
                ("grpc.so_reuseport", 0),
                # As the service has it: Envoy pings more often than gRPC's default allows, which ends the connection.
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
            ]
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        await self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        secure = self.server.add_secure_port
        port = secure(address, credentials) if credentials else self.server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    async def __aenter__(self) -> Service:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


async def _drain(requests: AsyncIterator[Any]) -> None:
    async for _ in requests:
        pass


def assignment(cluster: str, addresses: Iterable[str]) -> endpoint_pb2.ClusterLoadAssignment:
    answer = endpoint_pb2.ClusterLoadAssignment(cluster_name=cluster)
    group = answer.endpoints.add()
    for address in addresses:
        host, _, port = address.rpartition(":")
        socket_address = group.lb_endpoints.add().endpoint.address.socket_address
        socket_address.address, socket_address.port_value = host, int(port)
    return answer


async def no_change(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
    yield nothing(request.WhichOneof("request"))


def nothing(phase: str) -> pb.ProcessingResponse:
    reply = pb.ProcessingResponse()
    getattr(reply, phase).response.SetInParent()
    return reply


def header(key: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def decode_at(destination: str, body: bytes | None = None, ticket: str = "t1") -> pb.ProcessingResponse:
    """The reply to a request body: route it, and perhaps change it."""
    reply = pb.ProcessingResponse()
    common = reply.request_body.response
    common.header_mutation.set_headers.append(header(DESTINATION, destination))
    if body is not None:
        common.body_mutation.body = body
        common.header_mutation.set_headers.append(header("content-length", str(len(body))))
    reply.dynamic_metadata.update({"envoy.lb": {DESTINATION: destination}, "extproc": {"ticket": ticket}})
    return reply


def routed_to(destination: str, body: bytes | None = None) -> dict[str, Answer]:
    async def on_body(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        yield decode_at(destination, body)

    return {"request_body": on_body}


# ---- upstreams ----


@dataclass
class Seen:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


class Upstream:
    """Records each request and answers 200 with its own address and the body's length."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.receiving = 0
        """Bytes of bodies received so far."""
        self.address = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            self.receiving += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        headers = [(key.decode(), value.decode()) for key, value in scope["headers"]]
        self.seen.append(Seen(scope["method"], scope["raw_path"].decode(), headers, body))
        answer = json.dumps({"by": self.address, "bytes": len(body)}).encode()
        head = [(b"content-type", b"application/json"), (b"server", b"engine")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})

    @contextlib.asynccontextmanager
    async def serving(self, **tls: Any) -> AsyncIterator[Upstream]:
        config = uvicorn.Config(self, ws="none", lifespan="off", log_config=None, server_header=False, **tls)
        server = uvicorn.Server(config)
        # The protocol is named for asyncio, which sets TCP_NODELAY only where it is TCP.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await until(lambda: server.started)
                yield self
            finally:
                server.should_exit = True
                await serving


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def until_async(value: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async with asyncio.timeout(10):
        while True:
            if await value() == expected:
                return
            await asyncio.sleep(0.02)


# ---- the gateway ----


@dataclass
class Gateway:
    envoy: EnvoyProcess
    address: str
    client: httpx.AsyncClient

    async def post(
        self, body: bytes | AsyncIterator[bytes] = b"{}", path: str = CHAT, **options: Any
    ) -> httpx.Response:
        return await self.client.post(path, content=body, **options)

    async def raw(self, request: bytes, timeout_s: float = 10) -> bytes:
        """Send bytes on a connection of their own; everything that comes back until Envoy closes it."""
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            async with asyncio.timeout(timeout_s):
                return await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def gateway(
    service: str,
    decoders: Iterable[str],
    change: Callable[[dict[str, Any]], None] | None = None,
    **sections: Any,
) -> AsyncIterator[Gateway]:
    """``sections`` are the configuration's; ``change`` edits the parsed bootstrap."""
    values = {
        "fleet": {"decode": [{"url": f"http://{address}"} for address in decoders]},
        "limits": {"body_bytes": LIMIT},
    }
    values |= sections
    values["envoy"] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "extproc": service} | sections.get("envoy", {})
    bootstrap = render(build(values))
    if change is not None:
        parsed = yaml.safe_load(bootstrap)
        change(parsed)
        bootstrap = yaml.safe_dump(parsed)
    async with envoy_process(bootstrap, concurrency=1) as envoy:
        address = (await envoy.listeners())["gateway"]
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=10) as client:
            yield Gateway(envoy, address, client)


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream().serving() as one:
        yield one


@pytest.fixture
async def other() -> AsyncIterator[Upstream]:
    async with Upstream().serving() as one:
        yield one


# ---- routing ----


async def test_the_metadata_names_the_decoder_each_time(upstream: Upstream, other: Upstream) -> None:
    async with Service() as service, gateway(service.address, [upstream.address, other.address]) as envoy:
        service.answers = routed_to(other.address)
        for _ in range(50):
            assert (await envoy.post()).json() == {"by": other.address, "bytes": 2}
        assert upstream.seen == []
        assert [seen.values(DESTINATION) for seen in other.seen] == [[other.address]] * 50


@pytest.mark.parametrize("dead_ones", [1, 2])
async def test_refused_connections_move_to_the_next_of_the_list_with_the_same_body(
    upstream: Upstream, other: Upstream, dead_ones: int
) -> None:
    dead = [f"127.0.0.1:{free_port()}" for _ in range(dead_ones)]
    body = b'{"kv_transfer_params": "' + b"k" * 100_000 + b'"}'
    async with Service() as service, gateway(service.address, [other.address, *dead, upstream.address]) as envoy:
        service.answers = routed_to(",".join([*dead, upstream.address]), body)
        answer = await envoy.post(b"{}")
        assert answer.json() == {"by": upstream.address, "bytes": len(body)}
        assert [seen.body for seen in upstream.seen] == [body]
        assert other.seen == []
        assert len(service.streams) == 1
        await until(lambda: len(service.log) == 1)
        assert service.log[0].common_properties.upstream_request_attempt_count == dead_ones + 1


async def test_a_request_that_may_have_reached_a_decoder_is_not_repeated(other: Upstream) -> None:
    """The first decoder takes the request and hangs up; clients cannot ask for retries either."""
    taken: list[bytes] = []

    async def take_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(await reader.readuntil(b"\r\n\r\n"))
        writer.close()

    async with await asyncio.start_server(take_and_close, "127.0.0.1", 0) as server, Service() as service:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway(service.address, [address, other.address]) as envoy:
            service.answers = routed_to(f"{address},{other.address}")
            answer = await envoy.post(headers={"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "3"})
            assert answer.status_code == 503
            assert answer.json()["error"]["type"] == "gateway_error"
            assert answer.json()["error"]["code"].startswith("upstream_reset_before_response_started")
            assert len(taken) == 1
            assert other.seen == []


async def test_clients_cannot_steer(upstream: Upstream, other: Upstream) -> None:
    sent = {
        "x-gateway-destination-endpoint": other.address,
        "X-Gateway-Destination-Endpoint-Subset": other.address,
        "x-gateway-destination-endpoint-served": other.address,
        "X-data-parallel-rank": "1",
        "X-ExtProc-Anything": "1",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "X-Request-Id": "mine, as sent",
        "X-Other": "kept",
    }
    async with Service() as service, gateway(service.address, [upstream.address, other.address]) as envoy:
        service.answers = routed_to(upstream.address)
        assert (await envoy.post(headers=sent)).json()["by"] == upstream.address
        told = {name for name, _ in service.streams[0].headers}
        assert told.isdisjoint(name.lower() for name in [*sent][:6])
        assert {"x-request-id", "x-other"} <= told
        assert upstream.seen[0].values(DESTINATION) == [upstream.address]
        assert upstream.seen[0].values("x-data-parallel-rank") == []
        assert upstream.seen[0].values("x-extproc-anything") == []


async def test_request_ids_are_the_clients_or_none(upstream: Upstream) -> None:
    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        given = "7c1e3f5a-0d2b-4c6d-8e9f-a0b1c2d3e4f5"  # a UUID, whose bits Envoy likes to change
        await envoy.post(headers={"x-request-id": given})
        await envoy.post()
        ids = [[value for name, value in stream.headers if name == "x-request-id"] for stream in service.streams]
        assert ids == [[given], []]
        assert [seen.values("x-request-id") for seen in upstream.seen] == [[given], []]
        await until(lambda: len(service.log) == 2)
        assert service.log[0].request.request_headers == {"x-request-id": given}


@pytest.mark.parametrize("path", ["/v1//models/../x%2Fy;a?b=%20c&d", "/V1/Models/", "/./%41"])
async def test_paths_and_the_engines_headers_are_left_alone(upstream: Upstream, path: str) -> None:
    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        answer = await envoy.raw(f"GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n".encode())
        head = answer.split(b"\r\n\r\n")[0].lower().split(b"\r\n")
        assert head[0] == b"http/1.1 200 ok"
        assert b"server: engine" in head
        assert not [line for line in head if line.startswith(b"x-envoy")]
        assert upstream.seen[0].path == path.partition("?")[0]
        assert dict(service.streams[0].headers)[":path"] == path
        assert service.streams[0].end_of_stream
        assert service.streams[0].phases == ["request_headers", "response_headers"]


@pytest.mark.parametrize(
    ("host", "certified", "status"),
    [
        ("127.0.0.1", "127.0.0.1", 200),
        ("localhost", "localhost", 200),
        ("127.0.0.1", "10.0.0.1", 503),
        ("localhost", "elsewhere", 503),
    ],
)
async def test_https_decoders_must_prove_their_name(tmp_path: Path, host: str, certified: str, status: int) -> None:
    """By address or by name (which Envoy resolves itself); the service names decoders by address in either case."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert(certified)
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "engine.pem")
    async with Upstream().serving(ssl_certfile=tmp_path / "engine.pem") as engine, Service() as service:
        url = f"https://{host}:{engine.address.rpartition(':')[2]}"
        service.answers = routed_to(engine.address)
        trust = {"ca_file": str(tmp_path / "ca.pem")}
        async with gateway(service.address, [], fleet={"decode": [{"url": url}]}, envoy=trust) as envoy:
            answer = await envoy.post()
            assert answer.status_code == status, answer.text
            assert len(engine.seen) == (status == 200)


# ---- bodies ----


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_body_limit_is_exact(upstream: Upstream, chunked: bool) -> None:
    """Envoy's limit is the configured one and room for a handoff; the service itself holds clients to the former."""
    largest = LIMIT + HANDOFF_BYTES

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for start in range(0, size, 65_536):
            yield b"a" * min(65_536, size - start)

    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        fits = await envoy.post(pieces(largest) if chunked else b"a" * largest)
        assert fits.json() == {"by": upstream.address, "bytes": largest}
        async with asyncio.timeout(2):
            refused = await envoy.post(pieces(largest + 1) if chunked else b"a" * (largest + 1))
        assert refused.status_code == 413
        assert refused.headers["content-type"] == "application/json"
        assert refused.json() == {
            "error": {
                "message": "Payload Too Large",
                "type": "gateway_error",
                "param": None,
                "code": "request_payload_too_large",
            }
        }
        assert len(upstream.seen) == 1
        assert service.streams[1].body is None


async def test_the_largest_body_may_grow_by_a_handoff_and_still_be_retried(upstream: Upstream) -> None:
    dead = f"127.0.0.1:{free_port()}"
    grown = b"b" * (LIMIT + HANDOFF_BYTES)
    async with Service() as service, gateway(service.address, [dead, upstream.address]) as envoy:
        service.answers = routed_to(f"{dead},{upstream.address}", grown)
        assert (await envoy.post(b"a" * LIMIT)).json() == {"by": upstream.address, "bytes": len(grown)}
        assert service.streams[0].body == b"a" * LIMIT
        assert upstream.seen[0].body == grown


async def test_a_chunked_request_arrives_whole_and_with_a_length(upstream: Upstream) -> None:
    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        service.answers = routed_to(upstream.address, b"changed")
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b"one byte at a time")
        head = f"POST {CHAT} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        answer = await envoy.raw(head.encode() + chunks + b"0\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert service.streams[0].body == b"one byte at a time"
        assert service.streams[0].phases == ["request_headers", "request_body", "response_headers"]
        assert upstream.seen[0].body == b"changed"
        assert upstream.seen[0].values("content-length") == ["7"]
        assert upstream.seen[0].values("transfer-encoding") == []


async def pass_without_body(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
    mode = processing_mode_pb2.ProcessingMode
    # As the service does for all it has seen: what carries no destination is taken for unseen, and looked into.
    reply = replies.request_headers([(replies.DESTINATION, b"127.0.0.1:1")])
    reply.mode_override.CopyFrom(
        mode(request_header_mode=mode.SEND, response_header_mode=mode.SEND, request_body_mode=mode.NONE)
    )
    yield reply


async def test_an_upload_let_pass_is_neither_held_nor_limited(upstream: Upstream) -> None:
    """It has to be under way when the limit is reached: what comes before the service's answer is held."""
    megabyte = b"u" * (1 << 20)
    size = 8 * len(megabyte)

    async def upload() -> AsyncIterator[bytes]:
        yield megabyte
        await until(lambda: upstream.receiving > 0)
        for _ in range(7):
            yield megabyte

    async with (
        Service(request_headers=pass_without_body) as service,
        gateway(service.address, [upstream.address]) as envoy,
    ):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await envoy.client.post("/v1/audio/transcriptions", content=upload(), headers=kind)
        assert answer.json() == {"by": upstream.address, "bytes": size}
        assert size > LIMIT + HANDOFF_BYTES > len(megabyte)
        assert service.streams[0].phases == ["request_headers", "response_headers"]


async def test_http_1_0(upstream: Upstream) -> None:
    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        answer = await envoy.raw(f"POST {CHAT} HTTP/1.0\r\nhost: h\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        assert answer.startswith(b"HTTP/1.0 200 OK\r\n") or answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert service.streams[0].body == b"{}"


# ---- upgrades ----


@contextlib.asynccontextmanager
async def echo_after_101() -> AsyncIterator[str]:
    """An upstream that accepts any upgrade and then sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n")
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


UPGRADE = (
    "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


async def test_a_websocket_opens_on_the_realtime_path_and_the_service_chooses_the_decoder(other: Upstream) -> None:
    async def choose(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        async for reply in pass_without_body(request):
            reply.dynamic_metadata.update({"envoy.lb": {DESTINATION: address}})
            yield reply

    async with (
        echo_after_101() as address,
        Service(request_headers=choose) as service,
        gateway(service.address, [other.address, address]) as envoy,
    ):
        host, _, port = envoy.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(2):
            writer.write(f"GET /v1/realtime?model=m HTTP/1.1\r\nhost: h\r\n{UPGRADE}\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        writer.close()
        await writer.wait_closed()
        await until(lambda: len(service.log) == 1)
        assert service.streams[0].phases == ["request_headers", "response_headers"]
        assert other.seen == []


async def test_other_upgrades_are_answered_at_once(upstream: Upstream) -> None:
    async with Service() as service, gateway(service.address, [upstream.address]) as envoy:
        async with asyncio.timeout(2):
            refused = await envoy.raw(f"GET {CHAT} HTTP/1.1\r\nhost: h\r\n{UPGRADE}\r\n".encode())
        assert refused.startswith(b"HTTP/1.1 403 ")
        h2c = "connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
        async with asyncio.timeout(2):
            plain = await envoy.raw(f"POST {CHAT} HTTP/1.1\r\nhost: h\r\n{h2c}content-length: 2\r\n\r\n{{}}".encode())
        assert plain.startswith(b"HTTP/1.1 200 OK\r\n")
        assert [seen.body for seen in upstream.seen] == [b"{}"]


# ---- time ----


@pytest.mark.parametrize("asks", [True, False])
async def test_a_prefill_longer_than_the_message_timeout(upstream: Upstream, asks: bool) -> None:
    async def prefill(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        if asks:
            more = pb.ProcessingResponse()
            more.override_message_timeout.FromSeconds(30)
            yield more
        await asyncio.sleep(3)
        yield decode_at(upstream.address)

    patience = {"message_timeout_s": 0.5, "fail_open": False}
    async with (
        Service(request_body=prefill) as service,
        gateway(service.address, [upstream.address], envoy=patience) as envoy,
    ):
        answer = await envoy.post()
        assert answer.status_code == (200 if asks else 504)
        assert [seen.body for seen in upstream.seen] == ([b"{}"] if asks else [])


async def test_idle_connections_to_decoders_are_closed_before_the_engine_closes_them() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        assert await reader.read() == b""
        closed.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, Service() as service:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway(service.address, [address], prefill={"keepalive_s": 0.2}) as envoy:
            assert (await envoy.client.get("/v1/models")).status_code == 200
            async with asyncio.timeout(5):
                await closed.wait()


# ---- the service fails ----


async def test_fail_open_runs_requests_on_all_decoders_in_turn(upstream: Upstream, other: Upstream) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    async with gateway(nobody, [upstream.address, other.address], envoy={"fail_open": True}) as envoy:
        answers = [await envoy.post(b"{}") for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert len(upstream.seen) == len(other.seen) == 4
        assert {seen.body for seen in upstream.seen} == {b"{}"}


async def test_fail_closed_answers_500(upstream: Upstream) -> None:
    async with gateway(f"127.0.0.1:{free_port()}", [upstream.address], envoy={"fail_open": False}) as envoy:
        answer = await envoy.post()
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "The gateway's service failed."
        assert answer.json()["error"]["code"].startswith("ext_proc_error")
        assert upstream.seen == []


async def test_a_service_that_comes_up_later_is_used_and_one_that_drains_is_not(upstream: Upstream) -> None:
    """The health check decides, within about a second; requests that the draining service holds get their answer."""
    address = f"127.0.0.1:{free_port()}"
    reply = asyncio.Event()

    async def prefill(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        more = pb.ProcessingResponse()
        more.override_message_timeout.FromSeconds(30)
        yield more
        await reply.wait()
        yield decode_at(upstream.address, b"prefilled")

    service = Service(request_body=prefill)
    async with gateway(address, [upstream.address]) as envoy:

        async def health() -> dict[str, bool]:
            return (await envoy.envoy.clusters())["extproc"]

        async def new_requests_are_seen() -> bool:
            """Envoy's workers learn of a host's health a little later than its admin port."""
            before = len(service.streams)
            await envoy.client.get("/v1/models")
            return len(service.streams) > before

        assert await health() == {address: False}
        assert (await envoy.post()).json()["bytes"] == 2
        try:
            await service.start(address)
            await until_async(health, {address: True})
            held = asyncio.create_task(envoy.post())
            await until(lambda: len(service.streams) == 1 and service.streams[0].body is not None)

            await service.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            await until_async(health, {address: False})
            await until_async(new_requests_are_seen, False)
            before = len(service.streams)
            assert (await envoy.post(b"plain")).json()["bytes"] == len(b"plain")
            assert len(service.streams) == before
            reply.set()
            assert (await held).json()["bytes"] == len(b"prefilled")
        finally:
            await service.stop()


async def test_a_replica_that_refuses_connections_is_not_noticed(upstream: Upstream) -> None:
    def add_dead_replica(bootstrap: dict[str, Any]) -> None:
        cluster = next(one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "extproc")
        del cluster["health_checks"]
        dead = {"socket_address": {"address": "127.0.0.1", "port_value": free_port()}}
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"].append({"endpoint": {"address": dead}})

    async with Service() as service:
        fail_closed = {"fail_open": False}
        async with gateway(service.address, [upstream.address], add_dead_replica, envoy=fail_closed) as envoy:
            assert [(await envoy.post()).status_code for _ in range(6)] == [200] * 6
            assert len(service.streams) == 6


async def test_the_services_own_errors_pass_as_they_are(upstream: Upstream) -> None:
    body = b'{"error": {"message": "no prefiller", "type": "server_error", "param": null, "code": "prefill_failed"}}'

    async def refuse(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        reply = pb.ProcessingResponse()
        reply.immediate_response.status.code = 503  # type: ignore[assignment]
        reply.immediate_response.body = body
        reply.immediate_response.details = "extproc_prefill_failed"
        headers = [header("content-type", "application/json"), header("retry-after", "1")]
        reply.immediate_response.headers.set_headers.extend(headers)
        yield reply

    async with Service(request_body=refuse) as service, gateway(service.address, [upstream.address]) as envoy:
        answer = await envoy.post()
        assert (answer.status_code, answer.content) == (503, body)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["retry-after"] == "1"
        await until(lambda: len(service.log) == 1)
        assert service.log[0].response.response_code_details == "extproc_prefill_failed"


async def test_many_more_requests_at_once_than_envoys_own_limits_allow(upstream: Upstream) -> None:
    """1024 is the default of its circuit breakers and of the streams on one connection."""
    many, release = 1100, asyncio.Event()

    async def hold(request: pb.ProcessingRequest) -> AsyncIterator[pb.ProcessingResponse]:
        await release.wait()
        yield nothing("request_headers")

    patience = {"message_timeout_s": 60, "fail_open": False}
    async with (
        Service(request_headers=hold) as service,
        gateway(service.address, [upstream.address], envoy=patience) as envoy,
    ):
        request = b"GET /v1/models HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
        requests = [asyncio.create_task(envoy.raw(request, timeout_s=60)) for _ in range(many)]
        await until(lambda: len(service.streams) >= many or any(one.done() for one in requests), timeout_s=60)
        assert [one.result() for one in requests if one.done()] == []  # none was turned away
        release.set()
        answers = await asyncio.gather(*requests)
        assert [answer[:15] for answer in answers] == [b"HTTP/1.1 200 OK"] * many
        assert len(upstream.seen) == many


@pytest.mark.parametrize(
    ("certified", "mutual", "works"), [(True, False, True), (True, True, True), (False, False, False)]
)
async def test_tls_to_the_service(
    tmp_path: Path, upstream: Upstream, certified: bool, mutual: bool, works: bool
) -> None:
    """ext_proc, access log and health check alike; a service that cannot prove its name is not spoken to."""
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1" if certified else "elsewhere")
    client = authority.issue_cert("envoy.local")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    client.cert_chain_pems[0].write_to_path(tmp_path / "envoy.pem")
    client.private_key_pem.write_to_path(tmp_path / "envoy.key")
    credentials = grpc.ssl_server_credentials(
        [(server.private_key_pem.bytes(), server.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes() if mutual else None,
        require_client_auth=mutual,
    )
    own = {"service_certificate": str(tmp_path / "envoy.pem"), "service_key": str(tmp_path / "envoy.key")}
    envoy = {"fail_open": False, "service_ca_file": str(tmp_path / "ca.pem"), **(own if mutual else {})}
    tls = {"certificate": "/server.pem", "key": "/server.key", "client_ca": "/ca.pem" if mutual else None}
    service = Service()
    try:
        await service.start(credentials=credentials)
        async with gateway(service.address, [upstream.address], grpc={"tls": tls}, envoy=envoy) as through:
            answer = await through.post()
            assert answer.status_code == (200 if works else 500)
            assert (await through.envoy.clusters())["extproc"] == {service.address: works}
            if works:
                await until(lambda: len(service.log) == 1)
            assert len(service.streams) == works
    finally:
        await service.stop()


async def test_envoy_follows_the_decoders_that_the_service_tells_and_keeps_them_without_it(
    upstream: Upstream, other: Upstream
) -> None:
    fleet = {"file": "/etc/extproc/engines.yaml"}
    service = Service()
    service.tell_decoders(upstream.address)
    async with service, gateway(service.address, [], fleet=fleet) as envoy:

        async def decoders() -> set[str]:
            return set((await envoy.envoy.clusters())["decode"])

        await until_async(decoders, {upstream.address})
        assert (await envoy.post()).json()["by"] == upstream.address
        service.tell_decoders(upstream.address, other.address)
        await until_async(decoders, {upstream.address, other.address})
        service.answers = routed_to(other.address)
        assert (await envoy.post()).json()["by"] == other.address
        service.tell_decoders(other.address)
        await until_async(decoders, {other.address})

        await service.stop()
        assert (await envoy.post()).json()["by"] == other.address


# ---- how it ended ----


async def test_the_access_log_brings_the_ticket_back_with_how_it_ended(upstream: Upstream) -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with Service() as service, gateway(service.address, [upstream.address, dead]) as envoy:

        async def logged(count: int) -> accesslog_pb2.HTTPAccessLogEntry:
            await until(lambda: len(service.log) == count)
            return service.log[-1]

        service.answers = routed_to(upstream.address)
        await envoy.post()
        entry = await logged(1)
        assert tickets(entry) == {"ticket": "t1"}
        assert entry.response.response_code_details == "via_upstream"
        assert flags(entry) == []
        reached = entry.common_properties.upstream_remote_address.socket_address
        assert f"{reached.address}:{reached.port_value}" == upstream.address
        assert entry.common_properties.upstream_cluster == "decode"

        service.answers = routed_to(dead)
        async with gateway(service.address, [dead]) as no_decoder:
            assert (await no_decoder.post()).status_code == 503
            entry = await logged(2)
        assert tickets(entry) == {"ticket": "t1"}
        assert flags(entry) == ["upstream_connection_failure", "upstream_retry_limit_exceeded"]
        assert entry.response.response_code.value == 503


async def test_the_access_log_tells_of_a_client_that_hung_up_in_mid_stream() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server, Service() as service:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        service.answers = routed_to(address)
        async with gateway(service.address, [address]) as envoy:
            async with envoy.client.stream("POST", CHAT, content=b"{}") as answer:
                assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
            await until(lambda: len(service.log) == 1)
        assert tickets(service.log[0]) == {"ticket": "t1"}
        assert flags(service.log[0]) == ["downstream_connection_termination"]
        assert service.log[0].response.response_code.value == 200


def tickets(entry: accesslog_pb2.HTTPAccessLogEntry) -> dict[str, Any]:
    return dict(entry.common_properties.metadata.filter_metadata["extproc"].items())


def flags(entry: accesslog_pb2.HTTPAccessLogEntry) -> list[str]:
    return [flag.name for flag, _ in entry.common_properties.response_flags.ListFields()]
