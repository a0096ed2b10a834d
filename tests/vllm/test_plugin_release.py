"""The plugin in a real prefiller: an abort by ZMQ frees the blocks, with or without decoders, and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.demo.vllm.launch import HOST, VllmEngine
from tests.vllm.conftest import Pair
from tests.vllm.two_step import CHAT, chat, freed, post, prefill, text_of, until, words


class AbortClient:
    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> bytes:
        async with asyncio.timeout(5):
            await self._socket.send(frame)
            return await self._socket.recv()

    async def abort(self, request_id: str) -> bytes:
        return await self.send(msgspec.msgpack.encode((b"abort_request_msg", request_id)))


@pytest.fixture
async def aborts(abortable: VllmEngine) -> AsyncIterator[AbortClient]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(f"tcp://{HOST}:{abortable.abort_port}")
    yield AbortClient(socket)
    context.destroy(linger=0)


async def test_a_ping_names_the_engine_and_the_answer_names_the_port(
    abortable: VllmEngine, aborts: AbortClient
) -> None:
    handoff = await prefill(abortable, chat(words(50, 40)))
    assert handoff["abort_port"] == abortable.abort_port
    assert handoff["abort_ranks"] == 1
    pong = msgspec.msgpack.decode(await aborts.send(msgspec.msgpack.encode((b"ping_msg",))))
    about = {"protocol": 1, "vllm": "0.32.0", "engine_id": handoff["remote_engine_id"], "rank": 0, "ranks": 1}
    assert pong == [b"PONG", about]
    assert await aborts.abort(handoff["remote_request_id"]) == b"ACK"


async def test_an_abort_frees_the_blocks_at_once(abortable: VllmEngine, aborts: AbortClient) -> None:
    for attempt in range(5):
        handoff = await prefill(abortable, chat(words(200, 50 + attempt)))
        assert await abortable.pinned_blocks() == len(handoff["remote_block_ids"][0]) > 10
        assert await aborts.abort(handoff["remote_request_id"]) == b"ACK"
        assert await freed(abortable) < 1
        assert await aborts.abort(handoff["remote_request_id"]) == b"UNKNOWN"


async def test_an_abort_needs_no_decoder(abortable: VllmEngine, pair: Pair, aborts: AbortClient) -> None:
    handoff = await prefill(abortable, chat(words(200, 60)))
    pair.decode.signal(signal.SIGSTOP)
    try:
        assert await aborts.abort(handoff["remote_request_id"]) == b"ACK"
        assert await freed(abortable) < 1
    finally:
        pair.decode.signal(signal.SIGCONT)


async def test_an_abort_frees_only_what_it_names(abortable: VllmEngine, pair: Pair, aborts: AbortClient) -> None:
    kept, dropped = [await prefill(abortable, chat(words(100, seed))) for seed in (70, 71)]

    async def only_the_kept_is_pinned() -> bool:
        return await abortable.pinned_blocks() == len(kept["remote_block_ids"][0])

    assert await aborts.abort(dropped["remote_request_id"]) == b"ACK"
    await until(only_the_kept_is_pinned, timeout_s=1)
    answer = await post(pair.decode, CHAT, chat(words(100, 70), kv_transfer_params=kept))
    assert text_of(answer) == text_of(await post(pair.prefill, CHAT, chat(words(100, 70))))


async def test_decoders_read_from_it_as_from_any_prefiller(
    abortable: VllmEngine, pair: Pair, aborts: AbortClient
) -> None:
    moved = await pair.decode.metric("vllm:nixl_bytes_transferred_count")
    body = chat(words(120, 80))
    handoff = await prefill(abortable, body)
    disaggregated = await post(pair.decode, CHAT, body | {"kv_transfer_params": handoff})
    assert await freed(abortable) < 1
    assert await pair.decode.metric("vllm:nixl_bytes_transferred_count") == moved + 1
    assert text_of(disaggregated) == text_of(await post(pair.prefill, CHAT, body))
    assert await aborts.abort(handoff["remote_request_id"]) == b"UNKNOWN"  # read, so free already


async def test_a_running_request_is_left_alone(abortable: VllmEngine, aborts: AbortClient) -> None:
    body = chat(words(50, 90), max_tokens=600) | {"kv_transfer_params": {"do_remote_decode": True}}
    running = asyncio.create_task(post(abortable, CHAT, body, {"X-Request-Id": "running"}))

    async def is_running() -> bool:
        return await abortable.metric("vllm:num_requests_running") == 1

    await until(is_running, timeout_s=5)
    assert await aborts.abort("chatcmpl-running") == b"RUNNING"
    assert not running.done()
    answer = (await running).json()
    assert answer["usage"]["completion_tokens"] == 600
    assert await abortable.pinned_blocks() == len(answer["kv_transfer_params"]["remote_block_ids"][0])
    assert await aborts.abort("chatcmpl-running") == b"ACK"


async def test_junk_frames_hurt_neither_the_listener_nor_the_engine(abortable: VllmEngine, aborts: AbortClient) -> None:
    for frame in (b"\xc1", b"get_meta_msg", msgspec.msgpack.encode((b"get_meta_msg", 0, 0)), b"\x91" * 5000):
        assert (await aborts.send(frame)).startswith(b"ERROR ")
    handoff = await prefill(abortable, chat(words(100, 100)))
    assert await aborts.abort(handoff["remote_request_id"]) == b"ACK"
    assert await freed(abortable) < 1


async def test_twenty_aborts_at_once(abortable: VllmEngine, aborts: AbortClient) -> None:
    expired = await abortable.metric("vllm:nixl_num_kv_expired_reqs_total")
    handoffs = await asyncio.gather(*(prefill(abortable, chat(words(40, 110 + i))) for i in range(20)))
    answers = [await aborts.abort(handoff["remote_request_id"]) for handoff in handoffs]
    assert answers == [b"ACK"] * 20
    assert await freed(abortable) < 1

    async def all_are_counted() -> bool:
        return await abortable.metric("vllm:nixl_num_kv_expired_reqs_total") == expired + 20

    await until(all_are_counted, timeout_s=5)
