"""Cases from public bug reports, by their id: messages, headers, routing and time, in both body modes."""

from __future__ import annotations

import asyncio
import gc
import random
import resource
import struct
import uuid
from collections import Counter
from typing import Any

import pytest

from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.grpc.stand import JSON, Stand, decoded, refused, through
from tests.support.engines import Answer, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, COMPLETIONS, until, within
from tests.support.scripted_envoy import Exchange, Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

DESTINATION = "x-gateway-destination-endpoint"
UPGRADE = [("connection", "Upgrade"), ("upgrade", "websocket")]


def phases(exchange: Exchange) -> list[str | None]:
    """What the replies answer; None for those that only ask for time."""
    return [reply.WhichOneof("response") for reply in exchange.replies if reply.WhichOneof("response")]


async def bypassed(stand: Stand, envoy: ScriptedEnvoy, reason: str, *arguments: Any, **options: Any) -> Exchange:
    """A request that goes to a decoder without a prefill, counted by that reason."""
    before = stand.counts("extproc_bypass_total").get(reason, 0)
    exchange = await through(envoy, *arguments, **options)
    assert exchange.upstream.header(DESTINATION) in endpoints(stand)
    assert stand.prefills == []
    assert stand.counts("extproc_bypass_total")[reason] == before + 1
    return exchange


def endpoints(stand: Stand) -> tuple[str, str]:
    """Both orders in which the two decoders can be named."""
    one, other = (engine.endpoint for engine in stand.decoders)
    return f"{one},{other}", f"{other},{one}"


# ---- messages ----


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", b""),
        ("POST", "/v1/embeddings", b'{"input":"a"}'),
        ("POST", CHAT, CHAT_BODY),
        ("PUT", "/x", b"x"),
    ],
)
async def test_B07_each_message_gets_one_reply_of_its_phase(
    envoy: ScriptedEnvoy, method: str, path: str, body: bytes
) -> None:
    """The scripted Envoy refuses any other; so much for their number."""
    exchange = await through(envoy, body, path, method=method)
    assert phases(exchange) == ["request_headers", *(["request_body"] if body else []), "response_headers"]
    for reply in exchange.replies:
        if member := reply.WhichOneof("response"):
            assert getattr(reply, member).HasField("response")


async def test_B08_headers_are_read_from_and_written_to_raw_value(envoy: ScriptedEnvoy, stand: Stand) -> None:
    """The scripted Envoy fills raw_value alone."""
    exchange = await through(envoy, headers=[*JSON, ("x-request-id", b"\xe9-1")])
    assert len(stand.prefills) == 1
    options = [
        option
        for reply in exchange.replies
        for member in ("request_headers", "request_body", "response_headers")
        for option in getattr(reply, member).response.header_mutation.set_headers
    ]
    assert {option.header.key for option in options} >= {"x-request-id", DESTINATION, "server-timing"}
    assert all(option.header.raw_value and not option.header.value for option in options)


async def test_B09_the_route_cache_stays_by_default(envoy: ScriptedEnvoy) -> None:
    for body, path in ((CHAT_BODY, CHAT), (b'{"input":"a"}', "/v1/embeddings"), (b"", "/v1/models")):
        assert not (await through(envoy, body, path)).route_cache_cleared


