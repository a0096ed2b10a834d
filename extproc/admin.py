"""The admin port: health, readiness, metrics and the fleet, over plain HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from extproc.config import split_listen
from extproc.errors import ConfigError
from extproc.fleet.engines import ROLES
from extproc.service import Service


def application(service: Service, why_not_ready: Callable[[], str | None]) -> Starlette:
    """``why_not_ready`` returns None when the service takes traffic."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def fleet(_: Request) -> Response:
        engines = [engine for role in ROLES for engine in service.fleet.engines(role)]
        listed = [
            {
                "name": engine.name,
                "role": engine.role,
                "url": engine.url,
                "endpoint": engine.endpoint,
                "connector": engine.connector.name,
                "inflight": engine.inflight,
            }
            for engine in engines
        ]
        return JSONResponse({"engines": listed, "in_flight": service.in_flight})

    async def exchanges(_: Request) -> Response:
        return JSONResponse({"exchanges": service.recent.list()})

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/fleet", fleet),
            Route("/exchanges", exchanges),
        ]
    )


class _Server(uvicorn.Server):
    """The service's own signal handling is in charge."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, listen: str) -> AsyncIterator[int]:
    """Serve an ASGI application in the running loop; yields the bound port. Raises ConfigError if it cannot bind."""
    import asyncio

    host, port = split_listen(listen)
    settings = uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
    )
    try:
        socket = settings.bind_socket()
    except SystemExit:  # uvicorn's way to say that the address is taken
        raise ConfigError(f"admin.listen: {listen} cannot be bound; is something else listening there?") from None
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[socket]), name="admin")
    try:
        yield socket.getsockname()[1]
    finally:
        server.should_exit = True
        await task
        socket.close()
