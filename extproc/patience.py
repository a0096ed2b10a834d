"""More time from Envoy for a reply that takes long, asked for only where it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from extproc import replies
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

ASK_AFTER_S: Final = 0.05
"""A quarter of the least that Envoy waits for a reply unless told otherwise (``message_timeout``, 0.2 s)."""


class MoreTime:
    """``async with MoreTime(send, 60.0): …``: what runs longer than ASK_AFTER_S gets so many seconds, once.

    gRPC takes one message at a time, so the block is left only when nothing is being sent any more.
    """

    __slots__ = ("_asking", "_seconds", "_send", "_timer")

    def __init__(self, send: Callable[[ext_proc.ProcessingResponse], Awaitable[None]], seconds: float | None) -> None:
        """``seconds`` is None where Envoy has no time limit."""
        self._send = send
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(ASK_AFTER_S, self._start)
        return self

    async def __aexit__(self, *_: tuple[type[BaseException], BaseException, TracebackType] | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            await self._asking

    def _start(self) -> None:
        self._asking = asyncio.create_task(self._ask(), name="more time")

    async def _ask(self) -> None:
        assert self._seconds is not None
        with contextlib.suppress(Exception):  # the stream may end at the same time
            await self._send(replies.more_time(self._seconds))
