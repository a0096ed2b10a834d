"""The life of the process: start, bind, fleet ready, SERVING; then SIGTERM, NOT_SERVING, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from extproc import admin, listening, ticket
from extproc.config import Config
from extproc.endings import AccessLogService, Endings
from extproc.enginehttp import EngineClient
from extproc.errors import ConfigError
from extproc.fleet import engines
from extproc.fleet.discovery import Resolver
from extproc.fleet.eds import EndpointDiscovery
from extproc.fleet.fleet import Fleet, policies
from extproc.fleet.monitor import Monitor
from extproc.fleet.names import FleetNames
from extproc.fleet.sources import DnsSource, FileSource
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.pb.envoy.service.endpoint.v3 import eds_pb2, eds_pb2_grpc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc
from extproc.prefill import Prefiller
from extproc.release import ReleaseService
from extproc.releaseways import ReleaseWays
from extproc.service import ExternalProcessor, Service
from extproc.sidechannel import SideChannels
from extproc.telemetry import logs, looplag
from extproc.telemetry.logs import log
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.telemetry.tracing import Tracing
from extproc.tls import Certificates

ACCESS_LOG = als_pb2.DESCRIPTOR.services_by_name["AccessLogService"].full_name
EDS = eds_pb2.DESCRIPTOR.services_by_name["EndpointDiscoveryService"].full_name
EXT_PROC = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
HEALTH_NAMES = ("", EXT_PROC)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_READY_POLL_S = 0.05
_PING_EVERY_S = 20.0
_PING_TIMEOUT_S = 20.0  # ample for a machine under load; what it stands for is minutes of held places


class Server:
    """A running service. An async context manager: entering binds and starts, leaving drains and stops."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._draining = False
        self._knows_engines = False
        self._stack = contextlib.AsyncExitStack()
        self._background: list[asyncio.Task[None]] = []
        self.grpc_port = 0
        self.admin_port = 0

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        config = self.config
        metrics = Metrics()
        recent = Recent()
        tracing = Tracing(config.tracing)
        stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
        fleet = Fleet(config.fleet, policies(config))
        fleet.update("configuration", engines.specs(config.fleet, config.fleet))
        sources = _sources(fleet)  # known before anybody asks for the fleet
        metrics.watch(fleet)
        client = await stack.enter_async_context(
            EngineClient(
                connect_timeout_s=config.prefill.connect_timeout_s,
                max_connections=config.prefill.max_connections,
                keepalive_s=config.prefill.keepalive_s,
                resolver=FleetNames(fleet),
            )
        )
        channels = SideChannels()
        stack.push_async_callback(channels.aclose)
        ways = ReleaseWays(config.release, fleet, client, channels)
        self.releases = ReleaseService(config.release, ways, metrics, recent, tracing)
        metrics.releases_pending.set_function(lambda: self.releases.accounts.pending)
        self._endings = Endings(config.release, ticket.signer(config), ways, fleet, self.releases, metrics, recent)
        self._prefiller = Prefiller(config, fleet, client, metrics, self._endings.never_dispatched, tracing)
        self.service = Service(config, fleet, self._prefiller, self._endings, metrics, recent, tracing)
        metrics.ready.set_function(lambda: self.why_not_ready() is None)
        self._health = health.aio.HealthServicer()
        await self._set_health(_NOT_SERVING)
        if config.admin.listen:  # outside the gRPC server: probes and metrics are answered during the drain, too
            app = admin.application(self.service, self.releases, self.why_not_ready)
            self.admin_port = await stack.enter_async_context(admin.serving(app, config.admin.listen))
        await stack.enter_async_context(self._grpc_server())
        stack.push_async_callback(self._cancel_background)
        resolver = Resolver(fleet, config.fleet.resolve_s)
        runners: dict[str, Callable[[], Awaitable[None]]] = {
            "resolver": resolver.run,
            "monitor": Monitor(fleet).run,
            "readiness": self._serve_when_ready,
            "loop lag": functools.partial(looplag.sample, metrics.loop_lag),
            **sources,
        }
        self._background = [asyncio.create_task(_endless(name, runner), name=name) for name, runner in runners.items()]
        log.info("listening", grpc=config.grpc.listen, grpc_port=self.grpc_port, admin_port=self.admin_port or None)

    @contextlib.asynccontextmanager
    async def _grpc_server(self) -> AsyncIterator[None]:
        # The limit counts the whole message, which carries headers beside the body.
        message_limit = self.config.limits.body_bytes + 1024 * 1024
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", message_limit),
                ("grpc.max_send_message_length", message_limit),
                # Envoy may ping an idle connection more often than gRPC's default allows (GOAWAY too_many_pings).
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
                ("grpc.http2.max_ping_strikes", 0),
                # An Envoy that froze, or whose host is gone, ends no stream: without these pings of ours, what its
                # requests hold of engines' places would be held for hours. Both limits apply, the second to each ping.
                ("grpc.keepalive_time_ms", round(_PING_EVERY_S * 1000)),
                ("grpc.keepalive_timeout_ms", round(_PING_TIMEOUT_S * 1000)),
                ("grpc.http2.ping_timeout_ms", round(_PING_TIMEOUT_S * 1000)),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.so_reuseport", 0),
            ]
        )
        external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(  # type: ignore[no-untyped-call]
            ExternalProcessor(self.service), server
        )
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(  # type: ignore[no-untyped-call]
            AccessLogService(self._endings), server
        )
        eds = EndpointDiscovery(self.service.fleet)
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(eds, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (EXT_PROC, ACCESS_LOG, EDS, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            self.grpc_port = self._listen(server)
        except RuntimeError:
            raise ConfigError(f"grpc.listen: {self.config.grpc.listen} cannot be bound") from None
        await server.start()
        try:
            yield
        finally:
            await self._drain(server, eds)

    def _listen(self, server: grpc.aio.Server) -> int:
        settings = self.config.grpc
        listening.check("grpc.listen", settings.listen)
        if settings.tls is None:
            return int(server.add_insecure_port(settings.listen))
        return int(server.add_secure_port(settings.listen, Certificates(settings.tls).credentials()))

    async def _drain(self, server: grpc.aio.Server, eds: EndpointDiscovery) -> None:
        """New work goes elsewhere, running work ends, and streams that only wait for tokens are let go."""
        deadline = time.monotonic() + self.config.life.drain_s
        self._draining = True
        await self._set_health(_NOT_SERVING)
        if self.service.in_flight:
            log.info("draining", in_flight=self.service.in_flight, drain_s=self.config.life.drain_s)
        await asyncio.sleep(min(self.config.life.notice_s, self.config.life.drain_s))
        stopping = asyncio.create_task(server.stop(max(0.0, deadline - time.monotonic())), name="stop")
        await self.service.let_go(deadline)
        await self._prefiller.flush(deadline)
        await self._endings.flush(deadline)
        eds.close()
        await self.releases.flush(deadline)
        await stopping

    async def _set_health(self, status: int) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)

    def why_not_ready(self) -> str | None:
        """None when the service takes traffic; else the reason, for people.

        Once it knows engines it stays ready, also while all of them are down: then it still has a fallback, or an error
        that says so, where Envoy without it has neither.
        """
        if self._draining:
            return "draining"
        if not self.grpc_port:
            return "starting"
        if self._knows_engines:
            return None
        if starting := self.service.fleet.starting:
            return f"no word yet from {starting[0]}"
        decoders, prefillers = (self.service.fleet.engines(role) for role in ("decode", "prefill"))
        if not any(engine.address for engine in decoders):
            return "no decode engine has an address"
        if prefillers and not any(engine.address for engine in prefillers):
            return "no prefill engine has an address"
        self._knows_engines = True
        return None

    async def _serve_when_ready(self) -> None:
        """Health follows readiness; the reason for waiting is logged once."""
        was: str | None = ""
        while not self._draining:
            reason = self.why_not_ready()
            if reason != was:
                was = reason
                await self._set_health(_NOT_SERVING if reason else _SERVING)
                log.info("serving" if reason is None else "not ready", reason=reason)
            await asyncio.sleep(_READY_POLL_S if reason else 1.0)

    async def _cancel_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)


def _sources(fleet: Fleet) -> dict[str, Callable[[], Awaitable[None]]]:
    """What follows the watched file and each DNS name."""
    found: dict[str, Callable[[], Awaitable[None]]] = {}
    if fleet.settings.file:
        found["file"] = FileSource(fleet, fleet.settings.file).run
    for number, entry in enumerate(fleet.settings.dns, 1):  # two of them may share a name, or a role
        found[f"dns {number} {entry.name}"] = DnsSource(fleet, entry).run
    return found


async def _endless(name: str, runner: Callable[[], Awaitable[None]]) -> None:
    """A background task that ends is a fault of ours: say so instead of going on half blind without a word."""
    try:
        await runner()
    except Exception:
        log.exception("background task failed", task=name)
        raise


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT. A second signal ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Server(config):
        _spare_the_collector()
        await stop.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    log.info("stopped")


def _spare_the_collector() -> None:
    """What lives by now lives as long as the process: garbage collections need not walk it again and again.

    Together with fewer collections that is 3 % of a request's CPU, and the longest pauses.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)


def run(config: Config, *, worker: int | None = None) -> None:
    """The whole life of a process, on uvloop. ``worker`` is its number where there are several."""
    import uvloop

    logs.configure(config.log, worker=worker)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
