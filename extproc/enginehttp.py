"""HTTP calls from the service to engines: aiohttp, one pool of connections per process.

Its pool survives calls that are cancelled at any point, which is daily business here; httpx's loses a place with each
call that is cancelled before it has a connection (encode/httpx#1461). Without httpx's layers above it a call costs half
the CPU (0.36 instead of 0.77 ms, side by side). Headers and the request target go out as they are given, but
that header values which are not UTF-8 are taken for latin-1.
"""

from __future__ import annotations

import asyncio
import functools
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, Literal, Self

import aiohttp
from aiohttp.abc import AbstractResolver
from multidict import CIMultiDict
from yarl import URL

FailureReason = Literal["connect", "timeout", "disconnected", "too_large"]

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_REFUSAL_BYTES = 512 * 1024
"""Of a 4xx, which becomes a message to Envoy: it must fit there, beside its headers."""

# Larger bodies are sent piece by piece, so that they do not hold up the loop. Each piece takes a turn in a thread,
# which costs more than to write a few hundred KB at once.
_AT_ONCE_BYTES: Final = 1024 * 1024
_ADDED_BY_AIOHTTP: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class EngineUnavailable(Exception):
    """No complete answer came. ``reason`` says why: ``connect`` (nothing was sent), ``timeout``, ``disconnected`` (the
    engine closed the connection, or talked no HTTP), ``too_large`` (the answer was)."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason: FailureReason = reason


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A complete HTTP answer; header names in lower case, values as latin-1."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    cut_off: bool = False
    """A refusal whose body exceeds MAX_REFUSAL_BYTES: nothing of it is kept."""

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


class Call:
    """What is known of a running call. ``answering_since`` is ``time.monotonic()`` of the answer's headers."""

    __slots__ = ("answering_since", "reused", "sent")

    def __init__(self) -> None:
        self.reused = False
        self.sent = False
        """Whether the engine may know of the request: its head has been written to a connection."""
        self.answering_since: float | None = None


class EngineClient:
    """Sends requests to engines. Build it inside the running event loop; close it with :meth:`aclose`."""

    def __init__(
        self,
        *,
        connect_timeout_s: float,
        max_connections: int,
        keepalive_s: float,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """``resolver`` says where names lead; the system by default."""
        # The time for a place in the pool and the connection together, and for the connection alone.
        self._timeout = aiohttp.ClientTimeout(connect=connect_timeout_s * 2, sock_connect=connect_timeout_s)
        self._pooled = _session(limit=max_connections, keepalive_timeout=keepalive_s, resolver=resolver)
        # A second try after a stale connection must not meet another stale one.
        self._fresh = _session(limit=max_connections, force_close=True, resolver=resolver)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._pooled.close()
        await self._fresh.close()

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

        Of a 4xx with a large body the head alone is read. Headers and the query are sent as given. A kept-alive
        connection that turns out to be closed is replaced once, with the same request: the engine has not seen it.
        Raises EngineUnavailable.
        """
        call = call or Call()
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._send(self._pooled, url, body, headers, call)
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                    if not call.reused or call.answering_since is not None or not _nothing_came(error):
                        raise
                return await self._send(self._fresh, url, body, headers, call)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise EngineUnavailable("connect", str(error)) from error
            raise EngineUnavailable("timeout", f"no answer within {timeout_s} s") from None
        except aiohttp.ClientConnectorError as error:
            raise EngineUnavailable("connect", str(error)) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable("disconnected", str(error) or type(error).__name__) from error

    async def answers(self, url: str, *, timeout_s: float) -> bool:
        """Whether the server answers a GET within that time, whatever it says."""
        try:
            async with asyncio.timeout(timeout_s):
                # Of its own: a kept connection may turn out to be closed.
                async with self._fresh.get(
                    _url(url), allow_redirects=False, timeout=self._timeout, trace_request_ctx=Call()
                ):
                    return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _send(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        call: Call,
    ) -> EngineAnswer:
        response = await session.post(
            _url(url),
            data=body if len(body) <= _AT_ONCE_BYTES else io.BytesIO(body),
            headers=CIMultiDict([(name.decode("latin-1"), _text(value)) for name, value in headers]),
            allow_redirects=False,
            timeout=self._timeout,
            trace_request_ctx=call,
        )
        call.answering_since = time.monotonic()
        refused = 400 <= response.status < 500
        try:
            answer = await read_at_most(response, MAX_REFUSAL_BYTES if refused else MAX_ANSWER_BYTES)
        finally:
            response.close()  # gives a connection whose answer has been read to the pool, drops any other
        if answer is None and not refused:
            raise EngineUnavailable("too_large", f"the answer exceeds {MAX_ANSWER_BYTES} bytes")
        pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.raw_headers]
        return EngineAnswer(response.status, pairs, answer or b"", cut_off=answer is None)


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body; None, and the rest unread, where it has more bytes than ``limit``."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _session(**pool: Any) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    trace.on_request_headers_sent.append(_note_sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ttl_dns_cache=5, **pool),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
        auto_decompress=False,
        skip_auto_headers=_ADDED_BY_AIOHTTP,
        trace_configs=[trace],
    )


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _note_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.sent = True


def _nothing_came(error: aiohttp.ClientError) -> bool:
    """Whether the connection ended without a byte of an answer: what aiohttp has read of one hangs on its error."""
    return not isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(error.message, str)


@functools.lru_cache(256)
def _url(url: str) -> URL:
    """Envoy passes on raw bytes above 127, which reach us as latin-1; a URL has them percent-encoded."""
    text = url if url.isascii() else "".join(c if c < "\x80" else f"%{ord(c):02X}" for c in url)
    return URL(text, encoded=True)


def _text(value: bytes) -> str:
    """aiohttp sends text as UTF-8, so bytes that are UTF-8 arrive unchanged."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
