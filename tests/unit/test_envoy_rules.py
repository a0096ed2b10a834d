"""What a service must not do fails in the scripted Envoy, with what a real Envoy would have made of it."""

from __future__ import annotations

import pytest

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.support.envoy_rules import MISMATCH, ProtocolViolation
from tests.support.scripted_envoy import Mode, ScriptedEnvoy
from tests.support.scripted_service import (
    BODY,
    Reply,
    Script,
    appending,
    chunk,
    header,
    immediate,
    length,
    metadata,
    more_time,
    on_body,
    on_headers,
    on_response,
    overriding,
    play,
    scripted,
    serving,
)

HEADERS, FULL_DUPLEX = "request_headers", "FULL_DUPLEX_STREAMED"
APPEND, IF_ABSENT = HeaderValueOption.APPEND_IF_EXISTS_OR_ADD, HeaderValueOption.ADD_IF_ABSENT
SPURIOUS, UNHANDLED = "spurious_message", "unhandled_message"
INVALID = "header_mutation_set_contains_invalid_character"
TIMEOUT = "ext_proc_error_per-message_timeout_exceeded"


def clearing() -> Reply:
    reply = on_body()
    reply.request_body.response.body_mutation.clear_body = True
    return reply


def flat_metadata() -> Reply:
    reply = on_headers()
    reply.dynamic_metadata.update({"envoy.lb": "text"})
    return reply


