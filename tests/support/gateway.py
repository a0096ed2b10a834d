"""The service between a real Envoy and recording engines.

::

    async with Gateway.started({"prefill": {"on_failure": "decode"}}) as gateway:
        gateway.prefillers[0].respond = lambda _: Answer(500)
        response = await gateway.post({"model": "m", "prompt": "hi"})
        decode = await gateway.decoders[0].request()

The service runs in the test's own event loop, or as processes (``service="process"``) where a test ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

import httpx
import structlog
import yaml

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import EnvoyProcess, Process, envoy_process, free_port
from extproc.server import Server
from tests.support.engines import Answer, RecordedRequest, StubEngine, answer_decode, answer_prefill
from tests.support.scripted_envoy import Mode

HOST: Final = "127.0.0.1"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
CHAT_BODY: Final = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}'

FALLBACK_BYTES: Final = 2000
"""The largest body that falls back to its decoder, where a gateway falls back at all."""
ENGINE_KEY: Final = "configured-key"

Settings = Mapping[str, Mapping[str, Any]]
Change = Callable[[dict[str, Any]], None]
"""Edits the parsed bootstrap in place."""

_RELEASE_MODEL: Final = "extproc-release"
_RELEASE_ANSWER: Final = Answer.json({"error": {"message": "The model does not exist.", "code": 404}}, status=404)


class Decoder(StubEngine):
    """A recording decoder. Requests that only free blocks (a model no engine has) are answered as vLLM does and kept
    apart in ``releases``, without the reminders that follow the first one."""

    def __init__(self, **options: Any) -> None:
        super().__init__("decode", **options)
        self.releases: list[RecordedRequest] = []

    async def record(self, request: RecordedRequest) -> None:
        if not _is_release(request):
            await super().record(request)
            return
        async with self._changed:
            if all(request.body != known.body for known in self.releases):  # no reminder
                self.releases.append(request)
            self._changed.notify_all()

    async def answer(self, request: RecordedRequest) -> Answer:
        return _RELEASE_ANSWER if _is_release(request) else await super().answer(request)


def _is_release(request: RecordedRequest) -> bool:
    return request.target == COMPLETIONS and _RELEASE_MODEL.encode() in request.body


@dataclass(frozen=True)
class Instance:
    """One process of the service."""

    process: Process
    grpc_address: str
    admin_url: str


class Gateway:
    """Made by :meth:`started`. ``url`` is Envoy's, ``admin_url`` the admin port of the (first) service."""

    def __init__(self) -> None:
        self.prefillers: list[StubEngine] = []
        self.decoders: list[Decoder] = []
        self.url = ""
        self.admin_url = ""
        self.grpc_address = ""
        self.server: Server | None = None
        """The service, where it runs inside."""
        self.instances: list[Instance] = []
        """The service, where it runs as processes."""
        self.envoy: EnvoyProcess
        self.client: httpx.AsyncClient
        self.directory: Path

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        settings: Settings | None = None,
        *,
        prefill: int = 2,
        decode: int = 2,
        service: Literal["inside", "process"] = "inside",
        instances: int = 1,
        change: Change | None = None,
    ) -> AsyncIterator[Self]:
        """``settings`` is merged over the configuration that fits the engines, section by section."""
        async with contextlib.AsyncExitStack() as stack:
            gateway = cls()
            gateway.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            for _ in range(prefill):
                gateway.prefillers.append(await stack.enter_async_context(StubEngine("prefill")))
            for _ in range(decode):
                gateway.decoders.append(await stack.enter_async_context(Decoder()))
            values = gateway._values(settings or {})
            if service == "inside":
                await gateway._start_inside(stack, values)
            else:
                await gateway._start_processes(stack, values, instances)
            await gateway._start_envoy(stack, values, change)
            gateway.client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=30, limits=httpx.Limits())
            )
            yield gateway

    def _values(self, settings: Settings) -> dict[str, Any]:
        values: dict[str, Any] = {
            "grpc": {"listen": f"{HOST}:0"},
            "admin": {"listen": f"{HOST}:0"},
            "fleet": {
                "prefill": [{"url": engine.url, "name": f"prefill-{n}"} for n, engine in enumerate(self.prefillers, 1)],
                "decode": [{"url": engine.url, "name": f"decode-{n}"} for n, engine in enumerate(self.decoders, 1)],
                # A test's engines must not be shunned for what they did in the test before. One look at them is enough.
                "health": {"interval_s": 600, "unhealthy_after": 1_000_000},
                "outlier": {"consecutive": 1_000_000},
                "scrape_s": 0,
            },
            "routing": {"prefill_policy": "round_robin", "decode_policy": "round_robin"},
            "life": {"notice_s": 0.0, "drain_s": 5.0},
            # Fail closed and patient: a service that fails or is slow must not pass for one that chose to bypass.
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "fail_open": False, "message_timeout_s": 30},
        }
        for section, keys in settings.items():
            values[section] = {**values.get(section, {}), **keys}
        return values

    async def _start_inside(self, stack: contextlib.AsyncExitStack, values: dict[str, Any]) -> None:
        # Unconfigured, tracebacks come with all variables; bodies are among them.
        structlog.configure(
            processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback, colors=False)]
        )
        self.server = await stack.enter_async_context(Server(build(values)))
        self.admin_url = f"http://{HOST}:{self.server.admin_port}"
        self.grpc_address = f"{HOST}:{self.server.grpc_port}"
        await until(lambda: self.server is not None and self.server.why_not_ready() is None)

    async def _start_processes(self, stack: contextlib.AsyncExitStack, values: dict[str, Any], count: int) -> None:
        self.instances = [self._instance(f"extproc-{number}", values) for number in range(1, count + 1)]
        for instance in self.instances:
            stack.push_async_callback(instance.process.stop)
        await asyncio.gather(*(instance.process.start() for instance in self.instances))
        self.grpc_address, self.admin_url = self.instances[0].grpc_address, self.instances[0].admin_url

    def _instance(self, name: str, values: Mapping[str, Any]) -> Instance:
        grpc, admin = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
        file = self.directory / f"{name}.yaml"
        file.write_text(
            yaml.safe_dump({**values, "grpc": values["grpc"] | {"listen": grpc}, "admin": {"listen": admin}})
        )
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(file)]
        log = self.directory / f"{name}.log"
        process = Process(command, log=log, name=name, ready=f"http://{admin}/readyz", ready_timeout_s=90)
        return Instance(process, grpc, f"http://{admin}")

    async def _start_envoy(
        self, stack: contextlib.AsyncExitStack, values: dict[str, Any], change: Change | None
    ) -> None:
        config = build({**values, "envoy": {**values["envoy"], "extproc": self.grpc_address}})
        bootstrap = await asyncio.to_thread(render, config)  # the first one takes a second or two
        parsed = yaml.safe_load(bootstrap)
        _adapt(parsed, self.addresses)
        if change is not None:
            change(parsed)
        bootstrap = yaml.safe_dump(parsed)
        self.envoy = await stack.enter_async_context(
            envoy_process(bootstrap, directory=self.directory / "envoy", concurrency=1)
        )
        await self.reachable()
        self.url = f"http://{(await self.envoy.listeners())['gateway']}"

    @property
    def addresses(self) -> list[str]:
        """The service's, one for each instance."""
        return [instance.grpc_address for instance in self.instances] or [self.grpc_address]

    async def envoy_sees(self, address: str, *, healthy: bool = True) -> None:
        """Wait until Envoy's health check has found the service at that address as it is."""

        async def seen() -> bool:
            return any(hosts.get(address) is healthy for hosts in (await self.envoy.clusters()).values())

        await until_async(seen)

    # ---- requests ----

    async def post(
        self, body: bytes | Mapping[str, Any] = CHAT_BODY, path: str = CHAT, **options: Any
    ) -> httpx.Response:
        """A JSON request through Envoy. Bytes go as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return await self.client.post(path, content=content, headers=headers, **options)

    async def raw(self, request: bytes, timeout_s: float = 10.0) -> bytes:
        """Send bytes on a connection of their own; everything that comes back until Envoy closes it."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            async with asyncio.timeout(timeout_s):
                return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    # ---- what came of them ----

    @property
    def prefills(self) -> list[RecordedRequest]:
        """All requests that prefillers got."""
        return [request for engine in self.prefillers for request in engine.requests]

    @property
    def decodes(self) -> list[RecordedRequest]:
        """All requests that decoders got, but for releases."""
        return [request for engine in self.decoders for request in engine.requests]

    async def exchange(self, request_id: str) -> dict[str, Any]:
        """The service's record of the request with that client's X-Request-Id, once it is complete."""
        found: list[dict[str, Any]] = []

        async def known() -> bool:
            found[:] = [
                record
                for record in await self._records()
                if record.get("client_request_id") == request_id and {"total_ms", "outcome"} <= record.keys()
            ]
            return bool(found)

        await until_async(known)
        return found[0]

    async def _records(self) -> list[dict[str, Any]]:
        if self.server is not None:
            return self.server.service.recent.list()
        answer = (await self.client.get(f"{self.admin_url}/exchanges")).raise_for_status()
        return list(answer.json()["exchanges"])

    def counts(self, name: str) -> dict[str, int]:
        """A counter's (or gauge's) values that are not 0, by its label's value; "" where it has none.

        Of a service that runs inside, and without the way over /metrics, which would be most of what a test costs.
        """
        assert self.server is not None
        families = self.server.service.metrics.registry.restricted_registry([name]).collect()
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {",".join(sample.labels.values()): int(sample.value) for sample in samples if sample.value}

    async def settled(self) -> None:
        """Wait until nothing of any request is left: streams, reservations, open handoffs. Raises TimeoutError."""
        assert self.server is not None
        service = self.server.service

        def nothing_left() -> bool:
            loads = [engine.inflight for engine in service.fleet.engines()]
            return service.in_flight == 0 and not any(loads) and not self.counts("extproc_handoffs_open")

        await until(nothing_left)

    async def reachable(self) -> None:
        """Wait until Envoy sees the service: between tests with other loops it stood still with its own."""
        for address in self.addresses:
            await self.envoy_sees(address)

    async def reset(self) -> None:
        """Engines as new, and a service that Envoy sees and nothing runs in any more, for the next test."""
        await self.reachable()
        if self.server is not None:
            await self._forget_releases(self.server)
        for engine in (*self.prefillers, *self.decoders):
            engine.respond = answer_prefill if engine.role == "prefill" else answer_decode
            engine.hang = False
            engine.close_on_nth = None
            if engine._server is None:
                await engine.listen()
            engine.requests.clear()
            engine.probes.clear()
            engine.answered = engine.disconnects = engine.connections = 0
        for decoder in self.decoders:
            decoder.releases.clear()
        self.client.cookies.clear()

    async def _forget_releases(self, server: Server) -> None:
        """What the last test's requests left to be released, and the reminders that follow."""
        prefiller, releases = server._prefiller, server.releases
        await until(lambda: not prefiller._abandoned and not releases.accounts.pending)
        await releases._ways.flush(time.monotonic())


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something of this process. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30.0) -> None:
    """Wait for something that has to be asked for. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
    """The result, which must come in less than that time."""
    started = time.monotonic()
    result = await awaitable
    taken = time.monotonic() - started
    assert taken < seconds, f"took {taken:.2f} s"
    return result


def service_cluster(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """The service's cluster in a parsed bootstrap."""
    clusters: list[dict[str, Any]] = bootstrap["static_resources"]["clusters"]
    return next(cluster for cluster in clusters if cluster["name"] == "extproc")


