"""The simulated engines over NIXL's rules: who pins what, who frees it, and what a decoder makes of what it pulls."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from extproc.sim.config import SimConfig
from extproc.sim.nixl import NixlConnector
from extproc.sim.server import SimEngine

FAST = {"prefill_us_per_token": 1.0, "decode_ms_per_token": 0.2, "handshake_timeout_s": 0.3, "eos_after": 500}
PROMPT = list(range(100, 170))
OTHER = list(range(300, 370))
"""70 tokens each: three blocks of 32."""


class Fleet:
    """Engines and an HTTP client for one test."""

    def __init__(self, stack: AsyncExitStack, client: httpx.AsyncClient) -> None:
        self._stack = stack
        self.client = client

    async def engine(self, **options: Any) -> SimEngine:
        return await self._stack.enter_async_context(SimEngine(SimConfig(**{**FAST, **options})))

    async def pair(self, **decoder: Any) -> tuple[SimEngine, SimEngine]:
        return await self.engine(role="prefill"), await self.engine(role="decode", **decoder)

    async def met(self, **decoder: Any) -> tuple[SimEngine, SimEngine]:
        """A pair that has shaken hands."""
        prefiller, decoder_engine = await self.pair(**decoder)
        params = await self.prefill(prefiller, [1, 2, 3])
        await self.text(decoder_engine, [1, 2, 3], kv_transfer_params=params)
        return prefiller, decoder_engine

    async def complete(self, engine: SimEngine, prompt: Any = PROMPT, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return await self.client.post(f"{engine.url}/v1/completions", json=body)

    async def prefill(self, engine: SimEngine, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
        fields = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **fields}
        response = await self.complete(engine, prompt, **fields)
        assert response.status_code == 200, response.text
        params: dict[str, Any] = response.json()["kv_transfer_params"]
        return params

    async def text(self, engine: SimEngine, prompt: Any = PROMPT, **fields: Any) -> str:
        response = await self.complete(engine, prompt, **fields)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack, httpx.AsyncClient(trust_env=False, verify=False, timeout=60) as client:
        yield Fleet(stack, client)


# -- the hand-over ---------------------------------------------------------------------------------------------------


async def test_a_prefill_pins_its_blocks_and_says_where_they_are(fleet: Fleet) -> None:
    prefiller = await fleet.engine(tp=2, side_channel_host="127.0.0.2")
    response = await fleet.client.post(
        f"{prefiller.url}/v1/completions",
        headers={"X-Request-Id": "abc"},
        json={"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    )
    (internal_id,) = prefiller.pinned
    assert response.json()["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": prefiller.connector.engine_id,
        "remote_request_id": internal_id,
        "remote_host": "127.0.0.2",
        "remote_port": prefiller.side_channel_port,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 70,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }
    assert internal_id.startswith("cmpl-abc-0-")
    assert len(internal_id) == len("cmpl-abc-0-") + 8
    assert prefiller.metrics.value("vllm:kv_cache_usage_perc") == pytest.approx(3 / 1023)


async def test_a_decode_equals_a_plain_run_and_frees_the_prefiller(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    plain = await fleet.text(await fleet.engine())
    params = await fleet.prefill(prefiller)
    assert await fleet.text(decoder, kv_transfer_params=params) == plain
    assert prefiller.pinned == []
    assert prefiller.state()["blocks"]["used"] == 0
    assert decoder.requests[-1].pulled
    assert decoder.metrics.value("vllm:nixl_bytes_transferred_count") == 1
    assert decoder.metrics.value("vllm:nixl_bytes_transferred_sum") == 3 * 64
    assert decoder.metrics.value("vllm:nixl_num_failed_transfers_total") == 0


async def test_params_of_another_prompt_continue_that_prompt(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller, OTHER)
    text = await fleet.text(decoder, PROMPT, kv_transfer_params=params)
    assert text == await fleet.text(prefiller, OTHER)
    assert text != await fleet.text(prefiller, PROMPT)


async def test_other_weights_make_other_text_of_the_same_blocks(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.engine(seed=1), await fleet.engine(seed=2)
    params = await fleet.prefill(prefiller)
    text = await fleet.text(decoder, kv_transfer_params=params)
    assert text not in (await fleet.text(prefiller), await fleet.text(await fleet.engine(seed=2)))


async def test_a_decoder_pulls_only_what_its_prefix_cache_lacks(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    plain = await fleet.text(decoder)
    params = await fleet.prefill(prefiller)
    assert await fleet.text(decoder, kv_transfer_params=params) == plain
    assert decoder.metrics.value("vllm:nixl_bytes_transferred_sum") == 64
    assert prefiller.pinned == []


async def test_a_streamed_prefill_pins_without_telling(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    response = await fleet.complete(prefiller, max_tokens=1, stream=True, kv_transfer_params={"do_remote_decode": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "kv_transfer_params" not in response.text
    assert len(prefiller.pinned) == 1


async def test_of_two_prompts_only_the_first_can_be_fetched(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    params = await fleet.prefill(prefiller, [PROMPT, OTHER])
    assert params["remote_request_id"] == prefiller.pinned[0]
    assert [name.split("-")[-2] for name in prefiller.pinned] == ["0", "1"]


async def test_eos_at_the_first_token_keeps_the_blocks(fleet: Fleet) -> None:
    prefiller = await fleet.engine(eos_after=0)
    response = await fleet.complete(prefiller, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert response.json()["kv_transfer_params"]["remote_request_id"] == prefiller.pinned[0]


async def test_two_prefills_with_one_request_id_are_told_apart(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    first, second = [
        (
            await fleet.client.post(
                f"{prefiller.url}/v1/completions",
                headers={"X-Request-Id": "same"},
                json={"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
            )
        ).json()["kv_transfer_params"]["remote_request_id"]
        for prompt in (PROMPT, OTHER)
    ]
    assert first != second
    assert prefiller.pinned == [first, second]


async def test_pinned_blocks_make_others_wait(fleet: Fleet) -> None:
    prefiller = await fleet.engine(blocks=8, max_model_len=200, lease_s=60)
    decoder = await fleet.engine()
    params = [await fleet.prefill(prefiller, prompt) for prompt in (PROMPT, OTHER)]
    waiting = asyncio.create_task(fleet.complete(prefiller, list(range(500, 570))))
    await prefiller.until(lambda: prefiller.engine.waiting == 1)
    assert prefiller.metrics.value("vllm:num_requests_waiting") == 1
    assert prefiller.metrics.value("vllm:kv_cache_usage_perc") == pytest.approx(6 / 7)
    await fleet.text(decoder, PROMPT, kv_transfer_params=params[0])
    assert (await waiting).status_code == 200
    assert prefiller.pinned == [params[1]["remote_request_id"]]


# -- leases ----------------------------------------------------------------------------------------------------------


async def test_a_lease_ends_by_itself(fleet: Fleet) -> None:
    prefiller = await fleet.engine(lease_s=0.05)
    await fleet.prefill(prefiller)
    await prefiller.until(lambda: not prefiller.pinned)
    assert prefiller.state()["blocks"]["used"] == 0
    assert prefiller.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 1


async def test_late_params_are_right_as_long_as_nobody_took_the_blocks(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.engine(lease_s=0.03), await fleet.engine()
    params = await fleet.prefill(prefiller)
    await prefiller.until(lambda: not prefiller.pinned)
    text = await fleet.text(decoder, kv_transfer_params=params)
    # A prefiller with nothing to do reads its notifications when it has something to do.
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 0
    assert text == await fleet.text(prefiller)
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_late_params_are_silently_wrong_when_the_blocks_were_recycled(fleet: Fleet) -> None:
    prefiller = await fleet.engine(lease_s=0.03, blocks=5, max_model_len=128)
    decoder = await fleet.engine()
    right = await fleet.text(await fleet.engine())
    params = await fleet.prefill(prefiller)
    await prefiller.until(lambda: not prefiller.pinned)
    await fleet.text(prefiller, list(range(500, 620)), max_tokens=1)
    response = await fleet.complete(decoder, kv_transfer_params=params)
    assert response.status_code == 200
    assert response.json()["choices"][0]["text"] != right
    await fleet.text(prefiller, [1])
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_params_serve_once(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    first = await fleet.text(decoder, kv_transfer_params=params)
    another = await fleet.engine()
    assert await fleet.text(another, kv_transfer_params=params) == first
    await fleet.text(prefiller, [1])
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 1


async def test_heartbeats_keep_the_blocks_of_a_queued_decode(fleet: Fleet) -> None:
    prefiller = await fleet.engine(lease_s=3)
    decoder = await fleet.engine(lease_s=3, max_num_seqs=1, decode_ms_per_token=5)
    busy = cut(decoder, {"stream": True, "max_tokens": 5000, "ignore_eos": True}, OTHER)
    await decoder.until(lambda: decoder.engine.running == 1)
    params = await fleet.prefill(prefiller)
    (pin,) = prefiller.engine.pins.values()
    first = pin.expires
    queued = asyncio.create_task(fleet.text(decoder, kv_transfer_params=params))
    # Each heartbeat promises two thirds of a lease from now, so it takes some to get past the first promise.
    await prefiller.until(lambda: pin.expires > first)
    busy.close()
    assert await queued == await fleet.text(prefiller)
    assert prefiller.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 0
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 0


# -- what frees pinned blocks at once --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "nope"}, 404, "The model `nope` does not exist. Valid aliases: tiny."),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
        ({"temperature": -1}, 400, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"),
        (
            {"max_tokens": 100_000},
            400,
            "max_tokens=100000 cannot be greater than max_model_len=8192. Please request fewer output tokens. "
            "(parameter=max_tokens, value=100000)",
        ),
        ({"min_tokens": 9}, 400, "min_tokens must be less than or equal to max_tokens=8, got 9."),
    ],
)
async def test_a_rejected_decode_frees_the_prefiller(
    fleet: Fleet, fields: dict[str, Any], status: int, message: str
) -> None:
    prefiller, decoder = await fleet.met()
    params = await fleet.prefill(prefiller)
    response = await fleet.complete(decoder, kv_transfer_params=params, **fields)
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    await prefiller.until(lambda: not prefiller.pinned)
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 0
    assert decoder.metrics.value("vllm:nixl_bytes_transferred_count") == 1  # of the time they met


@pytest.mark.parametrize("again", ["rejected", "served"])
async def test_a_decoder_that_never_met_the_prefiller_tells_it_at_its_next_request(fleet: Fleet, again: str) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(decoder, model="nope", kv_transfer_params=params)).status_code == 404
    connector = decoder.connector
    assert isinstance(connector, NixlConnector)
    await decoder.until(lambda: connector.handshakes == 1)
    # Nothing makes the decoder step, so its worker does not send what it now could.
    await fleet.client.get(f"{decoder.url}/metrics")
    assert prefiller.pinned == [params["remote_request_id"]]
    if again == "rejected":
        await fleet.complete(decoder, model="nope", kv_transfer_params=params)
    else:
        await fleet.complete(decoder, [1], max_tokens=1)
    await prefiller.until(lambda: not prefiller.pinned)


async def test_a_busy_decoder_tells_a_prefiller_that_it_never_met_at_once(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair(decode_ms_per_token=20)
    busy = cut(decoder, {"max_tokens": 5000, "stream": True, "ignore_eos": True}, OTHER)
    await decoder.until(lambda: decoder.engine.running == 1)
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(decoder, model="nope", kv_transfer_params=params)).status_code == 404
    await prefiller.until(lambda: not prefiller.pinned)
    busy.close()


@pytest.mark.parametrize(
    "fields", [{"max_tokens": "x"}, {"stream_options": {"include_usage": True}}, {"kv_transfer_params": "x"}]
)
async def test_a_body_that_fails_the_schema_frees_nothing(fleet: Fleet, fields: dict[str, Any]) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    response = await fleet.complete(decoder, **{"kv_transfer_params": params, **fields})
    assert response.status_code == 400
    await fleet.text(decoder, kv_transfer_params=await fleet.prefill(prefiller, OTHER))
    assert prefiller.pinned == [params["remote_request_id"]]


async def test_any_decoder_can_free_but_not_the_prefiller_itself(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.met()
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(prefiller, kv_transfer_params=params, model="nope")).status_code == 404
    await prefiller.until(lambda: prefiller.metrics.value("vllm:nixl_num_failed_transfers_total") == 1)
    assert len(prefiller.pinned) == 1
    assert (await fleet.complete(decoder, kv_transfer_params=params, model="nope")).status_code == 404
    await prefiller.until(lambda: not prefiller.pinned)


async def test_an_ordinary_short_decode_frees_too(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(decoder, [1], max_tokens=1, kv_transfer_params=params)).status_code == 200
    assert prefiller.pinned == []


async def test_a_wrong_request_id_leaves_the_blocks_pinned(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    response = await fleet.complete(decoder, kv_transfer_params={**params, "remote_request_id": "another"})
    assert response.status_code == 200
    assert prefiller.pinned == [params["remote_request_id"]]
    assert prefiller.metrics.value("vllm:nixl_num_notifications_after_expiry_total") == 1


# -- clients that hang up --------------------------------------------------------------------------------------------


def cut(engine: SimEngine, fields: dict[str, Any], prompt: list[int] | None = None) -> socket.socket:
    """Send a completion request on a raw connection, which the caller closes when it likes."""
    body = msgspec.json.encode({"prompt": prompt or PROMPT, "max_tokens": 8, "temperature": 0, **fields})
    connection = socket.create_connection((engine.config.host, engine.port))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    connection.sendall(head.encode() + b"\r\n" + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gone_during_the_prefill_leaves_nothing_pinned(fleet: Fleet, stream: bool) -> None:
    prefiller = await fleet.engine(prefill_us_per_token=100_000)
    connection = cut(prefiller, {"max_tokens": 1, "stream": stream, "kv_transfer_params": {"do_remote_decode": True}})
    await prefiller.until(lambda: prefiller.engine.running == 1)
    connection.close()
    await prefiller.until(lambda: prefiller.state()["blocks"]["used"] == 0)
    await prefiller.until(lambda: prefiller.requests[0].outcome == "aborted")
    assert prefiller.pinned == []
    assert prefiller.metrics.value("vllm:num_requests_running") == 0


async def test_a_connection_closed_after_the_answer_changes_nothing(fleet: Fleet) -> None:
    prefiller = await fleet.engine()
    connection = cut(prefiller, {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    await prefiller.until(lambda: len(prefiller.pinned) == 1)
    connection.close()
    await fleet.text(prefiller, OTHER)
    assert len(prefiller.pinned) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_of_a_queued_decode_that_leaves_frees_the_prefiller(fleet: Fleet, stream: bool) -> None:
    prefiller, decoder = await fleet.pair(max_num_seqs=1, decode_ms_per_token=20)
    busy = cut(decoder, {"max_tokens": 400, "stream": True}, OTHER)
    await decoder.until(lambda: decoder.engine.running == 1)
    params = await fleet.prefill(prefiller)
    queued = cut(decoder, {"stream": stream, "kv_transfer_params": params})
    await decoder.until(lambda: decoder.engine.waiting == 1)
    assert len(prefiller.pinned) == 1
    queued.close()
    await prefiller.until(lambda: not prefiller.pinned)
    assert decoder.metrics.value("vllm:nixl_bytes_transferred_count") == 0
    busy.close()
    await decoder.until(lambda: decoder.state()["blocks"]["used"] == 0)


async def test_a_client_of_an_unstreamed_decode_that_leaves_makes_the_decoder_notify_twice(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair(decode_ms_per_token=20)
    params = await fleet.prefill(prefiller)
    await fleet.prefill(prefiller, OTHER)  # keeps the prefiller stepping
    connection = cut(decoder, {"max_tokens": 400, "kv_transfer_params": params})
    await decoder.until(lambda: decoder.engine.running == 1)
    connection.close()
    late = "vllm:nixl_num_notifications_after_expiry_total"
    await prefiller.until(lambda: prefiller.metrics.value(late) == 1)
    await decoder.until(lambda: decoder.state()["blocks"]["used"] == 0)


async def test_a_client_gone_in_mid_stream_frees_the_decoder(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair(decode_ms_per_token=20)
    connection = cut(decoder, {"max_tokens": 400, "stream": True, "kv_transfer_params": await fleet.prefill(prefiller)})
    await decoder.until(lambda: decoder.engine.running == 1)
    assert prefiller.pinned == []
    connection.close()
    await decoder.until(lambda: decoder.state()["blocks"]["used"] == 0)
    assert decoder.requests[0].outcome == "aborted"
    assert decoder.requests[0].pulled


async def test_a_client_that_leaves_during_the_pull_leaves_nothing_behind(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    await kill_listener(prefiller, b"junk")  # so that the pull waits for a handshake
    connection = cut(decoder, {"stream": True, "kv_transfer_params": params})
    await decoder.until(lambda: decoder.engine.waiting == 1)
    assert decoder.state()["blocks"]["used"] == 3
    connection.close()
    await decoder.until(lambda: decoder.state()["blocks"]["used"] == 0)
    assert decoder.requests[0].outcome == "aborted"
    assert decoder.state()["alive"]


# -- failed loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False], ids=["known engine", "never met"])
async def test_a_dead_prefiller_is_a_500_by_default(fleet: Fleet, known: bool) -> None:
    prefiller, decoder = await fleet.pair()
    if known:
        await fleet.text(decoder, OTHER, kv_transfer_params=await fleet.prefill(prefiller, OTHER))
    params = await fleet.prefill(prefiller)
    await prefiller.kill()
    response = await fleet.complete(decoder, kv_transfer_params=params)
    assert response.status_code == 500
    assert response.json() == {
        "error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}
    }
    assert (await fleet.client.get(f"{decoder.url}/health")).status_code == 200
    assert decoder.state()["blocks"]["used"] == 0
    streamed = await fleet.complete(decoder, kv_transfer_params=params, stream=True)
    assert streamed.status_code == 200
    assert streamed.text == (
        'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, '
        '"code": 500}}\n\ndata: [DONE]\n\n'
    )


async def test_a_decoder_can_be_told_to_prefill_by_itself(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair(load_failure_policy="recompute")
    params = await fleet.prefill(prefiller)
    await prefiller.kill()
    assert await fleet.text(decoder, kv_transfer_params=params) == await fleet.text(await fleet.engine())
    assert not decoder.requests[0].pulled
    assert decoder.metrics.value("vllm:nixl_num_failed_transfers_total") == 1


async def test_an_engine_of_another_name_on_the_same_port_is_not_trusted(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    response = await fleet.complete(decoder, kv_transfer_params={**params, "remote_engine_id": "another"})
    assert response.status_code == 500
    assert len(prefiller.pinned) == 1


# -- what kills an engine --------------------------------------------------------------------------------------------


async def gone(fleet: Fleet, engine: SimEngine) -> bool:
    """The engine's server has gone, as vLLM's does after its core: unhealthy first, then refusing connections."""
    async with asyncio.timeout(30):
        while True:
            try:
                assert (await fleet.client.get(f"{engine.url}/health")).status_code == 503
            except httpx.ConnectError:
                return engine.died.is_set()
            except httpx.TransportError:
                continue  # the connection was taken by a server that was about to go


async def test_remote_prefill_without_blocks_kills_the_decoder(fleet: Fleet) -> None:
    decoder = await fleet.engine()
    response = await fleet.complete(decoder, kv_transfer_params={"do_remote_prefill": True})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == (
        "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )
    assert await gone(fleet, decoder)
    assert decoder.state()["alive"] is False


async def test_a_missing_request_id_hangs_and_kills_when_the_client_leaves(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    del params["remote_request_id"]
    connection = cut(decoder, {"kv_transfer_params": params})
    await decoder.until(lambda: decoder.engine.waiting == 1)
    assert (await fleet.client.get(f"{decoder.url}/health")).status_code == 200
    connection.close()
    await decoder.until(decoder.died.is_set)
    assert await gone(fleet, decoder)
    assert decoder.engine.death == "KeyError: 'remote_request_id'"


async def test_a_streamed_request_without_the_id_only_leaks(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    del params["remote_request_id"]
    connection = cut(decoder, {"stream": True, "kv_transfer_params": params})
    await decoder.until(lambda: decoder.engine.waiting == 1)
    connection.close()
    await decoder.until(lambda: decoder.engine.waiting == 0)
    assert decoder.state()["alive"]
    assert decoder.state()["blocks"]["used"] == 3


@pytest.mark.parametrize("key", ["remote_request_id", "remote_block_ids", "remote_engine_id", "remote_host"])
async def test_a_rejection_with_incomplete_params_kills_the_decoder(fleet: Fleet, key: str) -> None:
    prefiller, decoder = await fleet.pair()
    params = await fleet.prefill(prefiller)
    del params[key]
    assert (await fleet.complete(decoder, model="nope", kv_transfer_params=params)).status_code == 404
    assert await gone(fleet, decoder)
    assert decoder.engine.death == f"KeyError: {key!r}"


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [(list(range(200)), {}), (PROMPT, {"remote_block_ids": [1, 2, 3]})],
    ids=["more blocks than offered", "flat block ids"],
)
async def test_params_that_do_not_fit_the_prompt_kill_the_decoder(
    fleet: Fleet, prompt: list[int], changes: dict[str, Any]
) -> None:
    prefiller, decoder = await fleet.pair()
    params = {**await fleet.prefill(prefiller), **changes}
    assert (await fleet.complete(decoder, prompt, kv_transfer_params=params)).status_code == 500
    assert await gone(fleet, decoder)


async def test_blocks_that_do_not_exist_are_a_failed_load(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    params = {**await fleet.prefill(prefiller), "remote_block_ids": [[9999, 9999, 9999]]}
    assert (await fleet.complete(decoder, kv_transfer_params=params)).status_code == 500
    assert decoder.state()["alive"]


async def test_the_death_of_an_engine_ends_all_its_requests(fleet: Fleet) -> None:
    decoder = await fleet.engine(decode_ms_per_token=20)
    others = [asyncio.create_task(fleet.complete(decoder, max_tokens=400, stream=stream)) for stream in (False, True)]
    await decoder.until(lambda: decoder.engine.running == 2)
    await fleet.complete(decoder, kv_transfer_params={"do_remote_prefill": True})
    plain, streamed = [await task for task in others]
    assert plain.status_code == 500
    assert streamed.status_code == 200
    assert streamed.text.endswith('"type": "InternalServerError", "param": null, "code": 500}}\n\ndata: [DONE]\n\n')


# -- the side channel ------------------------------------------------------------------------------------------------

GET_META = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))


async def ask(engine: SimEngine, *frames: bytes, kind: int = zmq.REQ, timeout_ms: int = 1000) -> list[bytes] | None:
    """One exchange with an engine's side channel; None when nothing comes back."""
    with zmq.asyncio.Context() as context, context.socket(kind) as channel:
        channel.linger = 0
        channel.connect(f"tcp://127.0.0.1:{engine.side_channel_port}")
        await channel.send_multipart(list(frames))
        if not await channel.poll(timeout_ms):
            return None
        return list(await channel.recv_multipart())