async def test_B09_the_route_cache_is_cleared_where_it_is_configured(mode: Mode) -> None:
    settings = {"routing": {"clear_route_cache": True}}
    async with Stand.standing(settings, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        for body, path in ((CHAT_BODY, CHAT), (b'{"input":"a"}', "/v1/embeddings"), (b"", "/v1/models")):
            exchange = await through(envoy, body, path)
            assert exchange.route_cache_cleared
            clearing = [
                member
                for reply in exchange.replies
                for member in ("request_headers", "request_body")
                if getattr(reply, member).response.clear_route_cache
            ]
            # The reply that sets the header, and no other.
            assert clearing == ["request_body" if body and mode == "BUFFERED" else "request_headers"]


async def test_B10_metadata_and_header_name_the_same_decoders(envoy: ScriptedEnvoy, stand: Stand) -> None:
    exchanges = await asyncio.gather(*(through(envoy) for _ in range(50)))
    named = Counter()
    for exchange in exchanges:
        value = exchange.upstream.header(DESTINATION)
        assert exchange.dynamic_metadata["envoy.lb"] == {DESTINATION: value}
        assert set(exchange.dynamic_metadata) == {"envoy.lb", "extproc"}
        assert set(exchange.dynamic_metadata["extproc"]) == {"ticket"}
        named[value] += 1
    assert named == dict.fromkeys(endpoints(stand), 25)


@pytest.mark.parametrize(("status", "code"), [(503, "no_decoder"), (429, "decoders_busy")])
async def test_B10_none_ready_is_503_and_none_free_is_429(mode: Mode, status: int, code: str) -> None:
    one_each = {"fleet": {"max_inflight": {"decode": 1}}}
    async with Stand.standing(one_each, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        assert stand.server is not None
        if status == 503:
            assert stand.server.service.fleet.drain("decode-1", True)
        held = await envoy.request("POST", CHAT, JSON, CHAT_BODY) if status == 429 else None
        for body, path in ((CHAT_BODY, CHAT), (b"{}", "/v1/embeddings"), (b"", "/v1/models")):
            answer = await refused(envoy, status, code, body, path)
            assert answer.header("retry-after") == "1"
        if held is not None:
            await held.response(200)
            await held.finish()
            assert (await through(envoy)).immediate is None
        await stand.settled()


# ---- time ----


async def test_B12_a_prefill_may_take_longer_than_envoys_patience(stand: Stand, mode: Mode) -> None:
    for engine in stand.prefillers:
        engine.respond = lambda request: _late(request, 1.0)
    async with stand.envoy(mode, message_timeout_s=0.5 if mode == "BUFFERED" else 10.0) as envoy:
        exchange = await through(envoy)
    # Asked for once, as the prefill takes long; where Envoy has no time limit, not at all.
    budget = 60.0 * 2 + 10.0 + 10.0
    assert exchange.overrides == ([budget] if mode == "BUFFERED" else [])


async def test_a_quick_prefill_asks_for_no_time(stand: Stand) -> None:
    async with stand.envoy("BUFFERED") as envoy:
        asked = [len((await through(envoy)).overrides) for _ in range(20)]
    assert asked.count(0) > 10  # some may take long on a busy machine


def _late(request: Any, seconds: float) -> Answer:
    answer = answer_prefill(request)
    answer.delay_s = seconds
    return answer


async def test_B12_the_services_own_limit_comes_first(mode: Mode) -> None:
    """A prefill that is closed before it has an answer pins nothing: an engine frees what it has not finished."""
    settings = {"prefill": {"timeout_s": 0.2, "attempts": 2}}
    async with Stand.standing(settings, prefill=2, decode=1) as stand, stand.envoy(mode) as envoy:
        for engine in stand.prefillers:
            engine.hang = True
        answer = await within(2, refused(envoy, 504, "prefill_timeout"))
        assert "retry-after" not in dict(answer.headers)
        for engine in stand.prefillers:
            await engine.wait_for_disconnects(1, within_s=2)
        assert len(stand.prefills) == 2
        assert stand.releases == []
        await stand.settled()


async def test_B12_the_exchanges_deadline_covers_the_queue_and_every_attempt(mode: Mode) -> None:
    settings = {"limits": {"exchange_s": 0.3}, "prefill": {"on_failure": "decode"}}
    async with Stand.standing(settings, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        stand.prefillers[0].hang = True
        await within(3, refused(envoy, 504, "exchange_timeout"))
        await stand.prefillers[0].wait_for_disconnects(1, within_s=2)
        assert len(stand.prefills) == 1
        await stand.settled()


@pytest.mark.parametrize("limit", ["body_timeout_s", "exchange_s"])
async def test_B15_a_body_that_never_completes_is_408(mode: Mode, limit: str) -> None:
    async with Stand.standing({"limits": {limit: 0.15}}, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        stream = envoy.raw_stream()
        await stream.send(headers_message(mode, CHAT))
        if mode == "BUFFERED":
            reply = await stream.receive()
            assert reply is not None
            assert reply.HasField("request_headers")
        else:
            await stream.send(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b'{"a":')))
        answer = await stream.receive(3)
        assert answer is not None
        assert (answer.immediate_response.status.code, answer.immediate_response.details) == (
            408,
            "extproc_body_timeout",
        )
        # What still arrives finds nobody waiting.
        await stream.send(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=b"1}", end_of_stream=True)))
        await stream.half_close()
        assert await stream.ended() == []
        assert stand.prefills == []
        await stand.settled()


def headers_message(mode: str, path: str, *more: tuple[str, str], method: str = "POST") -> ext_proc.ProcessingRequest:
    message = ext_proc.ProcessingRequest()
    message.protocol_config.request_body_mode = 2 if mode == "BUFFERED" else 4  # type: ignore[assignment]
    lines = [(":method", method), (":path", path), ("content-type", "application/json"), *more]
    for name, value in lines:
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    return message


