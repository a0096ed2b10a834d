"""Cases from public bug reports, by their id: the prefill leg, its failures and what it leaves, in both body modes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from extproc.release import RESULTS
from tests.grpc.stand import JSON, Stand, handed_over, refused, through
from tests.support.engines import (
    BROKEN_JSON,
    Answer,
    CloseConnection,
    RecordedRequest,
    Respond,
    answer_prefill,
    prefill_params,
)
from tests.support.gateway import CHAT, CHAT_BODY, COMPLETIONS, until, within
from tests.support.scripted_envoy import Exchange, Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

KEY = "configured-key"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def falling_back_stand() -> AsyncIterator[Stand]:
    """Decoders prefill where no prefiller can; engines have a key."""
    settings: dict[str, Any] = {
        "fleet": {"api_key": KEY},
        "prefill": {"on_failure": "decode"},
    }
    async with Stand.standing(settings) as stand:
        yield stand


@pytest_asyncio.fixture(loop_scope="session")
async def falling_back(falling_back_stand: Stand) -> AsyncIterator[Stand]:
    await falling_back_stand.reset()
    yield falling_back_stand
    await falling_back_stand.settled()


# ---- failing prefillers ----


def _text(body: bytes, content_type: str = "application/json") -> Respond:
    return lambda _: Answer(headers=[("content-type", content_type)], body=body)


def _closes(_: RecordedRequest) -> Answer:
    raise CloseConnection


def _lacks(key: str) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        params = prefill_params(request.header("x-request-id") or "")
        return Answer.json({"kv_transfer_params": {name: params[name] for name in params if name != key}})

    return respond


UNUSABLE: dict[str, Respond | None] = {
    "connection refused": None,
    "503": lambda _: Answer.json({"error": "busy"}, status=503),
    "closed": _closes,
    "null": _text(b'{"kv_transfer_params": null}'),
    "absent": _text(b'{"choices": []}'),
    "list": _text(b'{"kv_transfer_params": []}'),
    "broken json": lambda _: BROKEN_JSON,
    "event stream": lambda _: Answer.stream({"kv_transfer_params": {"a": 1}}),
    "no blocks": _lacks("remote_block_ids"),
    "no id": _lacks("remote_request_id"),
}


async def set_up(stand: Stand, kind: str) -> None:
    for engine in stand.prefillers:
        if (respond := UNUSABLE[kind]) is None:
            await engine.refuse()
        else:
            engine.respond = respond


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_B31_the_decoder_prefills_where_no_prefiller_can(falling_back: Stand, mode: Mode, kind: str) -> None:
    await set_up(falling_back, kind)
    async with falling_back.envoy(mode) as envoy:
        exchange = await within(3, through(envoy))
    assert exchange.upstream.body == CHAT_BODY
    assert "extproc" not in exchange.dynamic_metadata  # nothing that a ticket could free


@pytest.mark.parametrize("kind", UNUSABLE)
async def test_B31_or_the_client_is_told(stand: Stand, envoy: ScriptedEnvoy, kind: str) -> None:
    await set_up(stand, kind)
    answer = await within(3, refused(envoy, 503, "prefill_unavailable"))
    assert answer.header("retry-after") == "1"


async def test_B31_prefillers_that_hang_are_left_for_the_fallback(mode: Mode) -> None:
    settings = {"prefill": {"timeout_s": 0.15, "on_failure": "decode", "fallback": {"max_body_bytes": 2000}}}
    async with Stand.standing(settings, prefill=2, decode=1) as stand, stand.envoy(mode) as envoy:
        for engine in stand.prefillers:
            engine.hang = True
        exchange = await within(5, through(envoy))
        assert exchange.upstream.body == CHAT_BODY
        large = b'{"prompt":"%b"}' % (b"x" * 2000)  # beyond the fallback's bound
        await within(5, refused(envoy, 504, "prefill_timeout", large, COMPLETIONS))
        await stand.settled()


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
@pytest.mark.parametrize("streaming", [False, True])
async def test_B32_O7_a_prefillers_4xx_is_the_clients_answer(
    falling_back: Stand, mode: Mode, status: int, streaming: bool
) -> None:
    body = b'{"error":{"message":"maximum context length is 10 tokens \xe2\x98\x83","code":%d}}' % status
    headers = [
        ("content-type", "application/json; charset=utf-8"),
        ("retry-after", "3"),
        ("www-authenticate", "Bearer"),
        ("connection", "close"),
        ("x-request-id", "engine's"),
    ]
    for engine in falling_back.prefillers:
        engine.respond = lambda _: Answer(status, headers, body)
    request = CHAT_BODY.replace(b"}]", b'}], "stream": true') if streaming else CHAT_BODY
    async with falling_back.envoy(mode) as envoy:
        exchange = await through(envoy, request, headers=[*JSON, ("x-request-id", "client's")])
    answer = exchange.immediate
    assert answer is not None
    assert (answer.status, answer.body) == (status, body)
    assert sorted(answer.headers) == [
        ("content-length", str(len(body))),
        ("content-type", "application/json; charset=utf-8"),
        ("retry-after", "3"),
        ("www-authenticate", "Bearer"),
        ("x-request-id", "client's"),
    ]
    assert len(falling_back.prefills) == 1  # neither tried elsewhere nor hidden by the fallback


async def test_O22_a_prefill_that_was_tried_again_leaves_no_load(stand: Stand, envoy: ScriptedEnvoy) -> None:
    seen: list[str | None] = []

    def first_fails(request: RecordedRequest) -> Answer:
        seen.append(request.header("x-request-id"))
        return Answer(500) if len(seen) % 2 else answer_prefill(request)

    for engine in stand.prefillers:
        engine.respond = first_fails
    for _ in range(6):
        exchange = await through(envoy)
        ours = exchange.upstream.header("x-request-id")
        assert ours == seen[-1] != seen[-2]
        assert exchange.upstream.json()["kv_transfer_params"] == prefill_params(ours or "")
    assert stand.server is not None
    engines = stand.server.service.fleet.engines()
    await until(lambda: [(engine.inflight, engine.reserved_tokens) for engine in engines] == [(0, 0)] * 4)


async def test_O25_a_prompt_shorter_than_a_block_takes_either_path(mode: Mode, stand: Stand) -> None:
    body = b'{"model":"m","prompt":"a"}'
    async with stand.envoy(mode) as envoy:
        exchange = await through(envoy, body, COMPLETIONS)
        assert exchange.upstream.json()["kv_transfer_params"]["do_remote_prefill"] is True
    settings = {"routing": {"min_prompt_bytes": 100}}
    async with Stand.standing(settings, prefill=1, decode=1) as other, other.envoy(mode) as envoy:
        assert (await through(envoy, body, COMPLETIONS)).upstream.body == body
        assert other.prefills == []


# ---- ids and cancels ----


async def cancelled(envoy: ScriptedEnvoy, at: Callable[[], Awaitable[Any]], **options: Any) -> None:
    """A client that leaves at that moment, in the prefill or before."""
    task = asyncio.create_task(envoy.request("POST", CHAT, options.pop("headers", JSON), CHAT_BODY, **options))
    await at()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        exchange = await task
        await exchange.reset()


def _pause(seconds: float) -> Callable[[], Awaitable[None]]:
    return lambda: asyncio.sleep(seconds)


async def test_B34_an_id_used_again_at_once_is_another_request(stand: Stand, envoy: ScriptedEnvoy) -> None:
    """The cancelled attempt and the next one share the client's id; the engines never see it."""
    headers = [*JSON, ("x-request-id", "a")]
    exchanges: list[Exchange] = []
    for round_ in range(200):
        count = len(stand.prefills)
        if round_ % 2:
            for engine in stand.prefillers:
                engine.respond = _after(0.05)
        await cancelled(envoy, _pause(0.002 * (round_ % 20)), headers=headers)
        for engine in stand.prefillers:
            engine.respond = answer_prefill
        exchanges.append(await through(envoy, headers=headers))
        assert len(stand.prefills) > count
    ids = [exchange.upstream.header("x-request-id") for exchange in exchanges]
    assert len(set(ids)) == len(ids)
    by_prefill = Counter(request.header("x-request-id") for request in stand.prefills)
    assert set(by_prefill.values()) == {1}
    assert all(uuid.UUID(str(request_id)).version == 4 for request_id in by_prefill)
    await stand.settled()
    # Nothing of a request that was answered is ever released.
    released = {request.json()["kv_transfer_params"]["remote_request_id"] for request in stand.releases}
    assert not released & {f"chatcmpl-{request_id}-0a1b2c3d" for request_id in ids}