async def kill_listener(engine: SimEngine, *frames: bytes, kind: int = zmq.REQ) -> None:
    """Send what the listener does not survive, and see it go without a reply."""
    with zmq.asyncio.Context() as context, context.socket(kind) as channel:
        channel.linger = 0
        channel.connect(f"tcp://127.0.0.1:{engine.side_channel_port}")
        await channel.send_multipart(list(frames))
        await engine.until(lambda: not engine.connector.listener_alive)
        assert not await channel.poll(0)


async def test_a_handshake_gives_a_hash_metadata_and_a_clock(fleet: Fleet) -> None:
    engine = await fleet.engine()
    assert GET_META.hex() == "93c40c6765745f6d6574615f6d73670000"
    for kind, frames in ((zmq.REQ, [GET_META]), (zmq.DEALER, [b"", GET_META])):
        reply = await ask(engine, *frames, kind=kind)
        assert reply is not None
        payload, clock = reply[-2:]
        offered = msgspec.msgpack.decode(payload)
        assert len(offered["compatibility_hash"]) == 64
        metadata = msgspec.msgpack.decode(offered["agent_metadata_bytes"])
        assert (metadata["engine_id"], metadata["num_blocks"], metadata["block_size"]) == (
            engine.connector.engine_id,
            1024,
            32,
        )
        assert isinstance(msgspec.msgpack.decode(clock), float)
    assert engine.connector.listener_alive


