"""The data path between two simulated engines: what RDMA is to real ones.

A prefiller opens one TCP port of its own for it (never a side channel's port). Its address travels where a real engine
puts the address of its transfer agent: in the opaque ``agent_metadata`` of a NIXL handshake, as ``te_rpc_port`` in
Ascend's.

Frames both ways: four bytes of length, big-endian, then msgpack. Requests are ``["read", engine_id, [block id, …]]`` →
``["ok", [bytes, …]]`` and ``["notify", engine_id, text]`` → ``["ok", []]``; a refusal is ``["error", text]``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from extproc.sim.blocks import BlockPool

_MAX_FRAME = 64 << 20


class TransferError(Exception):
    """The peer is gone, is another engine than it was, or has no such block."""


async def _receive(reader: asyncio.StreamReader) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > _MAX_FRAME:
        raise TransferError(f"a frame of {size} bytes")
    return msgspec.msgpack.decode(await reader.readexactly(size))


def _send(writer: asyncio.StreamWriter, message: list[Any]) -> None:
    frame = msgspec.msgpack.encode(message)
    writer.write(len(frame).to_bytes(4, "big") + frame)


class DataPort:
    """The prefiller's end: reads are served whatever became of the blocks, as memory does."""

    def __init__(self, engine_id: str, pool: BlockPool, notified: Callable[[str], None]) -> None:
        self._engine_id = engine_id
        self._pool = pool
        self._notified = notified
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while True:
                _send(writer, self._answer(await _receive(reader)))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TransferError, msgspec.DecodeError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.close()

    def _answer(self, message: Any) -> list[Any]:
        match message:
            case [_, engine_id, _] if engine_id != self._engine_id:
                return ["error", f"this is engine {self._engine_id}, not {engine_id}"]
            case ["read", _, [*blocks]] if all(isinstance(b, int) and 0 <= b < self._pool.total for b in blocks):
                return ["ok", [self._pool.content[block] for block in blocks]]
            case ["notify", _, str(text)]:
                self._notified(text)
                return ["ok", []]
        return ["error", "no such block or request"]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await self._server.wait_closed()


class RemoteAgent:
    """The decoder's end of the path to one prefiller. Connects when first used, and again after a failure."""

    def __init__(self, engine_id: str, host: str, port: int, *, timeout_s: float) -> None:
        self.engine_id = engine_id
        self._address = host, port
        self._timeout = timeout_s
        self._lock = asyncio.Lock()
        self._stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read(self, blocks: list[int]) -> list[bytes]:
        """The contents of the peer's blocks. Raises TransferError."""
        contents: list[bytes] = await self._call("read", blocks)
        return contents

    async def notify(self, text: str) -> None:
        """Raises TransferError."""
        await self._call("notify", text)

    async def _call(self, kind: str, argument: Any) -> Any:
        async with self._lock:
            try:
                async with asyncio.timeout(self._timeout):
                    if self._stream is None:
                        self._stream = await asyncio.open_connection(*self._address)
                    reader, writer = self._stream
                    _send(writer, [kind, self.engine_id, argument])
                    reply = await _receive(reader)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
                await self._drop()
                raise TransferError(f"{kind} at {self.engine_id}: {error!r}") from error
            except asyncio.CancelledError:
                await self._drop()
                raise
        if reply[0] != "ok":
            raise TransferError(f"{kind} at {self.engine_id}: {reply[1]}")
        return reply[1]

    async def _drop(self) -> None:
        if self._stream is not None:
            _, writer = self._stream
            self._stream = None
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        await self._drop()
