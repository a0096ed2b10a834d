"""The HTTP server under the engine: uvicorn on a socket of ours, which can be told to refuse or reset connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_KEY = "extproc.sim"


def reset(scope: Scope) -> None:
    """Drop the connection of a request with a TCP reset, as the death of a process does."""
    _reset(scope["extensions"][_KEY]["transport"])


def close(scope: Scope) -> None:
    """Close the connection of a request without another byte."""
    scope["extensions"][_KEY]["transport"].close()


def forget(scope: Scope) -> None:
    """This request will never be answered: closing the port need not wait for it."""
    scope["extensions"][_KEY]["silent"].add(scope["extensions"][_KEY]["transport"])


def _reset(transport: asyncio.Transport) -> None:
    # Event loops wrap their sockets in different ways; a duplicate of the descriptor is the same connection.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class HttpListener:
    """One port. ``refuse()`` closes it while the application lives on, ``resume()`` opens the same port again.

    uvicorn's own Server is left out: it polls ten times a second, where tests start and stop engines by the hundred.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, reset_next: Callable[[], bool] | None = None) -> None:
        self.host = host
        self.port = port

        silent: set[asyncio.Transport] = set()

        class Protocol(HttpToolsProtocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                if reset_next is not None and reset_next():
                    _reset(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                silent.discard(self.transport)

            def on_message_begin(self) -> None:
                super().on_message_begin()
                extensions: Any = {_KEY: {"transport": self.transport, "silent": silent}}
                self.scope["extensions"] = extensions

        self._config = uvicorn.Config(app, http=Protocol, lifespan="off", log_config=None, access_log=False, ws="none")
        self._protocol = Protocol
        self._silent = silent
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._clock: asyncio.Task[None] | None = None

    def _bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With the protocol named: asyncio sets TCP_NODELAY only then.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError:
            bound.close()
            raise
        self.port = bound.getsockname()[1]
        return bound

    async def start(self) -> None:
        """Raises OSError when the port cannot be bound."""
        self._config.load()
        await self.resume()
        self._clock = asyncio.create_task(self._keep_date())

    async def _keep_date(self) -> None:
        while True:
            self._set_date()
            await asyncio.sleep(1)

    def _set_date(self) -> None:
        date = formatdate(usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._config.encoded_headers]

    async def refuse(self) -> None:
        """Close the port and idle connections. Requests in progress go on."""
        if (server := self._server) is not None:
            self._server = None
            loop = asyncio.get_running_loop()
            if isinstance(loop, asyncio.SelectorEventLoop):
                # It loses connections that it has accepted and not yet handed on when the server is closed.
                for listening in server.sockets:
                    loop.remove_reader(listening.fileno())
                await asyncio.sleep(0)
            server.close()
        for connection in list(self._state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is None or cycle.response_complete:
                connection.transport.close()  # not a reset, which could overtake the last answer

    async def resume(self) -> None:
        """Open the port. Raises OSError when somebody else has it."""
        if self._server is not None:
            return
        self._set_date()

        def protocol() -> asyncio.Protocol:
            return self._protocol(config=self._config, server_state=self._state, app_state={})

        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(protocol, sock=self._bind(), backlog=2048)

    async def stop(self, *, grace_s: float) -> None:
        """Close the port, give requests in progress ``grace_s`` seconds, then reset what is left."""
        if self._clock is not None:
            self._clock.cancel()
        await self.refuse()
        for transport in list(self._silent):
            _reset(transport)
        if self._state.tasks and grace_s:
            await asyncio.wait(list(self._state.tasks), timeout=grace_s)
            await self.refuse()
        for connection in list(self._state.connections):
            if not connection.transport.is_closing():
                _reset(connection.transport)
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=1.0)
        for task in list(self._state.tasks):
            task.cancel()
        # A closing connection flushes its last answer first; a client that does not read must not hold it open.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                while self._state.connections:
                    await asyncio.sleep(0.001)
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)
