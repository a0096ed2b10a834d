"""The scripted Envoy itself: what it sends, what it makes of good replies, how its streams end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.support.envoy_rules import ImmediateAnswer, ProtocolViolation, UpstreamRequest
from tests.support.raw_stream import RawStream
from tests.support.scripted_envoy import Mode, ScriptedEnvoy, StreamFailed
from tests.support.scripted_service import (
    BODY,
    Handler,
    Reply,
    chunk,
    header,
    immediate,
    length,
    metadata,
    more_time,
    on_body,
    on_headers,
    on_response,
    on_trailers,
    overriding,
    play,
    serving,
)


class TestWhatEnvoySends:
    async def received(self, mode: Mode, **request: Any) -> list[ext_proc.ProcessingRequest]:
        """What comes before any reply."""
        incoming: asyncio.Queue[ext_proc.ProcessingRequest] = asyncio.Queue()

        async def handle(context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                incoming.put_nowait(message)

        async with serving(handle) as (target, servicer), ScriptedEnvoy(target, mode=mode) as envoy:
            exchange = envoy.open("POST", "/v1/x?q=1", [("X-Dup", "1"), ("x-dup", b"\xe9")], **request)
            running = asyncio.create_task(exchange.run([b"abc", b"def"]))
            async with asyncio.timeout(5):
                messages = [await incoming.get() for _ in range(1 if mode == "BUFFERED" else 4)]
            await exchange.stream.half_close()
            with pytest.raises(StreamFailed, match="before request_headers was answered: OK"):
                await running
            await servicer.ended.wait()
        assert incoming.empty()
        return messages

    async def test_headers(self) -> None:
        (first,) = await self.received("BUFFERED", request_id="r-1")
        assert [(line.key, line.value, line.raw_value) for line in first.request_headers.headers.headers] == [
            (":authority", "", b"gateway.example"),
            (":path", "", b"/v1/x?q=1"),
            (":method", "", b"POST"),
            (":scheme", "", b"http"),
            ("x-dup", "", b"1"),
            ("x-dup", "", b"\xe9"),
            ("x-forwarded-proto", "", b"http"),
            ("x-request-id", "", b"r-1"),
        ]
        assert not first.request_headers.end_of_stream
        assert first.protocol_config.request_body_mode == 2
        assert first.HasField("metadata_context")

    async def test_full_duplex_does_not_wait_for_replies(self) -> None:
        messages = await self.received("FULL_DUPLEX_STREAMED")
        assert messages[0].protocol_config.request_body_mode == 4
        assert not any(message.HasField("protocol_config") for message in messages[1:])
        bodies = [(message.request_body.body, message.request_body.end_of_stream) for message in messages[1:]]
        assert bodies == [(b"abc", False), (b"def", False), (b"", True)]

    async def test_full_duplex_with_trailers(self) -> None:
        messages = await self.received("FULL_DUPLEX_STREAMED", trailers=[("x-t", "1")])
        assert [message.WhichOneof("request") for message in messages[1:]] == ["request_body"] * 2 + [
            "request_trailers"
        ]
        assert messages[3].request_trailers.trailers == HeaderMap(headers=[HeaderValue(key="x-t", raw_value=b"1")])

    @pytest.mark.parametrize(
        ("request_", "end", "lengths"),
        [
            ({"method": "GET", "body": b""}, True, []),
            ({"method": "POST", "body": b""}, True, [b"0"]),
            ({"method": "POST", "body": b"abc"}, False, [b"3"]),
            ({"method": "POST", "chunks": [b"ab", b"c"]}, False, []),
        ],
    )
    async def test_framing(self, request_: dict[str, Any], end: bool, lengths: list[bytes]) -> None:
        messages: list[ext_proc.ProcessingRequest] = []

        async def handle(context: Any) -> None:
            messages.append(await context.read())
            await context.write(on_headers())
            while (message := await context.read()) is not grpc.aio.EOF:
                messages.append(message)
                await context.write(on_body())

        async with serving(handle) as (target, _), ScriptedEnvoy(target) as envoy:
            exchange = await envoy.request(**request_)
            await exchange.finish()
        headers = messages[0].request_headers
        assert headers.end_of_stream is end
        assert [line.raw_value for line in headers.headers.headers if line.key == "content-length"] == lengths
        bodies = [(message.request_body.body, message.request_body.end_of_stream) for message in messages[1:]]
        assert bodies == ([] if end else [(b"abc", True)])


class TestGoodReplies:
    async def test_untouched(self) -> None:
        exchange, response = await play({})
        assert exchange.upstream == UpstreamRequest(
            [("x-dup", "1"), ("x-dup", "2"), ("x-l", "é"), ("content-length", "7"), ("x-forwarded-proto", "http")],
            BODY,
            method="POST",
            path="/v1/x?q=1",
            authority="gateway.example",
            scheme="http",
        )
        assert (response.status, response.headers) == (200, [("content-length", "10"), ("x-up", "1")])
        assert [reply.WhichOneof("response") for reply in exchange.replies] == [
            "request_headers",
            "request_body",
            "response_headers",
        ]
        assert (exchange.overrides, exchange.raw_dynamic_metadata) == ([], {})

    async def test_mutations(self) -> None:
        exchange, response = await play(
            {
                "request_headers": [
                    on_headers(header("X-Dup", b"3"), header(":path", b"/p"), remove=["x-dup", "X-L"]),
                ],
                "request_body": [on_body(header("x-dup", b"\xff"), length(3), body=b"abc", clear_route_cache=True)],
                "response_headers": [on_response(header("x-up", b"2"), header(":status", b"201"))],
            }
        )
        assert exchange.upstream.headers == [
            ("x-forwarded-proto", "http"),
            ("x-dup", "ÿ"),
            ("content-length", "3"),
        ]
        assert (exchange.upstream.body, exchange.upstream.path) == (b"abc", "/p")
        assert exchange.upstream.header("x-dup") == "ÿ"
        assert exchange.route_cache_cleared
        assert (response.status, response.headers) == (201, [("content-length", "10"), ("x-up", "2")])

    async def test_chunked_request_may_stay_chunked(self) -> None:
        exchange, _ = await play({"request_body": [on_body(body=b"abc")]}, chunks=[b"a", b"b"])
        assert exchange.upstream.header("content-length") is None
        assert exchange.upstream.body == b"abc"

    async def test_cleared_body(self) -> None:
        reply = on_body(length(0))
        reply.request_body.response.body_mutation.clear_body = True
        exchange, _ = await play({"request_body": [reply]})
        assert (exchange.upstream.body, exchange.upstream.header("content-length")) == (b"", "0")

    async def test_replaced_at_the_headers(self) -> None:
        reply = on_headers(length(3), status=1, body_mutation=ext_proc.BodyMutation(body=b"abc"))
        exchange, _ = await play({"request_headers": [reply]})
        assert (exchange.upstream.body, exchange.upstream.header("content-length")) == (b"abc", None)
        assert len(exchange.replies) == 2

    async def test_full_duplex(self) -> None:
        exchange, response = await play(
            {
                "request_headers": [on_headers(header("x-a", b"1"))],
                "request_body": [chunk(b"x" * 65_536), chunk(b""), chunk(b"y", end=True)],
                "response_headers": [on_response(header("x-up", b"2"))],
            },
            "FULL_DUPLEX_STREAMED",
            chunks=[b"a" * 100_000, b"b"],
        )
        assert exchange.upstream.body == b"x" * 65_536 + b"y"
        assert exchange.upstream.header("x-a") == "1"
        assert response.headers == [("content-length", "10"), ("x-up", "2")]

    async def test_full_duplex_loses_its_content_length(self) -> None:
        exchange, _ = await play({}, "FULL_DUPLEX_STREAMED")
        assert (exchange.upstream.body, exchange.upstream.header("content-length")) == (BODY, None)

    async def test_full_duplex_without_body(self) -> None:
        exchange, _ = await play({}, "FULL_DUPLEX_STREAMED", method="GET", body=b"")
        assert (exchange.upstream.method, exchange.upstream.body) == ("GET", b"")

    async def test_full_duplex_trailers(self) -> None:
        exchange, _ = await play(
            {"request_body": [chunk(b"abc")], "request_trailers": [on_trailers(header("x-s", b"2"))]},
            "FULL_DUPLEX_STREAMED",
            trailers=[("x-t", "1")],
        )
        assert (exchange.upstream.body, exchange.upstream.trailers) == (b"abc", [("x-t", "1"), ("x-s", "2")])

    async def test_metadata(self) -> None:
        exchange, _ = await play(
            {
                "request_headers": [metadata(metadata(on_headers(), a="1", b="1"), "other", z="1")],
                "request_body": [metadata(on_body(), a="2")],
            }
        )
        assert exchange.dynamic_metadata == {"envoy.lb": {"a": "2", "b": "1"}}
        assert exchange.raw_dynamic_metadata == {"envoy.lb": {"a": "2", "b": "1"}, "other": {"z": "1"}}

    async def test_more_time_once_per_message(self) -> None:
        asks = {"request_headers": [more_time(7), on_headers()], "request_body": [more_time(8), on_body()]}
        exchange, _ = await play(asks)
        assert exchange.overrides == [7.0, 8.0]

    async def test_more_time_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The override replaces the limit for the message that it was asked for, and for no other."""
        limits: list[float] = []
        receive = RawStream.receive

        async def spied(stream: RawStream, within_s: float) -> Reply | None:
            limits.append(within_s)
            return await receive(stream, within_s)

        monkeypatch.setattr(RawStream, "receive", spied)
        await play({"request_headers": [more_time(70), on_headers()]}, message_timeout_s=9.0)
        assert limits[:4] == [9.0, 70.0, 9.0, 9.0]

    async def test_immediate(self) -> None:
        answer = immediate(header("content-type", b"application/json"), body=b'{"e":1}', details="a b")
        exchange, _ = await play({"request_body": [metadata(answer, a="1")]})
        assert exchange.immediate == ImmediateAnswer(
            [("content-type", "application/json"), ("content-length", "7")], b'{"e":1}', status=429, details="a_b"
        )
        assert exchange.immediate.json() == {"e": 1}
        assert exchange.dynamic_metadata == {"envoy.lb": {"a": "1"}}
        with pytest.raises(AssertionError, match="answered without the upstream"):
            _ = exchange.upstream

    async def test_immediate_default_content_type(self) -> None:
        exchange, _ = await play({"request_headers": [immediate()], "request_body": []}, "FULL_DUPLEX_STREAMED")
        assert exchange.immediate.header("content-type") == "text/plain"

    async def test_immediate_response_to_a_response(self) -> None:
        exchange, response = await play({"response_headers": [immediate(status=502)]})
        assert response is exchange.immediate
        assert response.status == 502

    async def test_mode_overrides(self) -> None:
        exchange, _ = await play({"request_headers": [overriding(on_headers(), request_body_mode="NONE")]})
        assert (exchange.upstream.body, len(exchange.replies)) == (BODY, 2)
        skip = overriding(on_headers(), request_body_mode="BUFFERED", response_header_mode="SKIP")
        exchange, response = await play({"request_headers": [skip]})
        assert len(exchange.replies) == 2
        assert response.headers == [("content-length", "10"), ("x-up", "1")]

    async def test_service_that_leaves_between_messages(self) -> None:
        async def handle(context: Any) -> None:
            for reply in (on_headers(), on_body()):
                await context.read()
                await context.write(reply)

        async with serving(handle) as (target, servicer), ScriptedEnvoy(target) as envoy:
            exchange = await envoy.request(body=BODY)
            await servicer.ended.wait()
            await exchange.stream.ended()
            assert (await exchange.response(200, [("x-up", "1")])).headers == [("x-up", "1")]
            await exchange.finish()


