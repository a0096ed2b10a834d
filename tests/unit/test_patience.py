"""More time is asked for late, once, and never beside another message."""

import asyncio

import pytest

from extproc.patience import ASK_AFTER_S, MoreTime
from extproc.pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse


class Wire:
    """Takes messages as gRPC does: one at a time."""

    def __init__(self) -> None:
        self.sent: list[float] = []
        self.sending = False
        self.began = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def send(self, reply: ProcessingResponse) -> None:
        assert not self.sending
        self.sending = True
        self.began.set()
        try:
            await self.goes_on.wait()
            self.sent.append(reply.override_message_timeout.ToMilliseconds() / 1000)
        finally:
            self.sending = False


async def test_what_is_quick_asks_for_nothing() -> None:
    wire = Wire()
    before = set(asyncio.all_tasks())
    async with MoreTime(wire.send, 60.0):
        await asyncio.sleep(0)
    await asyncio.sleep(ASK_AFTER_S * 1.5)
    assert wire.sent == []
    assert asyncio.all_tasks() == before


async def test_what_takes_longer_asks_once_while_it_runs() -> None:
    wire = Wire()
    async with MoreTime(wire.send, 12.5):
        await wire.began.wait()
        await asyncio.sleep(ASK_AFTER_S * 2)
        assert wire.sent == [12.5]
    assert wire.sent == [12.5]


def test_it_is_asked_for_well_within_what_envoy_waits_by_default() -> None:
    assert ASK_AFTER_S <= 0.2 / 4


async def test_without_a_limit_nothing_is_asked_for() -> None:
    wire = Wire()
    async with MoreTime(wire.send, None):
        await asyncio.sleep(ASK_AFTER_S * 1.5)
    assert wire.sent == []


async def test_the_block_is_left_once_the_message_is_sent() -> None:
    wire = Wire()
    wire.goes_on.clear()

    async def late() -> None:
        async with MoreTime(wire.send, 1.0):
            await wire.began.wait()

    leaving = asyncio.create_task(late())
    await wire.began.wait()
    await asyncio.sleep(0.01)
    assert not leaving.done()
    wire.goes_on.set()
    await leaving
    assert wire.sent == [1.0]


async def test_an_error_goes_through_after_the_message() -> None:
    wire = Wire()
    wire.goes_on.clear()

    async def failing() -> None:
        async with MoreTime(wire.send, 1.0):
            await wire.began.wait()
            raise LookupError

    task = asyncio.create_task(failing())
    await wire.began.wait()
    wire.goes_on.set()
    with pytest.raises(LookupError):
        await task
    assert (wire.sent, wire.sending) == ([1.0], False)


async def test_a_stream_that_ended_meanwhile_is_no_error() -> None:
    asked = asyncio.Event()

    async def over(_: ProcessingResponse) -> None:
        asked.set()
        raise asyncio.InvalidStateError("the RPC is over")

    async with MoreTime(over, 1.0):
        await asked.wait()


async def test_cancellation_leaves_nothing_running() -> None:
    wire = Wire()
    wire.goes_on.clear()
    before = set(asyncio.all_tasks())

    async def waiting() -> None:
        async with MoreTime(wire.send, 1.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(waiting())
    await wire.began.wait()
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()  # the write is given up, too
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert (wire.sent, wire.sending) == ([], False)
