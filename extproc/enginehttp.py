"""HTTP calls from the service to engines: one httpx client per process, over aiohttp's connection pool.

httpx's own pool loses a place with each call that is cancelled before it has a connection (encode/httpx#1461), and
cancelled calls are daily business here; aiohttp's pool does not, and costs about a third less CPU per call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

FailureReason = Literal["connect", "timeout", "disconnected", "too_large"]

MAX_ANSWER_BYTES = 64 * 1024 * 1024


class EngineUnavailable(Exception):
    """No complete answer came. ``reason`` says why: ``connect`` (nothing was sent), ``timeout``, ``disconnected`` (the
    engine closed the connection), ``too_large`` (the answer was)."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A complete HTTP answer; header names in lower case."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Call:
    """What is known of a running call. ``answering_since`` is ``time.monotonic()`` of the answer's first bytes."""

    __slots__ = ("answering_since", "reused")

    def __init__(self) -> None:
        self.reused = False
        self.answering_since: float | None = None


_current: ContextVar[Call | None] = ContextVar("current engine call", default=None)


class EngineClient:
    """Sends requests to engines. Build it inside the running event loop; close it with :meth:`aclose`."""

    def __init__(self, *, connect_timeout_s: float, max_connections: int, keepalive_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._pooled = self._client(limit=max_connections, keepalive_timeout=keepalive_s)
        # A second try after a stale connection must not meet another stale one.
        self._fresh = self._client(limit=max_connections, force_close=True)

    def _client(self, **pool: Any) -> httpx.AsyncClient:
        connector = aiohttp.TCPConnector(ttl_dns_cache=5, **pool)
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            trace_configs=[trace],
        )
        # Its own certificate store is never used: aiohttp's connector verifies https engines.
        transport = AiohttpTransport(client=session, trust_env=False, verify=False)
        return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._pooled.aclose()
        await self._fresh.aclose()

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        timeout_s: float | None,
        call: Call | None = None,
    ) -> EngineAnswer:
        """POST and read the whole answer, whatever its status. Cancelling closes the connection.

        A kept-alive connection that turns out to be closed is replaced once, with the same request: the engine has
        not seen it. Raises EngineUnavailable.
        """
        call = call or Call()
        _current.set(call)
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send(self._pooled, url, body, headers, call)
                except EngineUnavailable as error:
                    if error.reason != "disconnected" or not call.reused or call.answering_since is not None:
                        raise
                return await self._send(self._fresh, url, body, headers, call)
        except TimeoutError:
            raise EngineUnavailable("timeout", f"no answer within {timeout_s} s") from None

    async def _send(
        self, client: httpx.AsyncClient, url: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], call: Call
    ) -> EngineAnswer:
        timeout = httpx.Timeout(None, connect=self._connect_timeout_s, pool=self._connect_timeout_s * 2)
        request = httpx.Request(
            "POST", url, content=body, headers=list(headers), extensions={"timeout": timeout.as_dict()}
        )
        try:
            response = await client.send(request, stream=True)
            call.answering_since = time.monotonic()
            try:
                chunks, size = [], 0
                async for chunk in response.aiter_raw():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > MAX_ANSWER_BYTES:
                        raise EngineUnavailable("too_large", f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise _unavailable(error, call.answering_since is not None) from error
        except aiohttp.ClientError as error:  # what the transport does not translate
            raise EngineUnavailable("disconnected", str(error)) from error
        pairs = [(key.lower(), value) for key, value in response.headers.multi_items()]
        return EngineAnswer(response.status_code, pairs, b"".join(chunks))


async def _note_reuse(_session: aiohttp.ClientSession, _context: SimpleNamespace, _params: object) -> None:
    if (call := _current.get()) is not None:
        call.reused = True


def _unavailable(error: httpx.TransportError, started: bool) -> EngineUnavailable:
    """The transport names several failures alike; the aiohttp error behind it tells them apart."""
    cause = error.__cause__
    if not started and isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return EngineUnavailable("connect", str(cause))
    return EngineUnavailable("disconnected", str(cause) or type(cause).__name__)