BUFFERED_VIOLATIONS: dict[str, tuple[Script, str, int | None, str]] = {
    "nothing in it": ({HEADERS: [Reply()]}, "without content", 500, UNHANDLED),
    "only metadata": ({HEADERS: [metadata(Reply(), a="1")]}, "without content", 500, UNHANDLED),
    "phase to come": ({HEADERS: [on_body()]}, "request_body in reply to request_headers", 500, SPURIOUS),
    "phase gone by": ({"request_body": [on_headers()]}, "request_headers in reply to request_body", 500, SPURIOUS),
    "response phase": ({"request_body": [on_response()]}, "response_headers in reply to", 500, SPURIOUS),
    "two for headers": ({HEADERS: [on_headers(), on_headers()]}, "no message waits|in reply to", 500, SPURIOUS),
    "two for the body": ({"request_body": [on_body(), on_body()]}, "no message waits|in reply to", 500, SPURIOUS),
    "two for the response": (
        {"response_headers": [on_response(), on_response()]},
        "nothing waits for: response_headers",
        500,
        SPURIOUS,
    ),
    "after an immediate one": ({HEADERS: [immediate(), on_headers()]}, "nothing waits for", 500, SPURIOUS),
    "value": ({HEADERS: [on_headers(header("x-a", value="1"))]}, "x-a: `value` is filled", None, ""),
    "both values": ({HEADERS: [on_headers(header("x-a", b"1", value="1"))]}, "x-a: `value` is filled", None, ""),
    "default action": (
        {HEADERS: [on_headers(header("x-a", b"1", action=APPEND))]},
        "APPEND_IF_EXISTS_OR_ADD",
        None,
        "",
    ),
    "other action": ({HEADERS: [on_headers(header("x-a", b"1", action=IF_ABSENT))]}, "is ADD_IF_ABSENT", None, ""),
    "append": ({HEADERS: [on_headers(appending("x-a", b"1", append=True))]}, "deprecated `append`", None, ""),
    "append false": ({HEADERS: [on_headers(appending("x-a", b"1", append=False))]}, "deprecated `append`", None, ""),
    "no name": ({HEADERS: [on_headers(header("", b"1"))]}, "without a name", None, ""),
    "bad name": ({HEADERS: [on_headers(header("x a", b"1"))]}, "no valid header", 500, INVALID),
    "line break": ({HEADERS: [on_headers(header("x-a", b"1\r\nb: 2"))]}, "no valid header", 500, INVALID),
    "control byte": ({HEADERS: [on_headers(header("x-a", b"\x01"))]}, "no valid header", 500, INVALID),
    "method": ({HEADERS: [on_headers(header(":method", b"PUT"))]}, ":method: routing headers", None, ""),
    "scheme": ({HEADERS: [on_headers(header(":scheme", b"https"))]}, ":scheme: routing headers", None, ""),
    "authority": ({HEADERS: [on_headers(header(":authority", b"a"))]}, ":authority: routing headers", None, ""),
    "host": ({"request_body": [on_body(header("Host", b"a"))]}, "host: routing headers", None, ""),
    "envoy header": ({HEADERS: [on_headers(header("x-envoy-a", b"1"))]}, "x-envoy-a: headers of Envoy", None, ""),
    "transfer-encoding": (
        {HEADERS: [on_headers(header("transfer-encoding", b"chunked"))]},
        "transfer-encoding: goes out beside",
        None,
        "",
    ),
    "removed host": ({HEADERS: [on_headers(remove=["Host"])]}, "host cannot be removed", None, ""),
    "removed path": ({HEADERS: [on_headers(remove=[":path"])]}, ":path cannot be removed", None, ""),
    "length not set": ({"request_body": [on_body(body=b"abc")]}, "is 7, the body has 3 bytes", 500, MISMATCH),
    "wrong length": ({"request_body": [on_body(length(4), body=b"abc")]}, "is 4, the body has 3", 500, MISMATCH),
    "length not cleared": ({"request_body": [clearing()]}, "is 7, the body has 0 bytes", 500, MISMATCH),
    "length alone": ({"request_body": [on_body(length(4))]}, "taken for another request", None, ""),
    "length at the headers": ({HEADERS: [on_headers(length(4))]}, "taken for another request", None, ""),
    "streamed chunk": ({"request_body": [chunk(b"abc", end=True)]}, "streamed_response in the BUFFERED", 500, MISMATCH),
    "body at the headers": (
        {HEADERS: [on_headers(body_mutation=ext_proc.BodyMutation(body=b"abc"))]},
        "without CONTINUE_AND_REPLACE",
        None,
        "",
    ),
    "replace at the body": (
        {"request_body": [on_body(status=1)]},
        "CONTINUE_AND_REPLACE in a reply to a body",
        None,
        "",
    ),
    "trailers": ({"request_body": [on_body(trailers=HeaderMap())]}, "trailers in a reply", None, ""),
    "metadata text": ({HEADERS: [flat_metadata()]}, "'envoy.lb' is not an object but string_value", None, ""),
    "time and more": ({HEADERS: [metadata(more_time(7), a="1")]}, "dynamic_metadata beside override_message", None, ""),
    "time and a reply": (
        {HEADERS: [Reply(request_headers=ext_proc.HeadersResponse(), override_message_timeout={"seconds": 1})]},
        "request_headers beside override_message_timeout",
        None,
        "",
    ),
    "time twice": ({HEADERS: [more_time(7), more_time(8)]}, "a second time for request_headers", None, ""),
    "too little time": ({HEADERS: [more_time(0.0005)]}, "0.0005 s is not within", None, ""),
    "too much time": ({HEADERS: [more_time(61)]}, "61 s is not within 1 ms and 60 s", None, ""),
    "mode at the body": (
        {"request_body": [overriding(on_body())]},
        "mode_override in a reply to request_body",
        None,
        "",
    ),
    "mode when immediate": ({HEADERS: [overriding(immediate())]}, "beside an immediate response", None, ""),
    "no status": ({HEADERS: [immediate(status=0)]}, "immediate response with status 0", 200, ""),
    "status header": ({HEADERS: [immediate(header(":status", b"500"))]}, ":status: Envoy sets it itself", None, ""),
    "immediate length": ({HEADERS: [immediate(length(2))]}, "content-length: Envoy sets it itself", None, ""),
    "immediate append": ({HEADERS: [immediate(header("x-a", b"1", action=APPEND))]}, "APPEND_IF_EXISTS", None, ""),
    "response length": (
        {"response_headers": [on_response(length(3))]},
        "content-length of a response changed",
        None,
        "",
    ),
    "response method": ({"response_headers": [on_response(header(":method", b"A"))]}, "no response header", None, ""),
    "response value": ({"response_headers": [on_response(header("x-a", value="1"))]}, "`value` is filled", None, ""),
    "no reply": ({"request_body": []}, "no reply to request_body within 1 s", 504, TIMEOUT),
    "no reply to response": ({"response_headers": []}, "no reply to response_headers within", 504, TIMEOUT),
}
PLAIN = "spurious_message:_Normal_body_mutation_response_is_received_while_body_mode__is_FULL_DUPLEX_STREAMED"
FULL_DUPLEX_VIOLATIONS: dict[str, tuple[Script, str, int | None, str]] = {
    "plain body": ({"request_body": [on_body(body=b"abc")]}, "without streamed_response", 500, PLAIN),
    "cleared body": ({"request_body": [clearing()]}, "without streamed_response", 500, PLAIN),
    "empty body reply": ({"request_body": [on_body()]}, "without streamed_response", 500, PLAIN),
    "large chunk": ({"request_body": [chunk(b"x" * 65_537, end=True)]}, "streamed chunk of 65537 bytes", None, ""),
    "late header": (
        {"request_body": [chunk(b"abc", header("x-a", b"1"), end=True)]},
        "header mutation in a reply to a streamed body",
        None,
        "",
    ),
    "no end": ({"request_body": [chunk(b"abc")]}, "no reply to request_body within 1 s", 504, TIMEOUT),
    "two ends": (
        {"request_body": [chunk(b"abc", end=True), chunk(b"", end=True)]},
        "no message waits|request_body in reply to response_headers",
        500,
        SPURIOUS,
    ),
    "body before headers": (
        {HEADERS: [], "request_body": [chunk(b"abc", end=True), on_headers()]},
        "request_body in reply to request_headers",
        500,
        SPURIOUS,
    ),
    "length": ({HEADERS: [on_headers(length(7))]}, "content-length: removed from streamed requests", None, ""),
    "more time": ({HEADERS: [more_time(7), on_headers()]}, "full-duplex mode, which has no time limit", None, ""),
    "mode": ({HEADERS: [overriding(on_headers())]}, "mode_override to NONE while the body is", None, ""),
}


