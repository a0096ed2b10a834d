"""An Envoy that froze, or whose host is gone: its connection stays open, and nothing comes over it any more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from extproc import server
from tests.grpc.stand import CHAT, CHAT_BODY, JSON, Stand
from tests.support.gateway import HOST, until
from tests.support.scripted_envoy import ScriptedEnvoy


class Wire:
    """A TCP connection in between, which can stop to carry anything without an end of it."""

    def __init__(self) -> None:
        self.carries = asyncio.Event()
        self.carries.set()

    @contextlib.asynccontextmanager
    async def to(self, target: str) -> AsyncIterator[str]:
        """Its own address."""
        tasks = set[asyncio.Task[None]]()
        host, _, port = target.rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
            for source, sink in ((reader, to_writer), (to_reader, writer)):
                tasks.add(asyncio.create_task(self._carry(source, sink)))

        listener = await asyncio.start_server(serve, HOST, 0)
        try:
            yield f"{HOST}:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            self.carries.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self.carries.wait()
                sink.write(data)
        except ConnectionError:
            pass
        finally:
            sink.transport.abort()


async def test_what_a_dead_envoys_requests_hold_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PING_EVERY_S", 1.0)
    monkeypatch.setattr(server, "_PING_TIMEOUT_S", 1.0)
    async with Stand.standing(prefill=1, decode=1) as stand:
        assert stand.server is not None
        service = stand.server.service
        wire = Wire()
        async with wire.to(stand.grpc_address) as address, ScriptedEnvoy(address) as envoy:
            exchange = await envoy.request("POST", CHAT, JSON, CHAT_BODY)
            await exchange.response(200)
            (decoder,) = service.fleet.engines("decode")
            assert (service.in_flight, decoder.inflight) == (1, 1)
            wire.carries.clear()
            await until(lambda: service.in_flight == 0, timeout_s=60)
            await until(lambda: decoder.inflight == 0)
        await stand.settled()