# ---- upgrades and requests without a body ----


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/realtime?model=m", UPGRADE),
        ("POST", CHAT, [*JSON, ("connection", "Upgrade"), ("upgrade", "h2c")]),
        ("CONNECT", "", []),
        ("CONNECT", "/v1/realtime", [(":protocol", "websocket")]),
    ],
)
async def test_B15_upgrades_are_answered_at_the_headers(
    envoy: ScriptedEnvoy, stand: Stand, method: str, path: str, headers: list[tuple[str, str]]
) -> None:
    """No body message has come, and none will: an upgrade's bytes never end."""
    stream = envoy.raw_stream()
    message = headers_message(envoy.mode, path, *headers, method=method)
    await stream.send(message)
    reply = await stream.receive(1)
    assert reply is not None
    assert reply.HasField("request_headers")
    assert reply.HasField("mode_override") == (envoy.mode == "BUFFERED")
    assert reply.mode_override.request_body_mode == 0
    if envoy.mode == "FULL_DUPLEX_STREAMED":
        for data in (b"\x81\x85ping", b"", b"x" * 130_000):
            await stream.send(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=data)))
            got = b""
            while len(got) < len(data) or not data:
                chunk = await stream.receive(1)
                assert chunk is not None
                streamed = chunk.request_body.response.body_mutation.streamed_response
                assert (len(streamed.body) <= 62_000, streamed.end_of_stream) == (True, False)
                got += streamed.body
                if not data:
                    break
            assert got == data
    await stream.half_close()
    assert await stream.ended() == []
    assert stand.prefills == []


@pytest.mark.parametrize(
    ("method", "path", "headers", "reason"),
    [
        ("GET", "/v1/models", [], "method"),
        ("GET", "/health", [], "method"),
        ("HEAD", "/v1/models", [], "method"),
        ("OPTIONS", CHAT, [("origin", "http://a"), ("access-control-request-method", "POST")], "method"),
        ("DELETE", "/x", [], "method"),
        ("POST", CHAT, [*JSON, ("content-length", "0")], "no_body"),
        ("TRACE", "/", [], "method"),
    ],
)
async def test_B16_O14_requests_without_a_body_pass_at_once(
    envoy: ScriptedEnvoy, stand: Stand, method: str, path: str, headers: list[tuple[str, str]], reason: str
) -> None:
    exchange = await bypassed(stand, envoy, reason, b"", path, method=method, headers=headers, status=405)
    assert phases(exchange) == ["request_headers", "response_headers"]
    assert (exchange.upstream.method, exchange.upstream.path, exchange.upstream.body) == (method, path, b"")


@pytest.mark.parametrize("chunks", [[b""], [b"", b""]])
async def test_B16_a_chunked_body_of_no_bytes(envoy: ScriptedEnvoy, stand: Stand, chunks: list[bytes]) -> None:
    exchange = await bypassed(stand, envoy, "not_json", path=CHAT, chunks=chunks)
    assert exchange.upstream.body == b""


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH"])
async def test_O14_only_posts_are_disaggregated(envoy: ScriptedEnvoy, stand: Stand, method: str) -> None:
    exchange = await bypassed(stand, envoy, "method", CHAT_BODY, method=method)
    assert exchange.upstream.body == CHAT_BODY


# ---- trailers ----


async def test_B17_trailers_end_a_streamed_body(stand: Stand) -> None:
    async with stand.envoy("FULL_DUPLEX_STREAMED") as envoy:
        exchange = await through(envoy, chunks=[CHAT_BODY[:20], CHAT_BODY[20:]], trailers=[("x-checksum", "1")])
        assert phases(exchange) == ["request_headers", "request_body", "request_trailers", "response_headers"]
        assert exchange.upstream.trailers == [("x-checksum", "1")]
        assert exchange.upstream.json()["kv_transfer_params"]["do_remote_prefill"] is True
        assert len(stand.prefills) == 1
        empty = await through(envoy, path="/v1/embeddings", chunks=[], trailers=[("x-checksum", "1")])
        assert empty.upstream.body == b""