class TestBrokenStreams:
    async def failed(self, handler: Handler) -> StreamFailed:
        async with serving(handler) as (target, _), ScriptedEnvoy(target) as envoy:
            with pytest.raises(StreamFailed) as caught:
                await (await envoy.request(body=BODY)).finish()
        return caught.value

    async def test_ended_while_a_message_waits(self) -> None:
        async def handle(context: Any) -> None:
            await context.read()

        problem = await self.failed(handle)
        assert problem.code is grpc.StatusCode.OK
        assert "before request_headers was answered" in str(problem)

    async def test_aborted(self) -> None:
        async def handle(context: Any) -> None:
            await context.read()
            await context.write(on_headers())
            await context.read()
            await context.abort(grpc.StatusCode.INTERNAL, "broken")

        problem = await self.failed(handle)
        assert (problem.code, problem.details) == (grpc.StatusCode.INTERNAL, "ext_proc_error_gRPC_error_13")
        assert "broken" in str(problem)

    async def test_failing_after_the_last_reply(self) -> None:
        async def handle(context: Any) -> None:
            for reply in (on_headers(), on_body()):
                await context.read()
                await context.write(reply)
            await context.read()
            await context.abort(grpc.StatusCode.UNKNOWN, "late")

        assert (await self.failed(handle)).code is grpc.StatusCode.UNKNOWN

    async def test_unreachable(self) -> None:
        async with ScriptedEnvoy("127.0.0.1:1") as envoy:
            with pytest.raises(StreamFailed) as caught:
                await envoy.request()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE

    async def test_service_that_never_ends(self) -> None:
        release = asyncio.Event()

        async def handle(context: Any) -> None:
            await context.read()
            await context.write(on_headers())
            await release.wait()

        async with serving(handle) as (target, _), ScriptedEnvoy(target, message_timeout_s=1.0) as envoy:
            exchange = await envoy.request("GET")
            with pytest.raises(ProtocolViolation, match="does not end its side"):
                await exchange.finish()
            release.set()


