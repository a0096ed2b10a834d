"""The service between a real Envoy and real engines, the service in the test's own event loop.

Requests that are cut, and conditions, are those of tests/support/simulated.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from extproc.bootstrap import render
from extproc.config import build
from extproc.connectors import Handoff
from extproc.demo.vllm.launch import HOST, VllmEngine
from extproc.processes import EnvoyProcess, envoy_process
from extproc.release import Accounts
from extproc.server import Server
from tests.support.simulated import Request, until
from tests.vllm.two_step import CHAT, Body

TRANSFERS: Final = "vllm:nixl_bytes_transferred_count"


class VllmGateway:
    """Made by :meth:`started`. ``url`` is Envoy's; ``client`` is bound to it."""

    def __init__(self, prefill: VllmEngine, decode: VllmEngine) -> None:
        self.prefill = prefill
        self.decode = decode
        self.server: Server
        self.envoy: EnvoyProcess
        self.client: httpx.AsyncClient
        self.url = ""
        self._before: Counter[str] = Counter()
        self._kept: list[Request] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        prefill: VllmEngine,
        decode: VllmEngine,
        *,
        decode_urls: Sequence[str] = (),
        unrouted: Sequence[str] = (),
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AsyncIterator[Self]:
        """``decode_urls``: the fleet's decoders, by default ``decode`` itself; it may be behind one of them.

        ``unrouted``: decoders that the service knows besides, and Envoy does not.
        """
        async with contextlib.AsyncExitStack() as stack:
            gateway = cls(prefill, decode)
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            routed = decode_urls or [decode.url]
            values = _values(prefill, [*routed, *unrouted]) | {k: dict(v) for k, v in (settings or {}).items()}
            gateway.server = await stack.enter_async_context(Server(build(values)))
            await until(lambda: gateway.server.why_not_ready() is None)
            values["envoy"] = {**values["envoy"], "extproc": f"{HOST}:{gateway.server.grpc_port}"}
            values["fleet"]["decode"] = values["fleet"]["decode"][: len(routed)]
            bootstrap = yaml.safe_load(render(build(values)))
            for cluster in bootstrap["static_resources"]["clusters"]:
                for check in cluster.get("health_checks", []):
                    check["timeout"] = "20s"  # a service on a busy machine must not pass for a dead one
            gateway.envoy = await stack.enter_async_context(
                envoy_process(yaml.safe_dump(bootstrap), directory=directory / "envoy", concurrency=1)
            )

            async def service_seen() -> bool:
                return set((await gateway.envoy.clusters())["extproc"].values()) == {True}

            await until(service_seen, timeout_s=60)
            gateway.url = f"http://{(await gateway.envoy.listeners())['gateway']}"
            gateway.client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=120, limits=httpx.Limits())
            )
            gateway.mark()
            try:
                yield gateway
            finally:
                await gateway.close_requests()

    async def post(self, path: str, body: Body, **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    async def open(self, body: Body, path: str = CHAT) -> Request:
        """Send it on a connection of its own, which can be cut, and return at once."""
        request = await Request.send(self.url, body, path)
        self._kept.append(request)
        return request

    async def close_requests(self) -> None:
        for request in self._kept:
            await request.close()
        self._kept.clear()

    async def transfers(self) -> float:
        """How often the decoder has read KV from a prefiller."""
        return await self.decode.metric(TRANSFERS)

    async def transferred(self, before: float, count: int = 1) -> None:
        """Wait until it has read exactly so often since; the engine reports it a moment later."""

        async def reported() -> bool:
            return await self.transfers() >= before + count

        await until(reported, timeout_s=20)
        assert await self.transfers() == before + count

    @contextlib.contextmanager
    def at_dispatch(self, action: Any) -> Any:
        """``action(handoff)`` runs when a prefill has answered and before Envoy learns where to decode."""
        endings = self.server.service.endings
        dispatched = endings.dispatched

        def dispatching(handoff: Handoff, request_id: str) -> str | None:
            action(handoff)
            return dispatched(handoff, request_id)

        endings.dispatched = dispatching  # type: ignore[method-assign]
        try:
            yield
        finally:
            endings.dispatched = dispatched  # type: ignore[method-assign]

    # ---- accounts of the service ----

    def mark(self) -> None:
        """Counts of :meth:`counted` start here."""
        self._before = self._counts()

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for family in self.server.service.metrics.registry.collect():
            for sample in family.samples:
                labels = sample.labels
                label = next((labels[key] for key in ("result", "outcome", "reason", "decision") if key in labels), "")
                counts[f"{sample.name} {label}".strip()] += int(sample.value)
        return counts

    def counted(self, name: str) -> dict[str, int]:
        """What a counter has gained, by its result, outcome, reason or decision; without zeros."""
        gained = self._counts()
        gained.subtract(self._before)
        return {key.removeprefix(name).strip(): n for key, n in gained.items() if n and key.split(" ")[0] == name}

    @property
    def accounts(self) -> Accounts:
        return self.server.releases.accounts

    def record(self, client_request_id: str) -> dict[str, Any]:
        """The service's record of the request with this X-Request-Id of the client's."""
        records = self.server.service.recent.list()
        return next(record for record in records if record.get("client_request_id") == client_request_id)

    async def settled(self, timeout_s: float = 15.0) -> None:
        """Wait until nothing of any request is left in the service. Raises TimeoutError."""

        def nothing_left() -> bool:
            service = self.server.service
            loads = [e.inflight for role in ("prefill", "decode") for e in service.fleet.engines(role)]
            handoffs = service.metrics.registry.get_sample_value("extproc_handoffs_open")
            return service.in_flight == 0 and not any(loads) and not handoffs and self.accounts.pending == 0

        await until(nothing_left, timeout_s)


class Gate:
    """A TCP port in front of an engine, which can be shut: then it refuses connections, and the open ones end."""

    def __init__(self, target: VllmEngine) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.shut()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            to_reader, to_writer = await asyncio.open_connection(HOST, self._target.port)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, to_writer))
                    group.create_task(_pump(to_reader, writer))
            finally:
                to_writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes from one to the other until either ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


def _values(prefill: VllmEngine, decode_urls: Sequence[str]) -> dict[str, Any]:
    return {
        "grpc": {"listen": f"{HOST}:0"},
        "admin": {"listen": None},
        "fleet": {
            "prefill": [{"url": prefill.url, "name": "prefill"}],
            "decode": [{"url": url, "name": f"decode-{number}"} for number, url in enumerate(decode_urls, 1)],
            # Engines must not be shunned for what a test has done to them, or for a busy machine.
            "health": {"unhealthy_after": 1_000_000},
            "outlier": {"consecutive": 1_000_000},
        },
        "prefill": {"connect_timeout_s": 30},  # a loop that a busy machine holds up must not pass for a dead engine
        "life": {"notice_s": 0.0, "drain_s": 10.0},
        "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "fail_open": False, "message_timeout_s": 60},
    }