def connection_manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager in a parsed bootstrap."""
    config: dict[str, Any] = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    typed: dict[str, Any] = config["typed_config"]
    return typed


def full_duplex(bootstrap: dict[str, Any]) -> None:
    """The endpoint-picker protocol's body mode; Envoy then insists on being asked for trailers, too."""
    manager = connection_manager(bootstrap)
    mode = manager["http_filters"][0]["typed_config"]["processing_mode"]
    mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}
    manager["http_protocol_options"]["enable_trailers"] = True


def in_mode(mode: Mode, *more: Change) -> Change:
    """A change that sets the body mode, and further ones."""

    def change(bootstrap: dict[str, Any]) -> None:
        if mode == "FULL_DUPLEX_STREAMED":
            full_duplex(bootstrap)
        for one in more:
            one(bootstrap)

    return change


def _adapt(bootstrap: dict[str, Any], addresses: Sequence[str]) -> None:
    """All instances of the service; and one on a busy machine must not pass for a dead one."""
    cluster = service_cluster(bootstrap)
    for check in cluster["health_checks"]:
        check["timeout"] = "20s"
    endpoints = []
    for address in addresses:
        host, port = address.rsplit(":", 1)
        socket_address = {"address": host, "port_value": int(port)}
        endpoints.append({"endpoint": {"address": {"socket_address": socket_address}}})
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = endpoints
