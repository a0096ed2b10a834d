"""One ext_proc stream without any rules: the client's end of the gRPC call, as a queue of replies."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc


class RawStream:
    """Send what you like, read what comes."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._replies: asyncio.Queue[ext_proc.ProcessingResponse | None] = asyncio.Queue()
        self._arrived = 0
        self._received = 0
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self.code: grpc.StatusCode | None = None
        """How the stream ended; None while it is open."""
        self.details = ""

    async def _read(self) -> None:
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                self._arrived += 1
                self._replies.put_nowait(reply)
                self._news.set()
        except (grpc.RpcError, asyncio.CancelledError):
            pass  # the status tells
        finally:
            # Where this task itself is cancelled, so is the call, and its status is there at once.
            self.code = await self._call.code()
            self.details = await self._call.details() or ""
            self._replies.put_nowait(None)
            self._news.set()

    @property
    def pending(self) -> int:
        """Replies that are here and were not received yet."""
        return self._arrived - self._received

    async def send(self, message: ext_proc.ProcessingRequest) -> None:
        """Lost without a word if the stream is over: what ended it is found by ``receive``."""
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    async def receive(self, within_s: float = 10.0) -> ext_proc.ProcessingResponse | None:
        """The next reply; None once the stream is over. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            reply = await self._replies.get()
        if reply is None:
            self._replies.put_nowait(None)
        else:
            self._received += 1
        return reply

    async def arrived(self, count: int, within_s: float = 10.0) -> None:
        """Wait until so many replies have come in all, received or not, or the stream is over. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while self._arrived < count and self.code is None:
                self._news.clear()
                await self._news.wait()

    async def half_close(self) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def ended(self, within_s: float = 10.0) -> list[ext_proc.ProcessingResponse]:
        """Wait for the service to end the stream; the replies not received before. Raises TimeoutError."""
        left: list[ext_proc.ProcessingResponse] = []
        async with asyncio.timeout(within_s):
            while (reply := await self.receive(within_s)) is not None:
                left.append(reply)
        return left

    async def reset(self) -> None:
        """Cancel the stream, unless it is over."""
        self._call.cancel()
        await self._reader
