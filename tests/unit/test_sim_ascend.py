"""The simulated engines over vLLM Ascend's Mooncake rules: ranks report, listeners ACK, assertions kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine

FAST = {
    "connector": "mooncake-ascend",
    "prefill_us_per_token": 1.0,
    "decode_ms_per_token": 0.2,
    "handshake_timeout_s": 0.3,
    "eos_after": 500,
}
PROMPT = list(range(100, 170))
OTHER = list(range(300, 370))
GET_META = (b"get_meta_msg", "")


def done(request_id: str, ports: dict[int, Any] | None = None) -> tuple[Any, ...]:
    return (b"done_recving_msg", request_id, ports)


def abort(request_id: str) -> tuple[Any, ...]:
    return (b"abort_request_msg", request_id)


class Fleet:
    def __init__(self, stack: AsyncExitStack, client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        self._stack = stack
        self.client = client
        self._context = context

    async def engine(self, **options: Any) -> SimEngine:
        return await self._stack.enter_async_context(SimEngine(SimConfig(**{**FAST, **options})))

    async def complete(self, engine: SimEngine, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return await self.client.post(f"{engine.url}/v1/completions", json=body)

    async def prefill(self, engine: SimEngine, prompt: Any = PROMPT) -> dict[str, Any]:
        response = await self.complete(engine, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        params: dict[str, Any] = response.json()["kv_transfer_params"]
        return params

    async def text(self, engine: SimEngine, prompt: Any = PROMPT, **fields: Any) -> str:
        response = await self.complete(engine, prompt, **fields)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def tell(
        self, engine: SimEngine, message: Any, *, rank: int = 0, answered: bool = True, kind: int = zmq.REQ
    ) -> bytes | None:
        """Send one message to a rank's listener. With ``answered=False``, wait until it was read and see no reply."""
        with self._context.socket(kind) as channel:
            channel.linger = 0
            channel.connect(f"tcp://127.0.0.1:{engine.side_channel_port + rank}")
            read = engine.connector.listener_messages
            await channel.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
            if answered:
                async with asyncio.timeout(30):
                    return (await channel.recv_multipart())[-1]
            await engine.until(lambda: engine.connector.listener_messages > read)
            # Whatever it has to say, it says before it reads on.
            probe = await self.tell(engine, GET_META, rank=rank)
            assert probe is not None
            assert not await channel.poll(0)
            return None


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
        with zmq.asyncio.Context() as context:
            yield Fleet(stack, client, context)


# -- the hand-over


async def test_params_of_v1_name_every_rank(fleet: Fleet) -> None:
    prefiller = await fleet.engine(tp=2)
    params = await fleet.prefill(prefiller)
    port = prefiller.side_channel_port
    last = params.pop("last_token_id")
    assert isinstance(last, int)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "0",
        "remote_request_id": prefiller.pinned[0],
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_ptp_size": 2,
        "remote_multi_nodes_meta_mapping": {
            "0": {"host": "127.0.0.1", "engine_id": "0", "handshake_port": port},
            "1": {"host": "127.0.0.1", "engine_id": "0", "handshake_port": port + 1},
        },
        "num_prompt_blocks": 3,
        "remote_block_size": 32,
    }


async def test_params_of_the_hybrid_connector_say_less(fleet: Fleet) -> None:
    prefiller = await fleet.engine(tp=2, ascend_variant="hybrid")
    params = await fleet.prefill(prefiller)
    assert not {"remote_pcp_size", "remote_dcp_size", "remote_block_size"} & set(params)
    assert params["remote_multi_nodes_meta_mapping"] == {
        "0": {"host": "127.0.0.1", "engine_id": "0"},
        "1": {"host": "127.0.0.1", "engine_id": "0"},
    }
    assert await fleet.text(await fleet.engine(), kv_transfer_params=params) == await fleet.text(prefiller)
    assert prefiller.pinned == []


