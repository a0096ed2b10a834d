"""The admin port: health, readiness, metrics and the fleet, over plain HTTP."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlsplit

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from extproc import __version__, listening
from extproc.fleet.engines import ROLES, Engine
from extproc.picking import STALE_S
from extproc.release import ReleaseService
from extproc.service import Service

_DRAIN_POLL_S: Final = 0.1
_NOT_KEPT: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


def application(service: Service, releases: ReleaseService, why_not_ready: Callable[[], str | None]) -> Starlette:
    """``why_not_ready`` returns None when the service takes traffic."""
    page = files("extproc").joinpath("static/status.html").read_text(encoding="utf-8")
    policy = page_policy(page)

    async def status(_: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy, **_NOT_KEPT})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        reason = why_not_ready()
        return PlainTextResponse("ready\n") if reason is None else PlainTextResponse(f"{reason}\n", status_code=503)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def fleet(_: Request) -> Response:
        accounts, handoffs = releases.accounts, service.endings.open_handoffs()
        return _json(
            {
                "version": __version__,
                "engines": [
                    describe(engine, handoffs[engine]) for role in ROLES for engine in service.fleet.engines(role)
                ],
                "sources": [source._asdict() for source in service.fleet.sources],
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
        limit = request.query_params.get("limit")
        if limit is not None and not re.fullmatch("[0-9]{1,9}", limit):
            return PlainTextResponse("limit: expected a number\n", status_code=400)
        records = service.recent.list()
        return _json({"now": round(time.time(), 3), "exchanges": records if limit is None else records[: int(limit)]})

    async def drain(request: Request) -> Response:
        if _from_another_site(request):
            return PlainTextResponse("requests from other sites are not accepted\n", status_code=403)
        name, action = request.path_params["name"], request.path_params["action"]
        if action not in ("drain", "undrain"):
            return PlainTextResponse("use drain or undrain\n", status_code=404)
        wait_s = request.query_params.get("wait_s", "0")
        if not re.fullmatch("[0-9]{1,5}", wait_s):
            return PlainTextResponse("wait_s: expected a number of seconds\n", status_code=400)
        engines = service.fleet.drain(name, action == "drain")
        if not engines:
            return PlainTextResponse(f"there is no engine called {name!r}\n", status_code=404)
        if action == "undrain":
            return PlainTextResponse(f"{name}: undrained\n")
        deadline = time.monotonic() + int(wait_s)
        while (left := _left(service, engines)) and time.monotonic() < deadline:
            await asyncio.sleep(_DRAIN_POLL_S)
        status = 503 if left and int(wait_s) else 200
        return PlainTextResponse(f"{name}: {left or 'drained'}\n", status_code=status)

    return Starlette(
        routes=[
            Route("/", status),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/fleet", fleet),
            Route("/fleet/{name:path}/{action}", drain, methods=["POST"]),
            Route("/exchanges", exchanges),
        ]
    )


def _left(service: Service, engines: Sequence[Engine]) -> str:
    """What drained engines still have to do for this process, in words; empty where they may be stopped."""
    handoffs = service.endings.open_handoffs()
    running, held = sum(engine.inflight for engine in engines), sum(handoffs[engine] for engine in engines)
    if not running and not held:
        return ""
    return f"draining, {running} running, {held} handed over to requests that have not ended"


def page_policy(page: str) -> str:
    """A Content-Security-Policy for an HTML page: its own script and style, this server's data, and nothing else."""

    def own(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        return f"{tag}-src 'sha256-{digest}'"

    return "; ".join(
        (
            "default-src 'none'",
            own("script"),
            own("style"),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _json(content: Any) -> Response:
    return JSONResponse(content, headers=_NOT_KEPT)


def _from_another_site(request: Request) -> bool:
    """Whether a web page sent this that is not ours: one that an operator happens to look at must not drain engines.

    A page that reaches us by a name may have had that name pointed here (DNS rebinding): addresses alone are trusted.
    """
    origin = request.headers.get("origin")
    if origin is None:
        return False
    host = request.headers.get("host", "")
    try:
        return urlsplit(origin).netloc != host or not _is_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:  # neither a host nor an address
        return True


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def describe(engine: Engine, handoffs: int = 0) -> dict[str, Any]:
    """One engine as JSON: what it is, how it is doing, what it has to do. Load is left out when its report is old.

    ``handoffs``: what it handed over to requests that have not ended, and may still hold blocks for.
    """
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
        "handoffs": handoffs,
        "reserved_tokens": engine.reserved_tokens,
        "picked": engine.picked,
    }
    if now - engine.report.at <= STALE_S:
        report = engine.report
        described |= {"waiting": report.waiting, "running": report.running, "kv_usage": round(report.kv_usage, 4)}
    return described


class _Server(uvicorn.Server):
    """The service's own signal handling is in charge, and nothing ticks.

    Ten times a second, as uvicorn does, was a quarter of an idle service's CPU.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, listen: str) -> AsyncIterator[int]:
    """Serve an ASGI application in the running loop; yields the bound port. Raises ConfigError if it cannot bind."""
    with listening.bound("admin.listen", listen) as listener:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, date_header=False, lifespan="off", timeout_graceful_shutdown=1
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="admin")
        try:
            yield listener.getsockname()[1]
        finally:
            server.ended.set()
            await task