def _after(seconds: float) -> Respond:
    def respond(request: RecordedRequest) -> Answer:
        answer = answer_prefill(request)
        answer.delay_s = seconds
        return answer

    return respond


async def test_B34_a_cancel_before_the_call_is_written_releases_nothing(stand: Stand, envoy: ScriptedEnvoy) -> None:
    exchange = envoy.open("POST", CHAT, JSON)
    sending = asyncio.create_task(exchange.run([CHAT_BODY]))
    await exchange.stream.arrived(1 if envoy.mode == "BUFFERED" else 0)
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    await exchange.reset()
    await stand.settled()
    assert len(stand.prefills) <= 1
    assert len(stand.releases) <= len(stand.prefills)


async def test_B34_a_cancel_after_the_answer_releases_once(stand: Stand, envoy: ScriptedEnvoy) -> None:
    """The blocks are pinned by then, and no decoder will fetch them."""
    exchange = await envoy.request("POST", CHAT, JSON, CHAT_BODY)
    params = exchange.upstream.json()["kv_transfer_params"]
    await exchange.reset()
    assert stand.server is not None
    accounts = stand.server.releases.accounts
    before = accounts.requested
    await until(lambda: accounts.requested == before + 1 and not accounts.pending)
    released = {request.json()["kv_transfer_params"]["remote_request_id"] for request in stand.releases}
    assert released == {params["remote_request_id"]}
    await stand.settled()
    assert accounts.requested == before + 1