async def test_an_unknown_word_is_answered_all_the_same(fleet: Fleet) -> None:
    engine = await fleet.engine()
    assert await ask(engine, msgspec.msgpack.encode((b"hello", 0, 0))) is not None
    assert engine.connector.listener_alive


@pytest.mark.parametrize(
    ("kind", "frames"),
    [
        (zmq.REQ, [msgspec.msgpack.encode((b"abort_request_msg", "chatcmpl-abc"))]),
        (zmq.REQ, [msgspec.msgpack.encode((b"done_recving_msg", "chatcmpl-abc", None))]),
        (zmq.REQ, [msgspec.msgpack.encode((b"get_meta_msg", 0))]),
        (zmq.REQ, [msgspec.msgpack.encode((b"get_meta_msg", 0, 7))]),
        (zmq.REQ, [b"get_meta_msg"]),
        (zmq.REQ, [b"\xc1"]),
        (zmq.DEALER, [GET_META]),
    ],
    ids=["abort", "done", "two-tuple", "bad rank", "raw", "no msgpack", "dealer without delimiter"],
)
async def test_a_foreign_frame_kills_the_listener_and_nothing_else(
    fleet: Fleet, kind: int, frames: list[bytes]
) -> None:
    prefiller, decoder = await fleet.pair()
    await kill_listener(prefiller, *frames, kind=kind)
    assert await ask(prefiller, GET_META, timeout_ms=50) is None
    # It goes on serving, and nobody new can fetch what it pins.
    params = await fleet.prefill(prefiller)
    assert (await fleet.complete(decoder, kv_transfer_params=params)).status_code == 500
    assert len(prefiller.pinned) == 1


async def test_a_decoder_that_knows_the_engine_needs_no_listener(fleet: Fleet) -> None:
    prefiller, decoder = await fleet.pair()
    await fleet.text(decoder, OTHER, kv_transfer_params=await fleet.prefill(prefiller, OTHER))
    await kill_listener(prefiller, b"junk")
    assert (await fleet.complete(decoder, kv_transfer_params=await fleet.prefill(prefiller))).status_code == 200
    assert prefiller.pinned == []
