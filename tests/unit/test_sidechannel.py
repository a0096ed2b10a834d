"""Side channels, against real ZMQ ROUTERs as the engines have them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop
import zmq
import zmq.asyncio

from extproc import sidechannel
from extproc.processes import free_port
from extproc.sidechannel import ACK, SideChannels

DEAD = "tcp://127.0.0.1:1"


class Router:
    """A listener that records what it gets. ``reply`` returns the frames to answer with, or None for no answer."""

    def __init__(self, host: str = "127.0.0.1", port: int | None = None) -> None:
        self.received: list[list[bytes]] = []
        self.reply: Callable[[bytes], list[bytes] | None] = lambda payload: [b"", ACK]
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.bind(sidechannel.endpoint(host, port or 0))
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            async with self._changed:
                self.received.append(frames)
                self._changed.notify_all()
            answer = self.reply(frames[-1])
            if answer is not None:
                await self.send(frames[0], *answer)

    async def send(self, *frames: bytes) -> None:
        await self._socket.send_multipart(frames)

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(lambda: len(self.received) >= count)

    async def stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    listener = Router()
    yield listener
    await listener.stop()


@pytest.fixture
async def channels() -> AsyncIterator[SideChannels]:
    side_channels = SideChannels()
    yield side_channels
    await side_channels.aclose()


@contextlib.asynccontextmanager
async def _longest_pause() -> AsyncIterator[list[float]]:
    """How many seconds the loop was held up in one go; the list has it after the block."""
    worst = [0.0]

    async def tick() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(0)
            worst[0] = max(worst[0], time.monotonic() - started)

    task = asyncio.create_task(tick())
    try:
        yield worst
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ── what goes over the wire ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (
            sidechannel.abort_request("chatcmpl-abc-0123abcd"),
            "92c41161626f72745f726571756573745f6d7367b563686174636d706c2d6162632d3031323361626364",
        ),
        (
            sidechannel.done_receiving("chatcmpl-abc-0123abcd"),
            "93c410646f6e655f72656376696e675f6d7367b563686174636d706c2d6162632d3031323361626364c0",
        ),
    ],
)
def test_messages_are_what_the_engines_decode(payload: bytes, expected: str) -> None:
    assert payload.hex() == expected


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("10.0.0.7", 5600, "tcp://10.0.0.7:5600"),
        ("2001:db8::1", 30001, "tcp://[2001:db8::1]:30001"),
        ("prefill-0.svc", 1, "tcp://prefill-0.svc:1"),
    ],
)
def test_addresses(host: str, port: int, expected: str) -> None:
    assert sidechannel.endpoint(host, port) == expected


async def test_a_request_is_an_empty_delimiter_and_one_payload(router: Router, channels: SideChannels) -> None:
    assert await channels.request(router.address, b"payload", timeout_s=5) == ACK

    [[identity, *frames]] = router.received
    assert len(identity) == 5  # one that ZMQ gave
    assert frames == [b"", b"payload"]


@pytest.mark.parametrize("answer", [[b"", b"ACK"], [b"ACK"], [b"", b"no"], [b"", b""]])
async def test_the_last_frame_is_the_reply(router: Router, channels: SideChannels, answer: list[bytes]) -> None:
    router.reply = lambda payload: answer

    assert await channels.request(router.address, b"x", timeout_s=5) == answer[-1]


async def test_over_ipv6(channels: SideChannels) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("no IPv6 here")
    listener = Router("::1")
    try:
        assert listener.address.startswith("tcp://[::1]:")
        assert await channels.request(listener.address, b"x", timeout_s=5) == ACK
    finally:
        await listener.stop()


def test_on_uvloop() -> None:
    async def ask() -> bytes | None:
        listener, side_channels = Router(), SideChannels()
        try:
            assert await side_channels.request(DEAD, b"x", timeout_s=0.05) is None
            return await side_channels.request(listener.address, b"x", timeout_s=5)
        finally:
            await side_channels.aclose()
            await listener.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(ask()) == ACK


# ── replies that do not come, or come late ───────────────────────────────────────────────────────────────────────────


async def test_no_reply_is_none_within_the_time(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: None

    started = time.monotonic()
    reply = await channels.request(router.address, b"x", timeout_s=0.2)

    assert reply is None
    assert 0.2 <= time.monotonic() - started < 2
    assert len(router.received) == 1


async def test_a_late_reply_is_not_taken_for_the_next_requests(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: None
    assert await channels.request(router.address, b"first", timeout_s=0.1) is None
    identity = router.received[0][0]

    router.reply = lambda payload: [b"", b"second's"]
    await router.send(identity, b"", b"first's")  # to a peer that has gone: a ROUTER drops it
    assert await channels.request(router.address, b"second", timeout_s=5) == b"second's"
    assert await channels.request(router.address, b"third", timeout_s=5) == b"second's"

    identities = [frames[0] for frames in router.received]
    assert identities[0] != identities[1] == identities[2]


async def test_a_reply_that_comes_while_the_next_waits_is_not_taken_for_its_own(
    router: Router, channels: SideChannels
) -> None:
    """The first request times out; its reply is sent when the listener already has the second."""
    router.reply = lambda payload: None
    assert await channels.request(router.address, b"first", timeout_s=0.1) is None
    second = asyncio.create_task(channels.request(router.address, b"second", timeout_s=5))
    await router.wait_for(2)

    await router.send(router.received[0][0], b"", b"first's")
    await router.send(router.received[1][0], b"", b"second's")

    assert await second == b"second's"


async def test_requests_to_one_endpoint_run_one_after_the_other(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: [b"", payload]

    payloads = [b"%d" % number for number in range(50)]
    replies = await asyncio.gather(*(channels.request(router.address, payload, timeout_s=10) for payload in payloads))

    assert replies == payloads
    assert [frames[-1] for frames in router.received] == payloads


async def test_waiting_for_ones_turn_counts(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: None

    started = time.monotonic()
    replies = await asyncio.gather(*(channels.request(router.address, b"x", timeout_s=0.3) for _ in range(20)))

    assert replies == [None] * 20
    assert time.monotonic() - started < 3  # and not 20 times 0.3 s


async def test_a_cancelled_request_leaves_the_channel_usable(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: None
    task = asyncio.create_task(channels.request(router.address, b"cancelled", timeout_s=30))
    await router.wait_for(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    router.reply = lambda payload: [b"", payload]
    assert await channels.request(router.address, b"next", timeout_s=5) == b"next"


async def test_an_engine_that_comes_back_does_not_get_the_messages_it_missed(channels: SideChannels) -> None:
    port = free_port()
    address = sidechannel.endpoint("127.0.0.1", port)
    for number in range(5):
        assert await channels.request(address, b"missed %d" % number, timeout_s=0.02) is None

    listener = Router(port=port)
    try:
        assert await channels.request(address, b"new", timeout_s=10) == ACK
        assert [frames[-1] for frames in listener.received] == [b"new"]
    finally:
        await listener.stop()


# ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_one_socket_per_endpoint(router: Router, channels: SideChannels) -> None:
    other = Router()
    try:
        for listener in (router, other):
            await channels.request(listener.address, b"first", timeout_s=5)
        files = _open_files()

        for number in range(500):
            for listener in (router, other):
                assert await channels.request(listener.address, b"%d" % number, timeout_s=5) == ACK

        assert _open_files() == files
        assert channels.addresses == {router.address, other.address}
        for listener in (router, other):
            assert len({frames[0] for frames in listener.received}) == 1
    finally:
        await other.stop()


async def _until_files_are(count: int) -> None:
    """ZMQ's own thread closes sockets in its own time."""
    async with asyncio.timeout(10):
        while _open_files() > count:
            await asyncio.sleep(0.01)


