"""Replies that break the protocol, by name."""

from __future__ import annotations

from dataclasses import dataclass

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from tests.support.envoy_rules import MISMATCH
from tests.support.scripted_service import (
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
)

HEADERS, FULL_DUPLEX = "request_headers", "FULL_DUPLEX_STREAMED"
APPEND, IF_ABSENT = HeaderValueOption.APPEND_IF_EXISTS_OR_ADD, HeaderValueOption.ADD_IF_ABSENT
SPURIOUS, UNHANDLED = "spurious_message", "unhandled_message"
INVALID = "header_mutation_set_contains_invalid_character"
TIMEOUT = "ext_proc_error_per-message_timeout_exceeded"

# What clients of a real Envoy get.
REFUSED = (429, "")
LATE = (504, TIMEOUT)
HANGS = (0, "")


@dataclass(frozen=True)
class Violation:
    script: Script
    problem: str
    """A pattern of the scripted Envoy's message."""
    status: int | None = None
    """What the client gets from Envoy for it; None where Envoy just does not act upon it."""
    details: str = ""
    real: tuple[int, str] | None = None
    """Status and response code details at a real Envoy, where they do not follow from the two above."""


def clearing() -> Reply:
    reply = on_body()
    reply.request_body.response.body_mutation.clear_body = True
    return reply


def flat_metadata() -> Reply:
    reply = on_headers()
    reply.dynamic_metadata.update({"envoy.lb": "text"})
    return reply