async def test_B34_a_cancel_in_the_prefill_closes_the_call(stand: Stand, envoy: ScriptedEnvoy) -> None:
    for engine in stand.prefillers:
        engine.hang = True

    async def in_the_prefill() -> None:
        await until(lambda: len(stand.prefills) == 1)

    await cancelled(envoy, in_the_prefill)
    await until(lambda: sum(engine.disconnects for engine in stand.prefillers) == 1)
    await stand.settled()
    assert stand.releases == []


# ---- headers of the prefill leg ----


async def test_B35_the_clients_end_to_end_headers_reach_the_prefiller(falling_back: Stand, mode: Mode) -> None:
    end_to_end: list[tuple[str, str | bytes]] = [
        ("authorization", "Bearer k1"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("baggage", "a=1"),
        ("user-agent", "c-\xe9".encode()),
        ("x-session-id", "s"),
    ]
    own = [
        ("te", "trailers"),
        ("proxy-authorization", "Basic x"),
        ("x-forwarded-for", "10.1.1.1"),
        ("x-envoy-retry-on", "5xx"),
        ("x-data-parallel-rank", "7"),
        ("accept", "text/event-stream"),
    ]
    async with falling_back.envoy(mode) as envoy:
        await through(envoy, headers=[*JSON, *end_to_end, *own])
    prefill = falling_back.prefill
    lines = sorted((name.lower(), value) for name, value in prefill.headers)
    fixed = {"host", "content-length", "x-request-id"}
    text = [(name, value if isinstance(value, str) else value.decode("latin-1")) for name, value in end_to_end]
    assert [line for line in lines if line[0] not in fixed] == sorted(
        [*JSON, *text, ("accept", "application/json"), ("accept-encoding", "identity")]
    )
    assert prefill.header("host") in [engine.endpoint for engine in falling_back.prefillers]


async def test_B35_a_configured_key_stands_in_for_none(falling_back: Stand, stand: Stand, mode: Mode) -> None:
    for one, expected in ((falling_back, f"Bearer {KEY}"), (stand, None)):
        async with one.envoy(mode) as envoy:
            exchange = await through(envoy)
        assert one.prefill.header("authorization") == expected
        assert exchange.upstream.header("authorization") is None  # the decode leg is the client's own


# ---- connections ----


async def test_B37_cancels_cost_no_connection(mode: Mode) -> None:
    settings = {"prefill": {"max_connections": 2}}
    async with Stand.standing(settings, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        for round_ in range(30):
            await cancelled(envoy, _pause(0.001 * (round_ % 6)))
        assert (await within(2, through(envoy))).immediate is None
        await stand.settled()


async def test_B38_a_kept_connection_that_was_closed_costs_no_request(stand: Stand, envoy: ScriptedEnvoy) -> None:
    for engine in stand.prefillers:
        engine.close_on_nth = 2
    for _ in range(6):
        assert (await through(envoy)).upstream.json()["kv_transfer_params"]["do_remote_prefill"] is True
    answered = Counter(request.header("x-request-id") for request in stand.prefills if request.nth == 1)
    assert len(answered) == 6
    assert set(answered.values()) == {1}  # none was run twice


# ---- releases over ZMQ ----


def ascend_params(port: int) -> Respond:
    """A prefiller of vLLM Ascend whose side channel is at that port."""

    def respond(request: RecordedRequest) -> Answer:
        name = request.header("x-request-id") or ""
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "0",
            "remote_block_ids": [[5, 6]],
            "remote_request_id": f"chatcmpl-{name}-bb647e8b",
            "remote_host": "127.0.0.1",
            "remote_port": port,
            "remote_ptp_size": 1,
            "last_token_id": 1,
            "num_prompt_blocks": 1,
        }
        return Answer.json({"kv_transfer_params": params})

    return respond


def signalers() -> int:
    """Of ZMQ: one for each socket, and for a context's threads."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("eventfd" in os.readlink(link) for link in links if link.is_symlink())


async def test_B39_B40_releases_to_nobody_are_all_accounted_for_and_never_delay_the_end(mode: Mode) -> None:
    """The side channel's port is open to nobody: nothing is ever delivered, and the process must end all the same."""
    settings: dict[str, Any] = {
        "fleet": {"connector": "mooncake-ascend"},
        "release": {"queue": 30, "deadline_s": 60.0, "settle_s": 0.01},
        "life": {"drain_s": 0.5, "notice_s": 0.0},
    }
    async with Stand.standing(settings, prefill=1, decode=1) as stand:
        assert stand.server is not None
        stand.prefillers[0].respond = ascend_params(1)
        async with stand.envoy(mode) as envoy:
            before = signalers()
            exchanges = await asyncio.gather(*(envoy.request("POST", CHAT, JSON, CHAT_BODY) for _ in range(46)))
            for exchange in exchanges[1:]:  # were all to end at once, the connection might have broken
                await exchange.reset()
            accounts = stand.server.releases.accounts
            await until(lambda: accounts.requested == 45)
            # More than may wait are dropped at once, and counted; those that wait share one socket.
            assert (accounts.ended["dropped"], accounts.pending) == (15, 30)
            assert 0 < signalers() - before <= 4
            assert (await within(2, through(envoy))).immediate is None
            await exchanges[0].response(200)
            await exchanges[0].finish()
        await within(3, stand.server.__aexit__(None, None, None))
        assert accounts.pending == 0
        assert sum(accounts.ended[result] for result in RESULTS) == accounts.requested
        assert accounts.ended["released"] == 0


# ---- addresses and load ----


async def test_O16_an_ipv6_prefiller(mode: Mode) -> None:
    server = await asyncio.start_server(lambda *_: None, "::1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) if b"ontent-" in head else 0
        await reader.readexactly(length)
        requests.append(head)
        params = {**prefill_params("r"), "remote_host": "::"}
        body = Answer.json({"kv_transfer_params": params} if head.startswith(b"POST") else {"data": []}).body
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        writer.close()

    fleet = {"fleet": {"prefill": [{"url": f"http://[::1]:{port}", "name": "six"}]}}
    async with (
        await asyncio.start_server(serve, "::1", port),
        Stand.standing(fleet, prefill=0, decode=1) as stand,
        stand.envoy(mode) as envoy,
    ):
        exchange = await through(envoy)
        head = next(head for head in requests if head.startswith(b"POST"))
        assert f"\r\nHost: [::1]:{port}\r\n".encode() in head
        # What no decoder could reach is replaced, without brackets, as engines write it.
        assert exchange.upstream.json()["kv_transfer_params"]["remote_host"] == "::1"


async def test_O23_a_burst_is_spread_as_it_comes(mode: Mode) -> None:
    """Picking and reserving is one step: no two of a burst see the same load."""
    settings = {"routing": {"prefill_policy": "least_loaded", "decode_policy": "least_loaded"}}
    async with Stand.standing(settings, prefill=4, decode=4) as stand, stand.envoy(mode) as envoy:
        hold = asyncio.Event()

        async def held(request: RecordedRequest) -> Answer:
            await hold.wait()
            return answer_prefill(request)

        for engine in stand.prefillers:
            engine.respond = held
        sending = [asyncio.create_task(envoy.request("POST", CHAT, JSON, CHAT_BODY)) for _ in range(32)]
        await until(lambda: len(stand.prefills) == 32, timeout_s=30)
        assert [len(engine.requests) for engine in stand.prefillers] == [8] * 4
        hold.set()
        exchanges = await asyncio.gather(*sending)
        first = Counter(
            (exchange.upstream.header("x-gateway-destination-endpoint") or "").split(",")[0] for exchange in exchanges
        )
        assert sorted(first.values()) == [8] * 4
        for exchange in exchanges:
            await exchange.response(200)
            await exchange.finish()
        await stand.settled()


async def test_the_handoff_reaches_the_decoder_as_the_prefiller_spelled_it(stand: Stand, envoy: ScriptedEnvoy) -> None:
    params = (
        b'{"do_remote_prefill":true, "remote_block_ids":[[9007199254740993]],"remote_engine_id":"\\u0065",'
        b'"remote_request_id":"r","remote_host":"10.0.0.9","remote_port":5600,"x":1.0e2}'
    )
    for engine in stand.prefillers:
        engine.respond = _text(b'{"kv_transfer_params":' + params + b"}")
    assert (await through(envoy)).upstream.body == handed_over(CHAT_BODY, params)