async def test_timeouts_leave_no_sockets_behind(channels: SideChannels) -> None:
    files = _open_files()
    for _ in range(100):
        assert await channels.request(DEAD, b"x", timeout_s=0.001) is None

    await _until_files_are(files + 10)  # the context's own


async def test_more_endpoints_than_zmqs_default_allows(channels: SideChannels) -> None:
    assert channels._context.get(zmq.MAX_SOCKETS) > 10_000


@pytest.mark.parametrize("address", ["tcp://", "tcp://host", "nonsense", "tcp://127.0.0.1:70000", "tcp://[::1:5", ""])
async def test_an_address_that_zmq_cannot_parse_gives_no_reply(channels: SideChannels, address: str) -> None:
    files = _open_files()

    for _ in range(30):
        assert await channels.request(address, b"x", timeout_s=0.01) is None

    await _until_files_are(files + 10)


# ── the event loop and the end ───────────────────────────────────────────────────────────────────────────────────────


async def test_dead_endpoints_do_not_hold_up_the_loop(router: Router, channels: SideChannels) -> None:
    await channels.request(router.address, b"warm up", timeout_s=5)
    addresses = [sidechannel.endpoint("127.0.0.1", port) for port in range(1, 21)]

    for _ in range(20):  # a call that blocks does so each time; a busy machine does not
        async with _longest_pause() as worst:
            dead = [
                asyncio.create_task(channels.request(address, b"x" * 100, timeout_s=0.1))
                for address in addresses
                for _ in range(5)
            ]
            alive = [await channels.request(router.address, b"x", timeout_s=5) for _ in range(20)]
            assert await asyncio.gather(*dead) == [None] * 100
        assert alive == [ACK] * 20
        if worst[0] < 0.05:
            return
    pytest.fail("the loop was held up each time")


