"""An httpx transport over aiohttp's connection pool.

httpx's own pool loses a place with each call that is cancelled before it has a connection (encode/httpx#1461), and
cancelled calls are daily business here; aiohttp's does not, and costs less than a third of the CPU. Headers and the
request target go out as they are in the request: nothing is merged, decoded or encoded anew.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import httpx
from multidict import CIMultiDict
from yarl import URL

_AT_ONCE_BYTES: Final = 256 * 1024  # larger bodies are sent piece by piece, so that they do not hold up the loop
_ADDED_BY_AIOHTTP: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class Call:
    """What is known of a running call. Put one into a request's ``extensions["call"]`` to learn it.

    ``answering_since`` is ``time.monotonic()`` of the answer's headers, for whoever reads them to set.
    """

    __slots__ = ("answering_since", "reused", "sent")

    def __init__(self) -> None:
        self.reused = False
        """Whether it went out on a kept-alive connection."""
        self.sent = False
        """Whether the engine may know of the request: its head has been written to a connection."""
        self.answering_since: float | None = None


class AiohttpTransport(httpx.AsyncBaseTransport):
    """Build it inside the running event loop. ``pool`` is given to aiohttp.TCPConnector.

    A request's ``extensions["target"]`` (bytes) overrides path and query; ``extensions["timeout"]`` may have
    ``connect``, for the connection alone, and ``pool``, for a place in the pool and the connection together.
    Raises httpx's ConnectTimeout, ConnectError, RemoteProtocolError (the connection ended without a byte of an answer)
    and ReadError.
    """

    def __init__(self, **pool: Any) -> None:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        trace.on_request_headers_sent.append(_note_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ttl_dns_cache=5, **pool),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            skip_auto_headers=_ADDED_BY_AIOHTTP,
            trace_configs=[trace],
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {})
        content = request.content
        try:
            response = await self._session.request(
                request.method,
                _url(request),
                data=content if len(content) <= _AT_ONCE_BYTES else io.BytesIO(content),
                headers=CIMultiDict((name.decode("latin-1"), _text(value)) for name, value in request.headers.raw),
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(connect=timeout.get("pool"), sock_connect=timeout.get("connect")),
                trace_request_ctx=request.extensions.get("call") or Call(),
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _translated(error, request) from error
        return httpx.Response(
            response.status, headers=response.raw_headers, stream=_Stream(response, request), request=request
        )

    async def aclose(self) -> None:
        await self._session.close()


class _Stream(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse, request: httpx.Request) -> None:
        self._response = response
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except aiohttp.ClientError as error:
            raise httpx.ReadError(str(error) or type(error).__name__, request=self._request) from error

    async def aclose(self) -> None:
        self._response.close()  # gives a connection whose answer has been read to the pool, drops any other


async def _note_reuse(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.reused = True


async def _note_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    context.trace_request_ctx.sent = True


def _translated(error: Exception, request: httpx.Request) -> httpx.TransportError:
    text = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return httpx.ConnectTimeout(text, request=request)
    if isinstance(error, aiohttp.ClientConnectorError):
        return httpx.ConnectError(text, request=request)
    # What aiohttp has read of an answer hangs on its error in place of a message.
    silent = isinstance(error, aiohttp.ServerDisconnectedError) and isinstance(error.message, str)
    if silent or isinstance(error, aiohttp.ClientOSError):
        return httpx.RemoteProtocolError(text, request=request)
    return httpx.ReadError(text, request=request)


def _url(request: httpx.Request) -> URL:
    target: bytes = request.extensions.get("target") or request.url.raw_path
    origin = f"{request.url.scheme}://{request.url.netloc.decode('ascii')}"
    return URL(origin + _in_ascii(target), encoded=True)


def _in_ascii(target: bytes) -> str:
    """Envoy passes on raw bytes above 127; a URL has them percent-encoded."""
    text = target.decode("latin-1")
    return text if text.isascii() else "".join(c if c < "\x80" else f"%{ord(c):02X}" for c in text)


def _text(value: bytes) -> str:
    """aiohttp sends text as UTF-8, so bytes that are UTF-8 arrive unchanged."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
