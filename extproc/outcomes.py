"""How a request ended, read from Envoy's access log: a pure function of one log entry.

The end of the gRPC stream says nothing about success, and response headers come before the first token: only body bytes
of a decoder's successful answer prove that it has read the KV blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal

from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2

Phase = Literal["before_dispatch", "awaiting_headers", "awaiting_first_token", "streaming"]


class Outcome(enum.StrEnum):
    COMPLETED = "completed"
    CLIENT_RESET = "client_reset"
    DECODE_RESET = "decode_reset"
    DECODE_UNREACHABLE = "decode_unreachable"
    DECODE_REFUSED = "decode_refused"
    TIMED_OUT = "timed_out"
    REJECTED_BY_US = "rejected_by_us"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Ending:
    """``phase`` is how far the decode leg had come; ``kv_read`` whether the decoder is known to have the KV blocks."""

    outcome: Outcome
    phase: Phase
    kv_read: bool


OWN_DETAILS: Final = "extproc_"
"""Prefix of the response code details that our own answers carry."""

_UNREACHABLE: Final = (
    "upstream_connection_failure",
    "no_healthy_upstream",
    "upstream_overflow",
    "no_cluster_found",
    "dns_resolution_failure",
)
_CLIENT: Final = ("downstream_connection_termination", "downstream_protocol_error", "downstream_remote_reset")
_TIMED_OUT: Final = (
    "upstream_request_timeout",
    "stream_idle_timeout",
    "upstream_max_stream_duration_reached",
    "duration_timeout",
)
_RESET: Final = (
    "upstream_connection_termination",
    "upstream_remote_reset",
    "local_reset",
    "upstream_protocol_error",
)
# There vLLM streams events (response.created) before the first token.
_EARLY_EVENTS: Final = "/v1/responses"

_FINAL_TYPES: Final = (accesslog_pb2.NotSet, accesslog_pb2.DownstreamEnd)


def is_final(entry: accesslog_pb2.HTTPAccessLogEntry) -> bool:
    """Whether the entry tells the request's end; Envoy can be told to log its start and its course as well."""
    return entry.common_properties.access_log_type in _FINAL_TYPES


def classify(entry: accesslog_pb2.HTTPAccessLogEntry) -> Ending:
    """``entry`` must be final (:func:`is_final`)."""
    common, response = entry.common_properties, entry.response
    code = response.response_code.value
    details = response.response_code_details
    phase = _phase(entry)
    complete = common.HasField("time_to_last_upstream_rx_byte")
    talked = 200 <= code < 300 and phase == "streaming"
    kv_read = talked and (complete or not entry.request.path.startswith(_EARLY_EVENTS))

    if details.startswith(OWN_DETAILS):
        return Ending(Outcome.REJECTED_BY_US, phase, False)
    outcome = _by_flags(common.response_flags) or _by_code(code, details)
    if outcome is Outcome.CLIENT_RESET and talked and complete:
        outcome = Outcome.COMPLETED  # hung up after the last byte
    return Ending(outcome, phase, kv_read)


def _phase(entry: accesslog_pb2.HTTPAccessLogEntry) -> Phase:
    common = entry.common_properties
    if not common.HasField("upstream_remote_address"):
        return "before_dispatch"
    if not common.HasField("time_to_first_upstream_rx_byte"):
        return "awaiting_headers"
    return "streaming" if entry.response.response_body_bytes else "awaiting_first_token"


def _by_flags(flags: accesslog_pb2.ResponseFlags) -> Outcome | None:
    for outcome, names in (
        (Outcome.CLIENT_RESET, _CLIENT),
        (Outcome.DECODE_UNREACHABLE, _UNREACHABLE),
        (Outcome.TIMED_OUT, _TIMED_OUT),
        (Outcome.DECODE_RESET, _RESET),
    ):
        if any(getattr(flags, name) for name in names):
            return outcome
    return None


def _by_code(code: int, details: str) -> Outcome:
    """For entries without a telling flag. What Envoy answered itself, before the decode leg or instead of it, is
    ``unknown``."""
    if details.startswith("via_upstream"):
        return Outcome.DECODE_REFUSED if code >= 400 else Outcome.COMPLETED
    if details.startswith("upstream_reset"):
        return Outcome.DECODE_RESET
    if details.startswith(("downstream_", "http1.", "http2.")) and code == 0:
        return Outcome.CLIENT_RESET
    return Outcome.UNKNOWN
