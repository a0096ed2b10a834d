"""The admin port: health, readiness, metrics and the fleet, over plain HTTP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from extproc.config import split_listen
from extproc.errors import ConfigError
from extproc.fleet.engines import ROLES, Engine
from extproc.picking import STALE_S
from extproc.release import ReleaseService
from extproc.service import Service

_PAGE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def application(service: Service, releases: ReleaseService, why_not_ready: Callable[[], str | None]) -> Starlette:
    """``why_not_ready`` returns None when the service takes traffic."""
    page = files("extproc").joinpath("static/status.html").read_text(encoding="utf-8")

    async def status(_: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def fleet(_: Request) -> Response:
        accounts = releases.accounts
        return JSONResponse(
            {
                "engines": [describe(engine) for role in ROLES for engine in service.fleet.engines(role)],
                "in_flight": service.in_flight,
                "releases": {
                    "requested": accounts.requested,
                    "pending": accounts.pending,
                    "left_to_timer": accounts.left_to_timer,
                    **accounts.ended,
                },
            }
        )

    async def exchanges(request: Request) -> Response:
        limit = request.query_params.get("limit", "")
        records = service.recent.list()
        return JSONResponse({"exchanges": records[: int(limit)] if limit.isdigit() else records})

    async def drain(request: Request) -> Response:
        # A web page that an operator happens to look at must not be able to drain engines.
        origin = request.headers.get("origin")
        if origin and urlsplit(origin).netloc != request.headers.get("host"):
            return PlainTextResponse("requests from other sites are not accepted\n", status_code=403)
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ("drain", "undrain"):
            return PlainTextResponse("use drain or undrain\n", status_code=404)
        if not service.fleet.drain(name, action == "drain"):
            return PlainTextResponse(f"there is no engine called {name!r}\n", status_code=404)
        return PlainTextResponse(f"{name}: {action}ed\n")

    return Starlette(
        routes=[
            Route("/", status),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/fleet", fleet),
            Route("/fleet/{name}/{action}", drain, methods=["POST"]),
            Route("/exchanges", exchanges),
        ]
    )


def describe(engine: Engine) -> dict[str, Any]:
    """One engine as JSON: what it is, how it is doing, what it has to do. Load is left out when its report is old."""
    now = time.monotonic()
    described: dict[str, Any] = {
        "name": engine.name,
        "role": engine.role,
        "url": engine.url,
        "endpoint": engine.endpoint,
        "connector": engine.connector.name,
        "group": engine.spec.group or None,
        "models": sorted(engine.spec.models or engine.known_models or ()),
        "state": engine.state(now),
        "reason": engine.health.reason if engine.state(now) in ("unhealthy", "ejected") else None,
        "inflight": engine.inflight,
        "reserved_tokens": engine.reserved_tokens,
        "picked": engine.picked,
    }
    if now - engine.report.at <= STALE_S:
        report = engine.report
        described |= {"waiting": report.waiting, "running": report.running, "kv_usage": round(report.kv_usage, 4)}
    return described


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
