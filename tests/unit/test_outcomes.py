"""How a request ended, by its access-log entry, in the shapes that Envoy 1.40 writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.outcomes import Ending, Outcome, Phase, classify, is_final
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2

FLAGS = [name for name in accesslog_pb2.ResponseFlags.DESCRIPTOR.fields_by_name if name != "unauthorized_details"]


@dataclass
class Log:
    """One entry, and the ending it stands for."""

    what: str
    ending: tuple[Outcome, Phase, bool]
    code: int = 200
    details: str = "via_upstream"
    flags: list[str] = field(default_factory=list)
    body: int = 0
    upstream: bool = True
    """An upstream host had been chosen."""
    first_byte: bool = True
    last_byte: bool = True
    path: str = "/v1/chat/completions"

    @property
    def entry(self) -> accesslog_pb2.HTTPAccessLogEntry:
        entry = accesslog_pb2.HTTPAccessLogEntry()
        common = entry.common_properties
        if self.upstream:
            common.upstream_remote_address.socket_address.address = "10.0.0.8"
        if self.first_byte:
            common.time_to_first_upstream_rx_byte.FromMilliseconds(3)
        if self.last_byte:
            common.time_to_last_upstream_rx_byte.FromMilliseconds(9)
        for flag in self.flags:
            setattr(common.response_flags, flag, True)
        entry.request.path = self.path
        entry.response.response_code.value = self.code
        entry.response.response_code_details = self.details
        entry.response.response_body_bytes = self.body
        return entry


def _cut(what: str, ending: tuple[Outcome, Phase, bool], **changes: Any) -> Log:
    values = {"flags": ["downstream_connection_termination"], "details": "downstream_remote_disconnect"}
    return Log(what, ending, **(values | {"last_byte": False} | changes))


def _lost(what: str, ending: tuple[Outcome, Phase, bool], **changes: Any) -> Log:
    return Log(what, ending, **({"code": 503, "first_byte": False, "last_byte": False, "body": 228} | changes))


def _local(what: str, ending: tuple[Outcome, Phase, bool], **changes: Any) -> Log:
    return Log(what, ending, **({"upstream": False, "first_byte": False, "last_byte": False, "body": 90} | changes))


COMPLETED, CLIENT_RESET, DECODE_RESET = Outcome.COMPLETED, Outcome.CLIENT_RESET, Outcome.DECODE_RESET
REFUSED, UNREACHABLE, TIMED_OUT = Outcome.DECODE_REFUSED, Outcome.DECODE_UNREACHABLE, Outcome.TIMED_OUT
OURS, UNKNOWN = Outcome.REJECTED_BY_US, Outcome.UNKNOWN

SEEN = [
    Log("a complete answer", (COMPLETED, "streaming", True), body=187),
    Log("a complete stream", (COMPLETED, "streaming", True), body=365),
    Log("an empty 200", (COMPLETED, "awaiting_first_token", False)),
    Log("a 204", (COMPLETED, "awaiting_first_token", False), code=204),
    Log("a redirect", (COMPLETED, "streaming", False), code=307, body=20),
    Log("decoder's 400", (REFUSED, "streaming", False), code=400, body=28),
    Log("decoder's 429 without a body", (REFUSED, "awaiting_first_token", False), code=429),
    Log("decoder's 500", (REFUSED, "streaming", False), code=500, body=28),
    Log(
        "decoder's 503 after retries",
        (REFUSED, "streaming", False),
        code=503,
        flags=["upstream_retry_limit_exceeded"],
        body=1,
    ),
    _cut("client cut mid-stream", (CLIENT_RESET, "streaming", True), body=9),
    _cut("client cut after the headers", (CLIENT_RESET, "awaiting_first_token", False)),
    _cut("client cut after the last token, decoder still open", (CLIENT_RESET, "streaming", True), body=23),
    _cut("client cut right after the last byte", (COMPLETED, "streaming", True), body=23, last_byte=True),
    _cut(
        "client cut while the decoder was silent", (CLIENT_RESET, "awaiting_headers", False), code=0, first_byte=False
    ),
    _cut(
        "client cut during the prefill",
        (CLIENT_RESET, "before_dispatch", False),
        code=0,
        upstream=False,
        first_byte=False,
    ),
    _cut("client cut during a decoder's 400", (CLIENT_RESET, "streaming", False), code=400, body=10),
    _cut("client cut after a decoder's 400", (CLIENT_RESET, "streaming", False), code=400, body=28, last_byte=True),
    _cut("client cut after an empty 200", (CLIENT_RESET, "awaiting_first_token", False), last_byte=True),
    _cut(
        "HTTP/2 client reset its stream", (CLIENT_RESET, "streaming", True), flags=["downstream_remote_reset"], body=9
    ),
    _cut("no flag, no code", (CLIENT_RESET, "awaiting_headers", False), flags=[], code=0, first_byte=False),
    Log(
        "decoder died mid-stream",
        (DECODE_RESET, "streaming", True),
        flags=["upstream_protocol_error"],
        details="upstream_reset_after_response_started{protocol_error}",
        body=9,
        last_byte=False,
    ),
    Log(
        "decoder died after the headers",
        (DECODE_RESET, "awaiting_first_token", False),
        flags=["upstream_connection_termination"],
        details="upstream_reset_after_response_started{connection_termination}",
        last_byte=False,
    ),
    _lost(
        "decoder closed the connection without an answer",
        (DECODE_RESET, "awaiting_headers", False),
        flags=["upstream_connection_termination"],
        details="upstream_reset_before_response_started{connection_termination}",
    ),
    _lost(
        "decoder refused the connection",
        (UNREACHABLE, "awaiting_headers", False),
        flags=["upstream_connection_failure"],
        details="upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}",
    ),
    _lost(
        "all decoders refused the connection",
        (UNREACHABLE, "awaiting_headers", False),
        flags=["upstream_connection_failure", "upstream_retry_limit_exceeded"],
        details="upstream_reset_before_response_started{remote_connection_failure}",
    ),
    _lost(
        "reset without a flag",
        (DECODE_RESET, "awaiting_headers", False),
        details="upstream_reset_before_response_started{local_reset}",
    ),
    _lost(
        "no decoder is healthy",
        (UNREACHABLE, "before_dispatch", False),
        flags=["no_healthy_upstream"],
        details="no_healthy_upstream",
        upstream=False,
    ),
    _lost(
        "Envoy's route timeout",
        (TIMED_OUT, "awaiting_headers", False),
        code=504,
        flags=["upstream_request_timeout"],
        details="response_timeout",
    ),
    Log(
        "idle timeout mid-stream",
        (TIMED_OUT, "streaming", True),
        flags=["stream_idle_timeout"],
        details="stream_idle_timeout",
        body=9,
        last_byte=False,
    ),
    _local("our 503", (OURS, "before_dispatch", False), code=503, details="extproc_prefill_unavailable"),
    _local("our 415", (OURS, "before_dispatch", False), code=415, details="extproc_unsupported_content_encoding"),
    _local(
        "a prefiller's 400", (OURS, "before_dispatch", False), code=400, details="extproc_refused_by_prefill_engine"
    ),
    _local(
        "a length-changing mutation without its content-length",
        (UNKNOWN, "before_dispatch", False),
        code=500,
        details="mismatch_between_content_length_and_the_length_of_the_mutated_body",
    ),
    _local("no Host", (UNKNOWN, "before_dispatch", False), code=400, details="missing_host_header"),
    _local(
        "our timeout as Envoy sees it", (UNKNOWN, "before_dispatch", False), code=504, details="ext_proc_error_timeout"
    ),
    _local("too large a body", (UNKNOWN, "before_dispatch", False), code=413, details="request_payload_too_large"),
    _local("a 200 that Envoy made up", (UNKNOWN, "before_dispatch", False), details="direct_response"),
    _local(
        "a 200 from a cache",
        (UNKNOWN, "before_dispatch", False),
        flags=["response_from_cache_filter"],
        details="response_from_cache_filter",
    ),
]


@pytest.mark.parametrize("log", SEEN, ids=lambda log: log.what)
def test_endings(log: Log) -> None:
    assert classify(log.entry) == Ending(*log.ending)


def test_an_empty_entry_proves_nothing() -> None:
    assert classify(accesslog_pb2.HTTPAccessLogEntry()) == Ending(UNKNOWN, "before_dispatch", False)


# ── each flag of Envoy's ─────────────────────────────────────────────────────────────────────────────────────────────

BY_FLAG: dict[str, Outcome | None] = {
    "failed_local_healthcheck": None,
    "no_healthy_upstream": UNREACHABLE,
    "upstream_request_timeout": TIMED_OUT,
    "local_reset": DECODE_RESET,
    "upstream_remote_reset": DECODE_RESET,
    "upstream_connection_failure": UNREACHABLE,
    "upstream_connection_termination": DECODE_RESET,
    "upstream_overflow": UNREACHABLE,
    "no_route_found": None,
    "delay_injected": None,
    "fault_injected": None,
    "rate_limited": None,
    "rate_limit_service_error": None,
    "downstream_connection_termination": CLIENT_RESET,
    "upstream_retry_limit_exceeded": None,
    "stream_idle_timeout": TIMED_OUT,
    "invalid_envoy_request_headers": None,
    "downstream_protocol_error": CLIENT_RESET,
    "upstream_max_stream_duration_reached": TIMED_OUT,
    "response_from_cache_filter": None,
    "no_filter_config_found": None,
    "duration_timeout": TIMED_OUT,
    "upstream_protocol_error": DECODE_RESET,
    "no_cluster_found": UNREACHABLE,
    "overload_manager": None,
    "dns_resolution_failure": UNREACHABLE,
    "downstream_remote_reset": CLIENT_RESET,
}


def test_each_flag_has_been_thought_of() -> None:
    assert list(BY_FLAG) == FLAGS


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_tells_the_outcome_whatever_code_and_details_say(flag: str) -> None:
    """A flag that says nothing of the decode leg leaves it to code and details."""
    told = BY_FLAG[flag]

    for code, details, otherwise in ((503, "", UNKNOWN), (0, "", UNKNOWN), (200, "via_upstream", COMPLETED)):
        log = Log("", (told or otherwise, "streaming", code == 200), code, details, [flag], body=9, last_byte=False)
        assert classify(log.entry) == Ending(*log.ending)


@pytest.mark.parametrize("flag", FLAGS)
def test_our_own_answer_is_ours_whatever_the_flag(flag: str) -> None:
    log = _local("", (OURS, "before_dispatch", False), code=503, details="extproc_no_decoder", flags=[flag])

    assert classify(log.entry) == Ending(*log.ending)


@pytest.mark.parametrize("flag", [name for name, outcome in BY_FLAG.items() if outcome is CLIENT_RESET])
@pytest.mark.parametrize("other", [name for name, outcome in BY_FLAG.items() if outcome not in (None, CLIENT_RESET)])
def test_a_client_that_left_explains_what_else_went_wrong(flag: str, other: str) -> None:
    log = Log("", (CLIENT_RESET, "streaming", True), flags=[flag, other], body=9, last_byte=False)

    assert classify(log.entry) == Ending(*log.ending)


@pytest.mark.parametrize("flag", [name for name, outcome in BY_FLAG.items() if outcome is CLIENT_RESET])
def test_a_hang_up_right_after_the_last_byte_is_completed(flag: str) -> None:
    after = Log("", (COMPLETED, "streaming", True), flags=[flag], details="", body=9, last_byte=True)
    before = Log("", (CLIENT_RESET, "streaming", True), flags=[flag], details="", body=9, last_byte=False)

    assert classify(after.entry) == Ending(*after.ending)
    assert classify(before.entry) == Ending(*before.ending)


# ── bytes that prove nothing ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses?x=1"])
def test_events_before_the_first_token_do_not_prove_that_the_blocks_were_read(path: str) -> None:
    cut = _cut("", (CLIENT_RESET, "streaming", False), body=900, path=path)
    died = Log("", (DECODE_RESET, "streaming", False), flags=["local_reset"], body=900, last_byte=False, path=path)
    complete = Log("", (COMPLETED, "streaming", True), body=900, path=path)

    for log in (cut, died, complete):
        assert classify(log.entry) == Ending(*log.ending)


# ── which entries count ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", accesslog_pb2.AccessLogType.values())
def test_only_the_entry_at_the_requests_end_is_final(kind: accesslog_pb2.AccessLogType) -> None:
    entry = accesslog_pb2.HTTPAccessLogEntry()
    entry.common_properties.access_log_type = kind

    assert is_final(entry) == (accesslog_pb2.AccessLogType.Name(kind) in ("NotSet", "DownstreamEnd"))
