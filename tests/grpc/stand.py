"""The service between a scripted Envoy and recording engines, in one process.

The decode leg is what leaves the scripted Envoy (``exchange.upstream``): no decoder is called but for releases.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import httpx

from tests.support.engines import RecordedRequest, StubEngine
from tests.support.envoy_rules import ImmediateAnswer, UpstreamRequest
from tests.support.gateway import CHAT, CHAT_BODY, Decoder, Gateway, Settings
from tests.support.scripted_envoy import Exchange, Mode, ScriptedEnvoy

MODES: Final[tuple[Mode, ...]] = ("BUFFERED", "FULL_DUPLEX_STREAMED")
JSON: Final = [("content-type", "application/json")]

ASKS: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What the nixl connector asks a prefiller for."""


class Stand(Gateway):
    """A gateway without Envoy."""

    @classmethod
    @contextlib.asynccontextmanager
    async def standing(
        cls, settings: Settings | None = None, *, prefill: int = 2, decode: int = 2, process: bool = False
    ) -> AsyncIterator[Self]:
        """The service runs inside, or as a process of its own."""
        async with contextlib.AsyncExitStack() as stack:
            stand = cls()
            stand.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            for _ in range(prefill):
                stand.prefillers.append(await stack.enter_async_context(StubEngine("prefill")))
            for _ in range(decode):
                stand.decoders.append(await stack.enter_async_context(Decoder()))
            values = stand._values(settings or {})
            await (stand._start_processes(stack, values, 1) if process else stand._start_inside(stack, values))
            # A kept connection may be closed by the other side just when it is used again.
            limits = httpx.Limits(max_keepalive_connections=0)
            stand.client = await stack.enter_async_context(
                httpx.AsyncClient(trust_env=False, timeout=30, limits=limits)
            )
            yield stand

    async def reachable(self) -> None:
        """There is no Envoy that could think otherwise."""

    @contextlib.asynccontextmanager
    async def envoy(self, mode: Mode, **options: Any) -> AsyncIterator[ScriptedEnvoy]:
        async with ScriptedEnvoy(self.grpc_address, mode=mode, **options) as envoy:
            yield envoy

    @property
    def prefill(self) -> RecordedRequest:
        """The one request that a prefiller got."""
        (request,) = self.prefills
        return request

    @property
    def releases(self) -> list[RecordedRequest]:
        """All requests by which decoders were asked to have blocks freed."""
        return [request for engine in self.decoders for request in engine.releases]


async def through(
    envoy: ScriptedEnvoy,
    body: bytes = CHAT_BODY,
    path: str = CHAT,
    *,
    headers: Sequence[tuple[str, str | bytes]] = JSON,
    method: str = "POST",
    status: int = 200,
    **options: Any,
) -> Exchange:
    """A request and its response, to the end; ``status`` is the decoder's."""
    exchange = await envoy.request(method, path, headers, body, **options)
    if exchange.immediate is None:
        await exchange.response(status)
    await exchange.finish()
    return exchange


async def decoded(envoy: ScriptedEnvoy, *arguments: Any, **options: Any) -> UpstreamRequest:
    """What a decoder gets."""
    return (await through(envoy, *arguments, **options)).upstream


async def refused(envoy: ScriptedEnvoy, status: int, code: str, *arguments: Any, **options: Any) -> ImmediateAnswer:
    """Our own error, which must have that status and code, and OpenAI's shape."""
    answer = (await through(envoy, *arguments, **options)).immediate
    assert answer is not None
    assert (answer.status, answer.header("content-type")) == (status, "application/json")
    (error,) = answer.json().values()
    assert (error["code"], answer.details) == (code, f"extproc_{code}")
    assert (error["param"], error["type"]) == (None, _type(status))
    assert error["message"]
    assert answer.header("x-request-id")
    return answer


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def handed_over(body: bytes, params: bytes) -> bytes:
    """The client's body with a handoff's params, as a decoder gets it."""
    assert body.rstrip().endswith(b"}")
    end = body.rindex(b"}")
    return body[:end].rstrip() + b',"kv_transfer_params":' + params + body[len(body[:end].rstrip()) :]