class TestViolations:
    async def check(self, mode: Mode, script: Script, match: str, status: int | None, details: str) -> None:
        # Where a reply is missing, only its time limit tells; elsewhere none should run out.
        limit_s = 1.0 if details == TIMEOUT else 10.0
        with pytest.raises(ProtocolViolation, match=match) as caught:
            await play(script, mode, message_timeout_s=limit_s, max_message_timeout_s=60.0)
        assert (caught.value.status, caught.value.details) == (status, details)

    @pytest.mark.parametrize("name", BUFFERED_VIOLATIONS)
    async def test_buffered(self, name: str) -> None:
        await self.check("BUFFERED", *BUFFERED_VIOLATIONS[name])

    @pytest.mark.parametrize("name", FULL_DUPLEX_VIOLATIONS)
    async def test_full_duplex(self, name: str) -> None:
        await self.check("FULL_DUPLEX_STREAMED", *FULL_DUPLEX_VIOLATIONS[name])

    async def test_end_of_stream_before_trailers(self) -> None:
        script = {"request_body": [chunk(b"abc", end=True)]}
        with pytest.raises(ProtocolViolation, match="end_of_stream in a body that has trailers"):
            await play(script, "FULL_DUPLEX_STREAMED", trailers=[("x-t", "1")])

    async def test_mode_override_not_allowed(self) -> None:
        script = {HEADERS: [overriding(on_headers(), request_body_mode="NONE")]}
        with pytest.raises(ProtocolViolation, match="which the filter does not allow"):
            await play(script, allow_mode_override=False)

    async def test_reply_ahead_of_its_message(self) -> None:
        async with (
            serving(scripted({"request_body": [on_body(), on_response()]})) as (target, _),
            ScriptedEnvoy(target) as envoy,
        ):
            exchange = await envoy.request(body=BODY)
            await exchange.stream.arrived(3)
            with pytest.raises(ProtocolViolation, match="a reply although no message waits for one"):
                await exchange.response()