class TestEndings:
    """Whether a stream is half-closed or cancelled, the service sees it; and it sees a client that leaves."""

    async def test_half_close(self) -> None:
        ends: list[Any] = []

        async def handle(context: Any) -> None:
            await context.read()
            await context.write(on_headers())
            ends.append(await context.read())

        async with serving(handle) as (target, _), ScriptedEnvoy(target) as envoy:
            await (await envoy.request("GET")).finish()
        assert ends == [grpc.aio.EOF]

    @pytest.mark.parametrize("way", ["reset", "cancelled call", "left context"])
    async def test_cancel(self, way: str) -> None:
        waiting = asyncio.Event()

        async def handle(context: Any) -> None:
            await context.read()
            waiting.set()
            await asyncio.Event().wait()

        async with serving(handle) as (target, servicer), ScriptedEnvoy(target) as envoy:
            if way == "cancelled call":
                task = asyncio.create_task(envoy.request("GET"))
                await waiting.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            elif way == "reset":
                exchange = envoy.open("GET")
                running = asyncio.create_task(exchange.run([]))
                await waiting.wait()
                await exchange.reset()
                with pytest.raises(StreamFailed, match="CANCELLED"):
                    await running
            else:
                await envoy.open("GET").stream.send(ext_proc.ProcessingRequest())
                await waiting.wait()
                await envoy.__aexit__(None, None, None)
            await asyncio.wait_for(servicer.ended.wait(), 5)


class TestRawStream:
    async def test_any_message_any_reply(self) -> None:
        async def handle(context: Any) -> None:
            while (message := await context.read()) is not grpc.aio.EOF:
                await context.write(Reply() if message.observability_mode else on_trailers())

        async with serving(handle) as (target, _), ScriptedEnvoy(target) as envoy:
            stream = envoy.raw_stream()
            await stream.send(ext_proc.ProcessingRequest(observability_mode=True))
            assert await stream.receive() == Reply()
            with pytest.raises(TimeoutError):
                await stream.receive(within_s=0.01)
            await stream.send(ext_proc.ProcessingRequest())
            await stream.send(ext_proc.ProcessingRequest())
            await stream.arrived(3)
            assert stream.pending == 2
            assert stream.code is None
            await stream.half_close()
            assert await stream.ended() == [on_trailers(), on_trailers()]
            assert await stream.receive() is None
            assert stream.code is grpc.StatusCode.OK
