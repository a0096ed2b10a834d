from __future__ import annotations

from typing import Any

import pytest

from extproc.fleet.verdicts import decoder_verdicts
from extproc.outcomes import classify
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::3]:8000"


def entry(
    listed: str | None,
    served: str | None,
    *,
    attempts: int = 1,
    code: int = 200,
    body: int = 100,
    details: str = "via_upstream",
    flag: str | None = None,
    answered: bool = True,
) -> accesslog_pb2.HTTPAccessLogEntry:
    """What Envoy logs of a request that was to go to ``listed`` and went to ``served``."""
    made = accesslog_pb2.HTTPAccessLogEntry()
    common = made.common_properties
    if listed is not None:
        common.metadata.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint": listed})
    if served is not None:
        host, _, port = served.rpartition(":")
        common.upstream_remote_address.socket_address.address = host.strip("[]")
        common.upstream_remote_address.socket_address.port_value = int(port)
    common.upstream_request_attempt_count = attempts
    if answered:
        common.time_to_first_upstream_rx_byte.FromMilliseconds(5)
    made.response.response_code.value = code
    made.response.response_body_bytes = body
    made.response.response_code_details = details
    if flag is not None:
        setattr(common.response_flags, flag, True)
    return made


CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str | None]]]] = {
    "served": ({"listed": f"{A},{B}", "served": A}, [(A, None)]),
    "an IPv6 decoder": ({"listed": C, "served": C}, [(C, None)]),
    "the first refused the connection": (
        {"listed": f"{A},{B},{C}", "served": B, "attempts": 2},
        [(A, "connect"), (B, None)],
    ),
    "two did": ({"listed": f"{A},{B},{C}", "served": C, "attempts": 3}, [(A, "connect"), (B, "connect"), (C, None)]),
    "refused once, then not": ({"listed": f"{A},{A}", "served": A, "attempts": 2}, [(A, None)]),
    "all did": (
        {
            "listed": f"{A},{B}",
            "served": B,
            "attempts": 2,
            "code": 503,
            "details": "upstream_reset_before_response_started{remote_connection_failure}",
            "flag": "upstream_connection_failure",
            "answered": False,
        },
        [(A, "connect"), (B, "decode_unreachable")],
    ),
    "died in the middle": (
        {
            "listed": A,
            "served": A,
            "details": "upstream_reset_after_response_started{protocol_error}",
            "flag": "upstream_protocol_error",
        },
        [(A, "decode_reset")],
    ),
    "took too long": (
        {"listed": A, "served": A, "code": 504, "details": "response_timeout", "flag": "upstream_request_timeout"},
        [(A, "timed_out")],
    ),
    "answered 500": ({"listed": A, "served": A, "code": 500}, [(A, "status_5xx")]),
    "answered 400": ({"listed": A, "served": A, "code": 400}, [(A, None)]),
    "the client left in the stream": (
        {
            "listed": A,
            "served": A,
            "flag": "downstream_connection_termination",
            "details": "downstream_remote_disconnect",
        },
        [(A, None)],
    ),
    "the client left before any answer": (
        {
            "listed": A,
            "served": A,
            "code": 0,
            "body": 0,
            "flag": "downstream_connection_termination",
            "details": "downstream_remote_disconnect",
            "answered": False,
        },
        [],
    ),
    "never sent": ({"listed": A, "served": None, "attempts": 0, "code": 503, "details": "no_healthy_upstream"}, []),
    "nothing of ours": ({"listed": None, "served": A}, []),
}


@pytest.mark.parametrize(("logged", "verdicts"), CASES.values(), ids=CASES)
def test_what_a_requests_end_tells_of_decoders(logged: dict[str, Any], verdicts: list[tuple[str, str | None]]) -> None:
    made = entry(**logged)
    assert list(decoder_verdicts(made, classify(made))) == verdicts