@pytest.mark.parametrize("body", [CHAT_BODY, b""])
async def test_B17_trailers_in_any_place_get_one_reply(envoy: ScriptedEnvoy, stand: Stand, body: bytes) -> None:
    """BUFFERED with trailers sent: Envoy then shows no body message for an empty body (seen with 1.40)."""
    stream = envoy.raw_stream()
    await stream.send(headers_message(envoy.mode, CHAT))
    if envoy.mode == "BUFFERED":
        assert (await stream.receive()).WhichOneof("response") == "request_headers"  # type: ignore[union-attr]
    if body:
        await stream.send(ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body)))
    await stream.send(ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers()))
    await stream.send(ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders()))
    await stream.send(ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers()))
    await stream.half_close()
    replies = [reply for reply in await stream.ended() if not reply.HasField("override_message_timeout")]
    expected = ["request_trailers", "response_headers", "response_trailers"]
    if body:
        expected.insert(0, "request_body")
    if envoy.mode == "FULL_DUPLEX_STREAMED":
        expected[:0] = ["request_headers"] if body else ["request_headers", "request_body"]
    assert [reply.WhichOneof("response") for reply in replies] == expected
    assert any(DESTINATION in str(reply.dynamic_metadata) for reply in replies)


# ---- paths ----


@pytest.mark.parametrize("path", [f"{CHAT}?x=1", f"{COMPLETIONS}?api-version=1&a=%20b"])
async def test_B30_a_query_stays_on_both_legs(envoy: ScriptedEnvoy, stand: Stand, path: str) -> None:
    upstream = await decoded(envoy, b'{"prompt":"hi","messages":[]}', path)
    assert (upstream.path, stand.prefill.target) == (path, path)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions/", "//v1/completions", "/v1/chat/completions/render", "/v1/embeddings", "/tokenize"),
        *("/v1/rerank", "/v1/responses", "/v1/messages", "/inference/v1/generate", "/pooling", "/chat/completions"),
        *("/v1/chat%2Fcompletions", "/v1/chat/%63ompletions", "/invocations", "/v1/chat/completions/batch", "/"),
    ],
)
async def test_B30_O15_O26_other_paths_pass_untouched(envoy: ScriptedEnvoy, stand: Stand, path: str) -> None:
    body = b'{ "prompt":"hi", "input":"a"}'
    exchange = await bypassed(stand, envoy, "path", body, path, status=404)
    assert (exchange.upstream.body, exchange.upstream.path) == (body, path)


async def test_O26_responses_and_messages_are_disaggregated_where_they_are_configured(mode: Mode) -> None:
    paths = {"routing": {"paths": ["/v1/responses", "/v1/messages"]}}
    async with Stand.standing(paths, prefill=1, decode=1) as stand, stand.envoy(mode) as envoy:
        limits = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
        for path, limit in limits.items():
            member = b'"input":"hi"' if path == "/v1/responses" else b'"messages":[]'
            body = b'{%b,"%b":700,"stream":true}' % (member, limit.encode())
            upstream = await decoded(envoy, body, path)
            prefill = stand.prefillers[0].requests[-1]
            assert prefill.target == path
            assert (prefill.json()[limit], prefill.json()["stream"]) == (1, False)
            decode = upstream.json()
            assert decode.pop("kv_transfer_params")["do_remote_prefill"] is True
            assert (decode[limit], decode["stream"]) == (700, True)
        assert len(stand.prefills) == 2


# ---- headers ----


async def test_O11_expect_and_other_hop_by_hop_headers_stay_with_the_client(envoy: ScriptedEnvoy, stand: Stand) -> None:
    more = [("expect", "100-continue"), ("te", "trailers"), ("connection", "x-a"), ("accept-encoding", "br")]
    await through(envoy, headers=[*JSON, *more, ("x-custom", "1")])
    names = {name.lower() for name, _ in stand.prefill.headers}
    assert names & {"expect", "te", "connection", "transfer-encoding", "x-forwarded-proto"} == set()
    assert stand.prefill.header("accept-encoding") == "identity"
    assert stand.prefill.header("x-custom") == "1"


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_O17_O18_nothing_of_the_response_body_is_ever_seen(envoy: ScriptedEnvoy, encoding: str) -> None:
    exchange = await envoy.request("POST", CHAT, JSON, CHAT_BODY)
    given = [("content-type", "text/event-stream"), ("content-encoding", encoding), ("x-a", "1"), ("x-a", "2")]
    response = await exchange.response(200, given)
    await exchange.finish()
    assert all(not reply.HasField("mode_override") for reply in exchange.replies)
    assert [item for item in response.headers if item in given] == given
    assert {name for name, _ in response.headers} - {name for name, _ in given} == {"x-request-id", "server-timing"}