async def test_closing_does_not_wait_for_messages_that_cannot_be_delivered() -> None:
    channels = SideChannels()
    waiting = [asyncio.create_task(channels.request(DEAD, b"x", timeout_s=60)) for _ in range(5)]
    waiting += [asyncio.create_task(channels.request("tcp://127.0.0.1:2", b"x", timeout_s=60))]
    for _ in range(5):
        await asyncio.sleep(0)

    started = time.monotonic()
    await channels.aclose()

    assert time.monotonic() - started < 1
    async with asyncio.timeout(5):
        assert await asyncio.gather(*waiting) == [None] * 6


async def test_after_closing_nothing_is_sent(router: Router) -> None:
    channels = SideChannels()
    assert await channels.request(router.address, b"x", timeout_s=5) == ACK
    await channels.aclose()

    assert await channels.request(router.address, b"x", timeout_s=5) is None
    assert channels.addresses == frozenset()
    await channels.aclose()


async def test_an_endpoint_that_left_is_forgotten_with_its_socket(router: Router, channels: SideChannels) -> None:
    router.reply = lambda payload: None if payload == b"held" else [b"", ACK]
    assert await channels.request(router.address, b"x", timeout_s=5) == ACK
    held = asyncio.create_task(channels.request(router.address, b"held", timeout_s=60))
    queued = asyncio.create_task(channels.request(router.address, b"queued", timeout_s=60))
    await router.wait_for(2)

    channels.forget(router.address)

    async with asyncio.timeout(5):
        assert await asyncio.gather(held, queued) == [None, None]
    assert channels.addresses == frozenset()
    assert [frames[-1] for frames in router.received] == [b"x", b"held"]
    channels.forget(router.address)

    assert await channels.request(router.address, b"again", timeout_s=5) == ACK
    assert router.received[0][0] != router.received[-1][0]


async def test_cancelling_a_request_at_the_moment_of_closing_is_still_a_cancellation(router: Router) -> None:
    channels = SideChannels()
    router.reply = lambda payload: None
    task = asyncio.create_task(channels.request(router.address, b"x", timeout_s=60))
    await router.wait_for(1)

    task.cancel()
    await channels.aclose()

    with pytest.raises(asyncio.CancelledError):
        await task
