"""The service between a real Envoy and simulated engines, all but Envoy in the test's own event loop.

::

    async with SimGateway.started({"tiny": Pairing({"connector": "nixl"})}) as gateway:
        pair = gateway["tiny"]
        request = await pair.open(stream=True)
        await request.until(b"data: ")
        request.cut()
        await gateway.settled()
        assert gateway.releases == {}
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import EnvoyProcess, Process, envoy_process, free_port
from extproc.release import Accounts, ReleaseService
from extproc.server import Server
from extproc.sim.config import SimConfig
from extproc.sim.log import Record
from extproc.sim.server import SimEngine
from extproc.ticket import Ticket

HOST: Final = "127.0.0.1"
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

Settings = Mapping[str, Mapping[str, Any]]

_numbers = itertools.count(1)


def chat(*, words: int = 60, **more: Any) -> dict[str, Any]:
    """A chat request whose prompt no other has, so that it has to be prefilled: about two tokens a word."""
    number = next(_numbers)
    text = " ".join(f"{number * 7919 + index}" for index in range(words))
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0} | more


class Request:
    """One HTTP/1.1 request on a connection of its own, which can be cut."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = b""

    @classmethod
    async def send(
        cls, url: str, body: Mapping[str, Any], path: str = CHAT, headers: Mapping[str, str] | None = None
    ) -> Self:
        request = await cls.connect(url)
        content = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: gateway", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        request.write("\r\n".join([*lines, "", ""]).encode() + content)
        return request

    @classmethod
    async def connect(cls, url: str) -> Self:
        """A connection with nothing sent yet."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def until(self, marker: bytes, timeout_s: float = 10.0) -> bytes:
        """Read on until ``marker`` has come; everything received so far. Raises TimeoutError, ConnectionError."""
        async with asyncio.timeout(timeout_s):
            while marker not in self.received:
                data = await self._reader.read(65536)
                if not data:
                    raise ConnectionError(f"closed after {self.received!r}")
                self.received += data
        return self.received

    async def head(self) -> int:
        """The status, once the headers have come."""
        return int((await self.until(b"\r\n\r\n")).split(b" ", 2)[1])

    async def to_end(self, timeout_s: float = 10.0) -> bytes:
        """The rest, until the end of the body or of the connection."""
        async with asyncio.timeout(timeout_s):
            await self.head()
            while not self._complete():
                data = await self._reader.read(65536)
                if not data:
                    break
                self.received += data
        return self.received

    def _complete(self) -> bool:
        head, _, body = self.received.partition(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                return len(body) >= int(line.partition(b":")[2])
        return body.endswith(b"0\r\n\r\n")

    def cut(self, *, reset: bool = False) -> float:
        """Leave; returns when, by ``time.monotonic()``."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()
        return time.monotonic()

    async def close(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def cut_now(self) -> float:
        """The same at once, while the event loop stands still."""
        self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        return self.cut()


@dataclass(frozen=True)
class Pairing:
    """How many engines of which kind: SimConfig's options for both roles, and what decoders have beside."""

    engines: Mapping[str, Any]
    decoders: Mapping[str, Any] = field(default_factory=dict)
    prefill: int = 1
    decode: int = 1


class Pair:
    """Engines that hand over to each other. Clients reach them by the model's name, which is the pair's."""

    def __init__(self, name: str, gateway: SimGateway, prefillers: list[SimEngine], decoders: list[SimEngine]) -> None:
        self.name = name
        self.gateway = gateway
        self.prefillers = prefillers
        self.decoders = decoders
        self.pinned: list[str] = []
        """Every id that a prefiller has pinned blocks under, in order."""
        self.expired: list[str] = []
        """Ids whose blocks came free by the engine's own timer."""
        for engine in prefillers:
            self._watch(engine)

    @property
    def prefiller(self) -> SimEngine:
        (engine,) = self.prefillers
        return engine

    @property
    def decoder(self) -> SimEngine:
        (engine,) = self.decoders
        return engine

    @property
    def engines(self) -> list[SimEngine]:
        return [*self.prefillers, *self.decoders]

    @property
    def connector(self) -> str:
        return self.prefillers[0].config.connector

    def _watch(self, prefiller: SimEngine) -> None:
        engine = prefiller.engine
        pin, expire = engine.pin, engine.connector.expired

        def pinning(request_id: str, blocks: list[int], ttl: float) -> None:
            self.pinned.append(request_id)
            pin(request_id, blocks, ttl)

        def expiring(request_id: str) -> None:
            self.expired.append(request_id)
            expire(request_id)

        engine.pin = pinning  # type: ignore[method-assign]
        engine.connector.expired = expiring  # type: ignore[method-assign]

    def entries(self, role: str) -> list[dict[str, Any]]:
        """The engines of a role, as the configuration lists them."""
        engines = self.prefillers if role == "prefill" else self.decoders
        return [
            {
                "url": engine.url,
                "name": f"{self.name}-{role}-{number}",
                "connector": self.connector,
                "models": [self.name],
                "group": self.name,
            }
            for number, engine in enumerate(engines, 1)
        ]

    async def open(self, url: str | None = None, *, headers: Mapping[str, str] | None = None, **more: Any) -> Request:
        """Send :func:`chat`'s request, with ``more`` in its body, to Envoy or to ``url``, and return at once."""
        body = {"model": self.name, **chat(**more)}
        request = await Request.send(url or self.gateway.url, body, headers=headers)
        self.gateway.keep(request)
        return request

    async def complete(self, **more: Any) -> bytes:
        return await (await self.open(**more)).to_end()

    async def reset(self) -> None:
        """Engines as new."""
        for engine in self.engines:
            await engine.heal()
            for request_id in list(engine.engine.pins):
                engine.engine._expire(request_id)
            engine.log.records.clear()
        self.pinned.clear()
        self.expired.clear()

    async def freed(self, since: float) -> float:
        """Seconds from ``since`` until no prefiller holds a block. Raises TimeoutError after 10 s."""
        await until(lambda: not any(engine.engine.pool.used for engine in self.prefillers))
        return time.monotonic() - since

    async def all_free(self) -> None:
        """Wait until no engine, decoders included, holds a block. Raises TimeoutError."""
        await until(lambda: not any(engine.engine.pool.used for engine in self.engines))

    def decodes(self, *, releases: bool = False) -> list[Record]:
        """Requests that the decoders got: those of clients, or those that only free blocks."""
        records = [record for engine in self.decoders for record in engine.requests]
        found = [record for record in records if (record.model == "extproc-release") is releases]
        if not releases:
            return found
        first: dict[Any, Record] = {}
        for record in found:
            first.setdefault(record.body, record)  # reminders follow
        return list(first.values())

    def assert_alive(self) -> None:
        for engine in self.engines:
            assert engine.engine.death is None, engine.engine.death
            assert engine.connector.listener_alive


class SimGateway:
    """Made by :meth:`started`; ``gateway[name]`` is a pair."""

    def __init__(self) -> None:
        self.pairs: dict[str, Pair] = {}
        self.server: Server
        """The service, where it runs inside."""
        self.replicas: list[Replica] = []
        """The service, where it runs as processes."""
        self.client: httpx.AsyncClient
        self.envoy: EnvoyProcess
        self.url = ""
        self.directory: Path
        self.requested: list[Ticket] = []
        """Every release that was asked for since :meth:`mark`, in order."""
        self._before: Counter[str] = Counter()
        self._kept: list[Request] = []

    def __getitem__(self, name: str) -> Pair:
        return self.pairs[name]

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        pairings: Mapping[str, Pairing],
        *,
        settings: Settings | None = None,
        access_log: bool = True,
        change: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> AsyncIterator[Self]:
        """``settings`` is merged over the configuration that fits the engines; ``change`` edits Envoy's bootstrap."""
        async with contextlib.AsyncExitStack() as stack:
            gateway = cls()
            gateway.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            for name, pairing in pairings.items():
                await gateway._add(stack, name, pairing)
            values = gateway.values(settings or {})
            gateway.server = await stack.enter_async_context(Server(build(values)))
            gateway._watch_releases(gateway.server.releases)
            values["envoy"] = {**values["envoy"], "extproc": f"{HOST}:{gateway.server.grpc_port}"}
            bootstrap = yaml.safe_load(render(build(values)))
            if not access_log:
                del connection_manager(bootstrap)["access_log"]
            change(bootstrap)
            await gateway._start_envoy(stack, bootstrap)
            await gateway.mark()
            try:
                yield gateway
            finally:
                await gateway.mark()

    @classmethod
    @contextlib.asynccontextmanager
    async def replicated(
        cls, pairings: Mapping[str, Pairing], count: int = 2, *, settings: Settings | None = None
    ) -> AsyncIterator[Self]:
        """The service as ``count`` processes in one cluster of Envoy's."""
        async with contextlib.AsyncExitStack() as stack:
            gateway = cls()
            gateway.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            for name, pairing in pairings.items():
                await gateway._add(stack, name, pairing)
            values = gateway.values(settings or {})
            gateway.client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
            for number in range(1, count + 1):
                replica = Replica(f"extproc-{number}", values, gateway.directory, gateway.client)
                gateway.replicas.append(await stack.enter_async_context(replica))
            bootstrap = yaml.safe_load(render(build(values)))
            service = next(c for c in bootstrap["static_resources"]["clusters"] if c["name"] == "extproc")
            service["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": HOST, "port_value": replica.grpc_port}}}}
                for replica in gateway.replicas
            ]
            await gateway._start_envoy(stack, bootstrap)
            try:
                yield gateway
            finally:
                await gateway.close_requests()

    async def _start_envoy(self, stack: contextlib.AsyncExitStack, bootstrap: dict[str, Any]) -> None:
        for cluster in bootstrap["static_resources"]["clusters"]:
            # Engines and test share an event loop: on a busy machine it may stand still for a while.
            cluster["connect_timeout"] = "5s"
            for check in cluster.get("health_checks", []):
                check["timeout"] = "10s"
        text = yaml.safe_dump(bootstrap)
        self.envoy = await stack.enter_async_context(
            envoy_process(text, directory=self.directory / "envoy", concurrency=1)
        )
        await self.service_seen()
        self.url = f"http://{(await self.envoy.listeners())['gateway']}"

    async def _add(self, stack: contextlib.AsyncExitStack, name: str, pairing: Pairing) -> None:
        async def start(role: Any, options: Mapping[str, Any]) -> SimEngine:
            return await stack.enter_async_context(SimEngine(SimConfig(role=role, model=name, record=True, **options)))

        prefillers = [await start("prefill", pairing.engines) for _ in range(pairing.prefill)]
        decoders = [await start("decode", {**pairing.engines, **pairing.decoders}) for _ in range(pairing.decode)]
        self.pairs[name] = Pair(name, self, prefillers, decoders)

    def values(self, settings: Settings) -> dict[str, Any]:
        """The configuration."""
        values: dict[str, Any] = {
            "grpc": {"listen": f"{HOST}:0"},
            "admin": {"listen": None},
            "fleet": {
                "prefill": [entry for pair in self.pairs.values() for entry in pair.entries("prefill")],
                "decode": [entry for pair in self.pairs.values() for entry in pair.entries("decode")],
                # A test's engines must not be shunned for what they did in the test before.
                "health": {"unhealthy_after": 1_000_000},
                "outlier": {"consecutive": 1_000_000},
            },
            "life": {"notice_s": 0.0, "drain_s": 5.0},
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0"},
        }
        for section, keys in settings.items():
            values[section] = {**values.get(section, {}), **keys}
        return values

    async def service_seen(self) -> None:
        """Wait until Envoy's health checks have found every instance of the service."""

        async def seen() -> bool:
            return set((await self.envoy.clusters())["extproc"].values()) == {True}

        await until(seen)

    def _watch_releases(self, releases: ReleaseService) -> None:
        ask = releases.request

        def asking(ticket: Ticket, **options: Any) -> bool:
            new = ask(ticket, **options)
            if new:
                self.requested.append(ticket)
            return new

        releases.request = asking  # type: ignore[method-assign]

    def keep(self, request: Request) -> None:
        """Close this one's connection at the next :meth:`mark`, or at the end."""
        self._kept.append(request)

    async def drop(self, request: Request) -> None:
        """Close a connection now."""
        self._kept.remove(request)
        await request.close()

    async def close_requests(self) -> None:
        for request in self._kept:
            await request.close()
        self._kept.clear()

    # ---- what came of requests ----

    async def mark(self) -> None:
        """Start a test: engines as new, counts from here."""
        await self.server.releases._ways.flush(time.monotonic() + 5)  # reminders of the test before
        for pair in self.pairs.values():
            await pair.reset()
        await self.close_requests()
        self.requested.clear()
        self._before = self._counts()

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for family in self.server.service.metrics.registry.collect():
            for sample in family.samples:
                label = sample.labels.get("result") or sample.labels.get("outcome") or sample.labels.get("reason") or ""
                counts[f"{sample.name} {label}".strip()] += int(sample.value)
        return counts

    def counted(self, name: str) -> dict[str, int]:
        """What a counter has gained since :meth:`mark`, by its result, outcome or reason; without zeros."""
        gained = self._counts()
        gained.subtract(self._before)
        return {key.removeprefix(name).strip(): n for key, n in gained.items() if n and key.split(" ")[0] == name}

    @property
    def releases(self) -> dict[str, int]:
        return self.counted("extproc_releases_total")

    @property
    def outcomes(self) -> dict[str, int]:
        return self.counted("extproc_stream_outcomes_total")

    @property
    def accounts(self) -> Accounts:
        return self.server.releases.accounts

    @property
    def undecided(self) -> int:
        """Exchanges, open handoffs and releases that are still under way."""
        open_handoffs = self.server.service.metrics.registry.get_sample_value("extproc_handoffs_open") or 0
        return self.server.service.in_flight + int(open_handoffs) + self.accounts.pending

    async def settled(self, *, outcomes: int = 1) -> None:
        """Wait until so many endings were logged and nothing is under way. Raises TimeoutError."""
        await until(lambda: sum(self.outcomes.values()) >= outcomes and self.undecided == 0)


