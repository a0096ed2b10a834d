"""One simulated engine, whole: engine core, connector, HTTP API and control endpoint.

::

    async with SimEngine(SimConfig(role="prefill")) as engine:
        await client.post(f"{engine.url}/v1/completions", json={…})
        assert engine.state()["pinned"] == []
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from extproc.sim.api import Api
from extproc.sim.ascend import AscendConnector
from extproc.sim.config import SimConfig
from extproc.sim.engine import Engine
from extproc.sim.failures import Failure, Failures
from extproc.sim.listener import HttpListener
from extproc.sim.log import Record, RequestLog
from extproc.sim.metrics import Metrics
from extproc.sim.nixl import NixlConnector


class SimEngine:
    """A running engine. ``died`` is set when its core dies; its API port closes then, as the real server exits."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.metrics = Metrics(config.models[0], nixl=config.connector == "nixl")
        self.engine = Engine(config, self.metrics)
        self.connector: NixlConnector | AscendConnector
        self.connector = NixlConnector(self.engine) if config.connector == "nixl" else AscendConnector(self.engine)
        self.engine.connector = self.connector
        self.metrics.watch(lambda: self.engine.pool.usage, lambda: self.engine.running, lambda: self.engine.waiting)
        self.failures = Failures()
        self.log = RequestLog(config.log_size, record=config.record)
        self.died = asyncio.Event()
        control = [
            Route("/sim/state", self._state, methods=["GET"]),
            Route("/sim/fail", self._fail, methods=["POST"]),
            Route("/sim/fail", self._clear, methods=["DELETE"]),
        ]
        api = Api(config, self.engine, self.failures, self.log, self.connector.rejected, control)
        self._api = HttpListener(api.app, config.host, config.port, reset_next=self._reset_next)
        self._control = HttpListener(Starlette(routes=control), config.host, config.control_port)
        self._closing: asyncio.Task[None] | None = None

    # -- addresses -----------------------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        return self._api.port

    @property
    def side_channel_port(self) -> int:
        return self.connector.side_channel_port

    @property
    def control_port(self) -> int:
        return self._control.port

    @property
    def url(self) -> str:
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}"

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises OSError when an address is taken; nothing is left running then."""
        self.engine.on_death = self._on_death
        try:
            await self.connector.start()
            await self._control.start()
            await self._api.start()
        except BaseException as error:
            await self.stop()
            if isinstance(error, zmq.ZMQError):
                raise OSError(error.errno, f"side channel port {self.config.side_channel_port}: {error}") from error
            raise
        if self.failures.has("refuse"):
            await self._api.refuse()

    async def stop(self, *, grace_s: float = 2.0) -> None:
        """End everything; requests in progress get an error."""
        self.engine.stop()
        if self._closing is not None:
            await self._closing
        await self._api.stop(grace_s=grace_s)
        await self._control.stop(grace_s=0)
        await self.connector.stop()
        await self.engine.stopped()

    async def kill(self) -> None:
        """Vanish as a killed process does: connections are reset, nobody is told."""
        await self._api.stop(grace_s=0)
        await self.connector.stop()
        self.engine.stop()

    def _on_death(self) -> None:
        self.died.set()
        self._closing = asyncio.create_task(self._close_after_death())

    async def _close_after_death(self) -> None:
        await asyncio.sleep(0.1)  # the server notices in its own time, and says 503 to health checks until then
        await self._api.stop(grace_s=2.0)
        await self.connector.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- failures ------------------------------------------------------------------------------------------------

    async def fail(self, mode: str, **options: Any) -> None:
        """Switch a failure on (see extproc.sim.failures). Raises ValueError."""
        self.failures.add(Failure.of({"mode": mode, **options}))
        if self.failures.has("refuse"):
            await self._api.refuse()

    async def heal(self) -> None:
        """Switch all failures off."""
        self.failures.clear()
        await self._api.resume()

    def _reset_next(self) -> bool:
        return self.failures.take_connection() is not None

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
        """Wait until something holds, like ``lambda: not engine.pinned``. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[Record]:
        """The requests seen, oldest first."""
        return list(self.log.records)

    @property
    def pinned(self) -> list[str]:
        """Internal ids of the prefills whose blocks are pinned."""
        return list(self.engine.pins)

    def state(self, *, full: bool = False) -> dict[str, Any]:
        """JSON-ready. ``full`` adds recorded headers and bodies to the requests."""
        now = asyncio.get_running_loop().time()
        engine, pool = self.engine, self.engine.pool
        pins = engine.pins
        return {
            "alive": engine.death is None,
            "death": engine.death,
            "role": self.config.role,
            "connector": self.config.connector,
            "engine_id": self.connector.engine_id,
            "port": self.port,
            "side_channel": {
                "host": self.config.advertised_host,
                "port": self.side_channel_port,
                "alive": self.connector.listener_alive,
                "messages": self.connector.listener_messages,
            },
            "blocks": {
                "total": pool.total - 1,
                "used": pool.used,
                "pinned": sum(len(pin.blocks) for pin in pins.values()),
                "usage": pool.usage,
            },
            "pinned": [
                {"id": name, "blocks": pin.blocks, "expires_in_s": round(pin.expires - now, 3)}
                for name, pin in pins.items()
            ],
            "running": engine.running,
            "waiting": engine.waiting,
            "failures": self.failures.state(),
            "requests": [record.full() if full else record.summary() for record in self.log.records],
        }

    async def _state(self, request: Request) -> Response:
        return JSONResponse(self.state(full=request.query_params.get("full") == "1"))

    async def _fail(self, request: Request) -> Response:
        try:
            values = json.loads(await request.body())
            if values.get("mode") == "none":
                await self.heal()
            else:
                await self.fail(**values)
        except (ValueError, TypeError, AttributeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse({"failures": self.failures.state()})

    async def _clear(self, request: Request) -> Response:
        await self.heal()
        return JSONResponse({"failures": []})