async def test_O20_envoy_may_ping_as_often_as_it_likes(stand: Stand) -> None:
    """A gRPC server's default is to send GOAWAY (too_many_pings) after two pings within five minutes."""
    host, port = stand.grpc_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, b""))
        pings = 300
        for number in range(pings):
            writer.write(_frame(6, 0, struct.pack(">Q", number)))
        answered: list[int] = []
        async with asyncio.timeout(10):
            while len(answered) < pings:
                length, kind, flags, _ = struct.unpack(">IBBI", b"\0" + await reader.readexactly(9))
                payload = await reader.readexactly(length)
                assert kind != 7, f"GOAWAY {payload!r}"
                if (kind, flags) == (6, 1):
                    answered.append(struct.unpack(">Q", payload)[0])
        assert answered == list(range(pings))
    finally:
        writer.close()
        await writer.wait_closed()


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 0) + payload


# ---- many streams ----


async def test_B36_streams_that_are_reset_at_any_point_leave_nothing(stand: Stand, mode: Mode) -> None:
    """Clean-up must not hang on an exception: a stream reset between two messages simply ends."""
    chance = random.Random(36)
    for engine in stand.prefillers:
        engine.respond = lambda request: _late(request, chance.choice((0.0, 0.01)))

    async def one(envoy: ScriptedEnvoy) -> None:
        stream = envoy.raw_stream()
        messages = [
            headers_message(mode, CHAT),
            ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=CHAT_BODY, end_of_stream=True)),
        ]
        for message in messages[: chance.randrange(3)]:
            await stream.send(message)
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.005, 0.02)))
        await stream.reset()

    async def many(count: int) -> None:
        async with stand.envoy(mode) as envoy:
            for _ in range(count // 20):
                await asyncio.gather(*(one(envoy) for _ in range(20)))
        await stand.settled()
        await stand.reset()  # what engines have recorded is no growth of the service's
        gc.collect()

    await many(1000)
    before = resident_bytes()
    for _ in range(9):
        await many(1000)
    assert resident_bytes() - before < 20 * 1024 * 1024
    assert stand.server is not None
    accounts = stand.server.releases.accounts
    async with asyncio.timeout(10):  # the last releases end in the background
        while accounts.pending:
            await asyncio.sleep(0.01)
    async with stand.envoy(mode) as envoy:
        assert (await through(envoy)).immediate is None


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


async def test_B36_a_drain_lets_prefills_finish_and_ends_what_is_idle() -> None:
    """Health first, then running prefills within the time, then the rest."""
    async with Stand.standing({"life": {"drain_s": 5.0, "notice_s": 0.0}}, prefill=1, decode=1) as stand:
        assert stand.server is not None
        hold = asyncio.Event()

        async def held(request: Any) -> Answer:
            await hold.wait()
            return answer_prefill(request)

        stand.prefillers[0].respond = held
        async with stand.envoy("BUFFERED") as envoy:
            tokens_flow = await envoy.request("POST", "/v1/embeddings", JSON, b"{}")
            await tokens_flow.response(200)
            prefilling = asyncio.create_task(envoy.request("POST", CHAT, JSON, CHAT_BODY))
            await stand.prefillers[0].wait_for(1)
            stopping = asyncio.create_task(stand.server.__aexit__(None, None, None))
            await until(lambda: stand.server is not None and stand.server.why_not_ready() == "draining")
            await tokens_flow.finish()
            hold.set()
            exchange = await prefilling
            assert exchange.upstream.json()["kv_transfer_params"]["do_remote_prefill"] is True
            await exchange.response(200)
            await exchange.finish()
            await stopping
        assert stand.server.service.in_flight == 0


async def test_an_id_of_ours_is_a_uuid4_and_on_both_legs(envoy: ScriptedEnvoy, stand: Stand) -> None:
    for given in (
        (),
        (("x-request-id", "a"),),
        (("x-request-id", "a"), ("x-request-id", "b")),
        (("x-request-id", ""),),
    ):
        await stand.reset()
        exchange = await envoy.request("POST", CHAT, [*JSON, *given], CHAT_BODY)
        response = await exchange.response(200)
        await exchange.finish()
        ours = exchange.upstream.header("x-request-id")
        assert ours == stand.prefill.header("x-request-id")
        assert ours is not None
        assert uuid.UUID(ours).version == 4
        assert response.header("x-request-id") == (given[0][1] if given and given[0][1] else ours)