class Replica:
    """``extproc serve`` as a process; an async context manager."""

    def __init__(self, name: str, values: Mapping[str, Any], directory: Path, client: httpx.AsyncClient) -> None:
        self.name = name
        self.grpc_port, admin = free_port(), f"{HOST}:{free_port()}"
        self.admin_url = f"http://{admin}"
        self._client = client
        file = directory / f"{name}.yaml"
        listen = {"grpc": {"listen": f"{HOST}:{self.grpc_port}"}, "admin": {"listen": admin}}
        file.write_text(yaml.safe_dump({**values, **listen}))
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(file)]
        log = directory / f"{name}.log"
        self.process = Process(command, log=log, name=name, ready=f"{self.admin_url}/readyz", ready_timeout_s=100)

    async def __aenter__(self) -> Self:
        await self.process.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.process.stop()

    async def fleet(self) -> dict[str, Any]:
        """``/fleet``: engines, open streams, accounts of releases."""
        answer: dict[str, Any] = (await self._client.get(f"{self.admin_url}/fleet")).raise_for_status().json()
        return answer

    async def in_flight(self) -> int:
        return int((await self.fleet())["in_flight"])

    async def accounts(self) -> dict[str, int]:
        """Accounts of releases, without zeros."""
        return {name: count for name, count in (await self.fleet())["releases"].items() if count}

    async def counts(self, name: str) -> dict[str, int]:
        """A metric's values by label, without zeros."""
        text = (await self._client.get(f"{self.admin_url}/metrics")).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {",".join(s.labels.values()): int(s.value) for s in samples if s.name == name and s.value}


class Stalls:
    """How long the event loop was kept from running: on a busy machine waits take as much longer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()

    async def _measure(self, step_s: float = 0.01) -> None:
        while True:
            due = time.monotonic() + step_s
            await asyncio.sleep(step_s)
            self.seconds += max(0.0, time.monotonic() - due - 0.002)


def connection_manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    """The HTTP connection manager of a parsed bootstrap."""
    filters = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    manager: dict[str, Any] = filters[0]["typed_config"]
    return manager


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Wait for something. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if await result if isinstance(result, Awaitable) else result:
                return
            await asyncio.sleep(0.005)