BUFFERED_VIOLATIONS: dict[str, Violation] = {
    "nothing in it": Violation({HEADERS: [Reply()]}, "without content", 500, UNHANDLED),
    "only metadata": Violation({HEADERS: [metadata(Reply(), a="1")]}, "without content", 500, UNHANDLED),
    "phase to come": Violation({HEADERS: [on_body()]}, "request_body in reply to request_headers", 500, SPURIOUS),
    "phase gone by": Violation(
        {"request_body": [on_headers()]}, "request_headers in reply to request_body", 500, SPURIOUS
    ),
    "response phase": Violation({"request_body": [on_response()]}, "response_headers in reply to", 500, SPURIOUS),
    "two for headers": Violation(
        {HEADERS: [on_headers(), on_headers()]}, "no message waits|in reply to", 500, SPURIOUS
    ),
    "two for the body": Violation(
        {"request_body": [on_body(), on_body()]}, "no message waits|in reply to", 500, SPURIOUS
    ),
    "two for the response": Violation(
        {"response_headers": [on_response(), on_response()]}, "nothing waits for: response_headers"
    ),
    "after an immediate one": Violation({HEADERS: [immediate(), on_headers()]}, "nothing waits for", real=REFUSED),
    "value": Violation({HEADERS: [on_headers(header("x-a", value="1"))]}, "x-a: `value` is filled"),
    "both values": Violation({HEADERS: [on_headers(header("x-a", b"1", value="1"))]}, "x-a: `value` is filled"),
    "default action": Violation(
        {HEADERS: [on_headers(header("x-a", b"1", action=APPEND))]},
        "APPEND_IF_EXISTS_OR_ADD",
    ),
    "other action": Violation({HEADERS: [on_headers(header("x-a", b"1", action=IF_ABSENT))]}, "is ADD_IF_ABSENT"),
    "append": Violation({HEADERS: [on_headers(appending("x-a", b"1", append=True))]}, "deprecated `append`"),
    "append false": Violation({HEADERS: [on_headers(appending("x-a", b"1", append=False))]}, "deprecated `append`"),
    "no name": Violation(
        {HEADERS: [on_headers(header("", b"1"))]},
        "without a name",
        real=(503, "upstream_reset_before_response_started{connection_termination}"),
    ),
    "bad name": Violation({HEADERS: [on_headers(header("x a", b"1"))]}, "no valid header", 500, INVALID),
    "line break": Violation({HEADERS: [on_headers(header("x-a", b"1\r\nb: 2"))]}, "no valid header", 500, INVALID),
    "control byte": Violation({HEADERS: [on_headers(header("x-a", b"\x01"))]}, "no valid header", 500, INVALID),
    "method": Violation({HEADERS: [on_headers(header(":method", b"PUT"))]}, ":method: routing headers"),
    "scheme": Violation({HEADERS: [on_headers(header(":scheme", b"https"))]}, ":scheme: routing headers"),
    "authority": Violation({HEADERS: [on_headers(header(":authority", b"a"))]}, ":authority: routing headers"),
    "host": Violation({"request_body": [on_body(header("Host", b"a"))]}, "host: routing headers"),
    "envoy header": Violation({HEADERS: [on_headers(header("x-envoy-a", b"1"))]}, "x-envoy-a: headers of Envoy"),
    "transfer-encoding": Violation(
        {HEADERS: [on_headers(header("transfer-encoding", b"chunked"))]},
        "transfer-encoding: goes out beside",
        real=HANGS,
    ),
    "removed host": Violation({HEADERS: [on_headers(remove=["Host"])]}, "host cannot be removed"),
    "removed path": Violation({HEADERS: [on_headers(remove=[":path"])]}, ":path cannot be removed"),
    "length not set": Violation({"request_body": [on_body(body=b"abc")]}, "is 7, the body has 3 bytes", 500, MISMATCH),
    "wrong length": Violation(
        {"request_body": [on_body(length(4), body=b"abc")]}, "is 4, the body has 3", 500, MISMATCH
    ),
    "length not cleared": Violation({"request_body": [clearing()]}, "is 7, the body has 0 bytes", 500, MISMATCH),
    "length alone": Violation({"request_body": [on_body(length(4))]}, "taken for another request"),
    "length at the headers": Violation({HEADERS: [on_headers(length(4))]}, "taken for another request"),
    "streamed chunk": Violation(
        {"request_body": [chunk(b"abc", end=True)]}, "streamed_response in the BUFFERED", 500, MISMATCH
    ),
    "body at the headers": Violation(
        {HEADERS: [on_headers(body_mutation=ext_proc.BodyMutation(body=b"abc"))]},
        "without CONTINUE_AND_REPLACE",
    ),
    "replace at the body": Violation(
        {"request_body": [on_body(status=1)]},
        "CONTINUE_AND_REPLACE in a reply to a body",
    ),
    "trailers": Violation({"request_body": [on_body(trailers=HeaderMap())]}, "trailers in a reply"),
    "metadata text": Violation({HEADERS: [flat_metadata()]}, "'envoy.lb' is not an object but string_value"),
    "time and more": Violation(
        {HEADERS: [metadata(more_time(0.7), a="1")]}, "dynamic_metadata beside override_message", real=LATE
    ),
    "time and a reply": Violation(
        {HEADERS: [Reply(request_headers=ext_proc.HeadersResponse(), override_message_timeout={"nanos": 700_000_000})]},
        "request_headers beside override_message_timeout",
        real=LATE,
    ),
    "time twice": Violation(
        {HEADERS: [more_time(0.7), more_time(0.8)]}, "a second time for request_headers", real=LATE
    ),
    "too little time": Violation({HEADERS: [more_time(0.0005)]}, "0.0005 s is not within", real=LATE),
    "too much time": Violation({HEADERS: [more_time(61)]}, "61 s is not within 1 ms and 60 s", real=LATE),
    "mode at the body": Violation(
        {"request_body": [overriding(on_body())]},
        "mode_override in a reply to request_body",
    ),
    "mode when immediate": Violation(
        {HEADERS: [overriding(immediate())]}, "beside an immediate response", real=REFUSED
    ),
    "no status": Violation({HEADERS: [immediate(status=0)]}, "immediate response with status 0", 200, ""),
    "status header": Violation(
        {HEADERS: [immediate(header(":status", b"500"))]}, ":status: Envoy sets it itself", real=REFUSED
    ),
    "immediate length": Violation(
        {HEADERS: [immediate(length(2))]}, "content-length: Envoy sets it itself", real=REFUSED
    ),
    "immediate append": Violation(
        {HEADERS: [immediate(header("x-a", b"1", action=APPEND))]}, "APPEND_IF_EXISTS", real=REFUSED
    ),
    "response length": Violation(
        {"response_headers": [on_response(length(3))]},
        "content-length of a response changed",
    ),
    "response method": Violation({"response_headers": [on_response(header(":method", b"A"))]}, "no response header"),
    "response value": Violation({"response_headers": [on_response(header("x-a", value="1"))]}, "`value` is filled"),
    "no reply": Violation({"request_body": []}, "no reply to request_body within 1 s", 504, TIMEOUT),
    "no reply to response": Violation({"response_headers": []}, "no reply to response_headers within", 504, TIMEOUT),
}
PLAIN = "spurious_message:_Normal_body_mutation_response_is_received_while_body_mode__is_FULL_DUPLEX_STREAMED"
FULL_DUPLEX_VIOLATIONS: dict[str, Violation] = {
    "plain body": Violation({"request_body": [on_body(body=b"abc")]}, "without streamed_response", 500, PLAIN),
    "cleared body": Violation({"request_body": [clearing()]}, "without streamed_response", 500, PLAIN),
    "empty body reply": Violation({"request_body": [on_body()]}, "without streamed_response", 500, PLAIN),
    "large chunk": Violation({"request_body": [chunk(b"x" * 65_537, end=True)]}, "streamed chunk of 65537 bytes"),
    "late header": Violation(
        {"request_body": [chunk(b"abc", header("x-a", b"1"), end=True)]},
        "header mutation in a reply to a streamed body",
    ),
    "no end": Violation(
        {"request_body": [chunk(b"abc")]}, "no reply to request_body within 1 s", 504, TIMEOUT, real=HANGS
    ),
    "two ends": Violation(
        {"request_body": [chunk(b"abc", end=True), chunk(b"", end=True)]},
        "no message waits|request_body in reply to response_headers",
        500,
        SPURIOUS,
    ),
    "body before headers": Violation(
        {HEADERS: [], "request_body": [chunk(b"abc", end=True), on_headers()]},
        "request_body in reply to request_headers",
        500,
        SPURIOUS,
    ),
    "length": Violation({HEADERS: [on_headers(length(7))]}, "content-length: removed from streamed requests"),
    "more time": Violation({HEADERS: [more_time(0.7), on_headers()]}, "full-duplex mode, which has no time limit"),
    "mode": Violation({HEADERS: [overriding(on_headers())]}, "mode_override to NONE while the body is"),
}
