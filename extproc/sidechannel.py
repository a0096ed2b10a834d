"""ZMQ requests to prefillers' side channels: one context per process, one socket per endpoint.

The listeners are ROUTERs that expect an empty delimiter and one payload, and whose replies name no request. So a socket
carries one request at a time, and one that timed out is thrown away: a late reply cannot be taken for the next one's.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec
import zmq
import zmq.asyncio

ACK: Final = b"ACK"

# ZMQ's default, 1023, is not enough for a large fleet: vLLM Ascend has an endpoint for each rank of each prefiller.
_MAX_SOCKETS: Final = 16_384

encode = msgspec.msgpack.Encoder().encode


def abort_request(request_id: str) -> bytes:
    """vllm-ascend PR 14716, and extproc's plugin for upstream vLLM."""
    return encode((b"abort_request_msg", request_id))


def done_receiving(request_id: str) -> bytes:
    """Stock vllm-ascend (0.13 and later): the third element None asks for an immediate release."""
    return encode((b"done_recving_msg", request_id, None))


def endpoint(host: str, port: int) -> str:
    """A ZMQ address; IPv6 hosts need brackets there."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class SideChannels:
    """All side channels that this process talks to. Close it with :meth:`aclose`, which never waits for a dead peer."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._channels: dict[str, _Channel] = {}
        self._closed = False

    async def request(self, address: str, payload: bytes, *, timeout_s: float) -> bytes | None:
        """Send one payload, await its reply; None when none came in time. Requests to one endpoint queue up."""
        if self._closed:
            return None
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _Channel(self._context, address)
        return await channel.request(payload, timeout_s)

    @property
    def addresses(self) -> frozenset[str]:
        """Endpoints that have a socket, or had one before a time-out."""
        return frozenset(self._channels)

    def forget(self, address: str) -> None:
        """Close the socket of an endpoint that has left the fleet. Who waits for its reply gets None."""
        if channel := self._channels.pop(address, None):
            channel.close()

    async def aclose(self) -> None:
        self._closed = True
        for address in list(self._channels):
            self.forget(address)
        self._context.destroy(linger=0)


class _Channel:
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._context = context
        self._address = address
        self._lock = asyncio.Lock()
        self._socket: zmq.asyncio.Socket | None = None
        self._closed = False

    async def request(self, payload: bytes, timeout_s: float) -> bytes | None:
        try:
            async with asyncio.timeout(timeout_s), self._lock:
                return None if self._closed else await self._exchange(payload)
        except (TimeoutError, zmq.ZMQError):  # ZMQ's: an address that it cannot parse, no more sockets
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            return None  # not we were cancelled: the socket was closed under us

    async def _exchange(self, payload: bytes) -> bytes:
        socket = self._socket or self._connect()
        answered = False
        try:
            await socket.send_multipart((b"", payload))
            frames = await socket.recv_multipart()
            answered = True
            return frames[-1]
        finally:
            if not answered:
                self._drop()

    def _connect(self) -> zmq.asyncio.Socket:
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(self._address)
        except zmq.ZMQError:
            self._drop()
            raise
        return socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def close(self) -> None:
        self._closed = True
        self._drop()
