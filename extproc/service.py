"""What exchanges share: the fleet, the prefiller, counters and limits; and the gRPC service that Envoy calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc

from extproc.config import Config
from extproc.endings import Endings
from extproc.errors import RequestError
from extproc.exchange import Exchange
from extproc.fleet.fleet import Fleet
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from extproc.prefill import Prefilled, Prefiller, PrefillRequest
from extproc.prefixes import DecoderPrefixes
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.telemetry.tracing import Tracing

_LET_GO_MARGIN_S = 0.5


class Service:
    """One process's shared state. Nothing in it has to survive the process."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        prefiller: Prefiller,
        endings: Endings,
        metrics: Metrics,
        recent: Recent,
        tracing: Tracing,
    ) -> None:
        self.config = config
        self.endings = endings
        self.fleet = fleet
        self.metrics = metrics
        self.recent = recent
        self.tracing = tracing
        self.prefixes = DecoderPrefixes(fleet)
        self._prefiller = prefiller
        self._open: dict[Exchange, asyncio.Task[None]] = {}
        self._closed = asyncio.Event()
        self._letting_go = False
        self._fallbacks = 0
        metrics.in_flight.set_function(lambda: len(self._open))

    def opened(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self._open[exchange] = task

    def closed(self, exchange: Exchange) -> None:
        del self._open[exchange]
        self._closed.set()

    @property
    def in_flight(self) -> int:
        """Open ext_proc streams."""
        return len(self._open)

    async def let_go(self, deadline: float) -> None:
        """End all streams by ``deadline`` (``time.monotonic()``) without harm to the requests behind them.

        A stream that has had its response headers needs us no more, and ends at once; one that waits for them gets
        until the deadline. Ended by us with status OK, Envoy goes on without us; a stream that gRPC aborts would take
        the client's response down with it. What still prefills shortly before the deadline is cancelled then, so that
        time is left to release what its prefiller hands over.
        """
        self._letting_go = True
        margin_s = min(_LET_GO_MARGIN_S, (deadline - time.monotonic()) / 2)
        told = set[Exchange]()
        while self._open and (remaining := deadline - time.monotonic()) > 0:
            late = remaining <= margin_s
            for exchange, task in list(self._open.items()):
                done = exchange.needs_us_no_more(late) or (late and exchange.undecided)
                if done and exchange not in told:
                    told.add(exchange)
                    task.cancel()
            self._closed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(0.1, remaining)):
                    await self._closed.wait()

    def was_let_go(self, exchange: Exchange) -> bool:
        """Whether a cancellation of this exchange's handler is ours."""
        return self._letting_go and exchange.needs_us_no_more(late=True)

    def admit(self) -> None:
        """Raises RequestError (503) for an exchange beyond the limit."""
        if self.in_flight > self.config.limits.in_flight:
            raise RequestError(503, "overloaded", "The gateway is at its limit.", headers={"retry-after": "1"})

    @property
    def wants_affinity(self) -> bool:
        """Whether picking looks at how a prompt begins."""
        routing = self.config.routing
        return "prefix_affinity" in (routing.prefill_policy, routing.decode_policy)

    def why_not_disaggregate(self, model: str | None) -> str:
        """The bypass reason that lies in the fleet; empty where there is none."""
        prefillers = self.fleet.engines("prefill")
        if not prefillers:
            return "no_prefillers"
        if not any(engine.serves(model) for engine in prefillers):
            served = any(engine.serves(model) for engine in self.fleet.engines("decode"))
            return "no_prefillers_for_model" if served else "unknown_model"
        return ""

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        """Raises PrefillRefused or PrefillFailed."""
        return await self._prefiller.run(request)

    def take_fallback_slot(self) -> bool:
        """Whether one more request may be prefilled by its decoder; give the slot back afterwards."""
        if self._fallbacks >= self.config.prefill.fallback.max_concurrent:
            return False
        self._fallbacks += 1
        return True

    def return_fallback_slot(self) -> None:
        self._fallbacks -= 1


class ExternalProcessor(external_processor_pb2_grpc.ExternalProcessorServicer):
    """``envoy.service.ext_proc.v3.ExternalProcessor``: one stream per HTTP request, one exchange per stream."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Process(self, _: Any, context: Any) -> None:  # noqa: N802 (gRPC's name)
        """Clean-up hangs on ``finally``: a stream that is reset while we wait for a message simply ends."""
        connection = context.peer()
        exchange = Exchange(self._service, context.write, connection, self._service.tracing.called(context))
        self._service.opened(exchange, asyncio.current_task())  # type: ignore[arg-type]
        self._service.endings.connections.opened(connection)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                exchange.answering = True
                answering = exchange.on(message)
                del message  # its bytes would be held as long as the answer takes
                await answering
                exchange.answering = False
        except asyncio.CancelledError:
            if not self._service.was_let_go(exchange):
                raise
            exchange.close(let_go=True)
        finally:
            try:
                exchange.close()
            finally:
                self._service.endings.connections.closed(connection)
                self._service.closed(exchange)