async def test_a_decode_equals_a_plain_run_and_tells_every_rank(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.engine(tp=4), await fleet.engine()
    params = await fleet.prefill(prefiller)
    assert await fleet.text(decoder, kv_transfer_params=params) == await fleet.text(await fleet.engine())
    assert prefiller.pinned == []
    assert prefiller.connector.listener_messages == 5  # one GET_META, four DONE_RECVING
    assert decoder.requests[-1].pulled


async def test_first_pulls_at_once_share_one_path_to_the_prefiller(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.engine(role="prefill"), await fleet.engine(role="decode")
    params = await fleet.prefill(prefiller)
    agents = await asyncio.gather(*(decoder.connector._agent(params) for _ in range(8)))
    assert len({id(agent) for agent in agents}) == 1


async def test_eos_at_the_first_token_drops_the_kv(fleet: Fleet) -> None:
    prefiller = await fleet.engine(eos_after=0)
    assert await fleet.prefill(prefiller) is None
    assert prefiller.state()["blocks"]["used"] == 0


async def test_min_tokens_masks_eos(fleet: Fleet) -> None:
    prefiller = await fleet.engine(eos_after=0)
    response = await fleet.complete(
        prefiller, max_tokens=1, min_tokens=1, kv_transfer_params={"do_remote_decode": True}
    )
    assert response.json()["kv_transfer_params"]["remote_request_id"] == prefiller.pinned[0]


async def test_the_long_timer_frees_in_the_end(fleet: Fleet) -> None:
    prefiller = await fleet.engine(lease_s=0.05)
    params = await fleet.prefill(prefiller)
    await prefiller.until(lambda: not prefiller.pinned)
    assert prefiller.state()["blocks"]["used"] == 0
    # Nobody tracks the id any more, so a late release is harmless.
    assert await fleet.tell(prefiller, done(params["remote_request_id"])) == b"ACK"
    assert prefiller.state()["alive"]


async def test_a_dead_prefiller_is_a_500_or_a_prefill_here(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    failing, recomputing = await fleet.engine(), await fleet.engine(load_failure_policy="recompute")
    params = await fleet.prefill(prefiller)
    right = await fleet.text(prefiller)
    await prefiller.kill()
    assert (await fleet.complete(failing, kv_transfer_params=params)).status_code == 500
    assert await fleet.text(recomputing, kv_transfer_params=params) == right


# -- the listeners


def test_messages_have_the_documented_bytes() -> None:
    encode = msgspec.msgpack.encode
    assert encode(GET_META).hex() == "92c40c6765745f6d6574615f6d7367a0"
    assert encode(done("chatcmpl-abc-0123abcd")).hex() == (
        "93c410646f6e655f72656376696e675f6d7367b563686174636d706c2d6162632d3031323361626364c0"
    )
    assert encode(abort("chatcmpl-abc-0123abcd")).hex() == (
        "92c41161626f72745f726571756573745f6d7367b563686174636d706c2d6162632d3031323361626364"
    )


async def test_get_meta_tells_who_listens(fleet: Fleet) -> None:
    engine = await fleet.engine(tp=2)
    reply = await fleet.tell(engine, GET_META, rank=1)
    assert reply is not None
    metadata = msgspec.msgpack.decode(reply)
    assert metadata["engine_id"] == "0"
    assert metadata["handshake_port"] == engine.side_channel_port + 1
    assert metadata["te_rpc_port"] not in (engine.side_channel_port, engine.side_channel_port + 1)


async def test_a_release_needs_all_ranks(fleet: Fleet) -> None:
    prefiller = await fleet.engine(tp=2)
    params = await fleet.prefill(prefiller)
    assert await fleet.tell(prefiller, done(params["remote_request_id"]), rank=0) == b"ACK"
    assert await fleet.tell(prefiller, done(params["remote_request_id"]), rank=0) == b"ACK"
    assert len(prefiller.pinned) == 1
    assert await fleet.tell(prefiller, done(params["remote_request_id"]), rank=1) == b"ACK"
    assert prefiller.pinned == []
    assert prefiller.state()["blocks"]["used"] == 0


async def test_a_release_is_idempotent_and_unknown_ids_are_acked(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    params = await fleet.prefill(prefiller)
    for name in ("unknown", params["remote_request_id"], params["remote_request_id"]):
        assert await fleet.tell(prefiller, done(name)) == b"ACK"
    assert prefiller.pinned == []
    assert prefiller.state()["alive"]


async def test_done_with_a_map_counts_to_its_own_ports_number(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    name = (await fleet.prefill(prefiller))["remote_request_id"]
    ports = {prefiller.side_channel_port: {"num": 2, "host": "127.0.0.1"}}
    assert await fleet.tell(prefiller, done(name, ports)) == b"ACK"
    assert len(prefiller.pinned) == 1
    assert await fleet.tell(prefiller, done(name, ports)) == b"ACK"
    assert prefiller.pinned == []


@pytest.mark.parametrize(
    "message",
    [
        (b"done_recving_msg", "chatcmpl-abc"),
        abort("chatcmpl-abc"),
        (b"hello",),
        (),
        b"\xc1",
        ("done_recving_msg", "text is not bytes", None),
    ],
    ids=["done of v0.11", "abort on stock", "unknown", "empty", "no msgpack", "str"],
)
async def test_what_the_listener_does_not_know_gets_no_reply_and_kills_nothing(fleet: Fleet, message: Any) -> None:
    engine = await fleet.engine()
    await fleet.tell(engine, message, answered=False)
    assert await fleet.tell(engine, GET_META) is not None
    assert engine.state()["alive"]


async def test_empty_frames_are_ignored_so_any_socket_works(fleet: Fleet) -> None:
    engine = await fleet.engine()
    assert await fleet.tell(engine, done("unknown"), kind=zmq.DEALER) == b"ACK"


async def test_abort_frees_where_the_listener_knows_it(fleet: Fleet) -> None:
    prefiller = await fleet.engine(ascend_abort=True, tp=2)
    name = (await fleet.prefill(prefiller))["remote_request_id"]
    for rank in (0, 1):
        assert await fleet.tell(prefiller, abort(name), rank=rank) == b"ACK"
    assert prefiller.pinned == []
    # The id without the engine's suffix, which a router might send, frees nothing.
    name = (await fleet.prefill(prefiller, OTHER))["remote_request_id"]
    assert await fleet.tell(prefiller, abort(name[:-9])) == b"ACK"
    assert prefiller.pinned == [name]


# -- what a decoder tells


@pytest.mark.parametrize("notifies", [False, True])
async def test_a_rejected_decode_frees_only_on_engines_that_notify(fleet: Fleet, notifies: bool) -> None:
    prefiller, decoder = await fleet.engine(), await fleet.engine(ascend_reject_notify=notifies)
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(decoder, model="nope", kv_transfer_params=params)).status_code == 404
    if notifies:
        await prefiller.until(lambda: not prefiller.pinned)
    else:
        await fleet.text(decoder, OTHER, kv_transfer_params=await fleet.prefill(prefiller, OTHER))
        assert prefiller.pinned == [params["remote_request_id"]]


@pytest.mark.parametrize("notifies", [False, True])
async def test_a_queued_decode_whose_client_leaves_frees_only_on_engines_that_notify(
    fleet: Fleet, notifies: bool
) -> None:
    prefiller = await fleet.engine()
    decoder = await fleet.engine(ascend_reject_notify=notifies, max_num_seqs=1, decode_ms_per_token=20)
    busy = asyncio.create_task(fleet.complete(decoder, OTHER, max_tokens=400))
    await decoder.until(lambda: decoder.engine.running == 1)
    params = await fleet.prefill(prefiller)
    queued = asyncio.create_task(fleet.complete(decoder, kv_transfer_params=params))
    await decoder.until(lambda: decoder.engine.waiting == 1)
    queued.cancel()
    await decoder.until(lambda: decoder.engine.waiting == 0)
    if notifies:
        await prefiller.until(lambda: not prefiller.pinned)
    else:
        assert prefiller.pinned == [params["remote_request_id"]]
    busy.cancel()


async def test_the_ports_can_be_given(fleet: Fleet) -> None:
    first = await fleet.engine(tp=2)
    port = first.side_channel_port
    await first.stop()
    second = await fleet.engine(tp=2, side_channel_port=port)
    assert second.side_channel_port == port
    assert await fleet.tell(second, GET_META, rank=1) is not None
    with pytest.raises(OSError, match="side channel port"):
        await fleet.engine(tp=2, side_channel_port=port + 1)


# -- what kills an engine


async def test_releasing_a_running_request_is_fatal(fleet: Fleet) -> None:
    prefiller = await fleet.engine(prefill_us_per_token=50_000)
    running = asyncio.create_task(
        fleet.complete(prefiller, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    )
    await prefiller.until(lambda: prefiller.engine.running == 1)
    (name,) = prefiller.engine.requests
    await fleet.tell(prefiller, done(name))
    await prefiller.until(prefiller.died.is_set)
    assert prefiller.engine.death == f"AssertionError: is_finished(), for {name}"
    assert (await running).status_code == 500


async def test_releasing_an_aborted_prefill_is_fatal(fleet: Fleet) -> None:
    prefiller = await fleet.engine(prefill_us_per_token=50_000)
    running = asyncio.create_task(
        fleet.complete(prefiller, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    )
    await prefiller.until(lambda: prefiller.engine.running == 1)
    (name,) = prefiller.engine.requests
    running.cancel()
    await prefiller.until(lambda: not prefiller.engine.requests)
    assert prefiller.state()["blocks"]["used"] == 0
    await fleet.tell(prefiller, done(name))
    await prefiller.until(prefiller.died.is_set)
    assert prefiller.engine.death == f"AssertionError: req_id in self.requests, for {name}"


async def test_remote_prefill_without_blocks_kills_the_decoder(fleet: Fleet) -> None:
    decoder = await fleet.engine()
    assert (await fleet.complete(decoder, kv_transfer_params={"do_remote_prefill": True})).status_code == 500
    await decoder.until(decoder.died.is_set)
