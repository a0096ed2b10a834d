"""What a request's end, as Envoy logged it, tells of the decoders it was sent to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from extproc.outcomes import Ending, Outcome
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.replies import DESTINATION, LB_NAMESPACE

_FAULTS: Final = (Outcome.DECODE_UNREACHABLE, Outcome.DECODE_RESET, Outcome.TIMED_OUT)
_SERVER_ERROR: Final = 500


def decoder_verdicts(entry: accesslog_pb2.HTTPAccessLogEntry, ending: Ending) -> Iterator[tuple[str, str | None]]:
    """(``ip:port``, reason) for each decoder: the reason why it failed, or None where it did its work.

    Envoy goes through the listed endpoints in order, and to the next one only when a connection is refused.
    """
    common = entry.common_properties
    namespaces = common.metadata.filter_metadata
    if LB_NAMESPACE not in namespaces:
        return
    listed = namespaces[LB_NAMESPACE].fields[DESTINATION].string_value.split(",")
    address = common.upstream_remote_address.socket_address
    host = f"[{address.address}]" if ":" in address.address else address.address
    served = f"{host}:{address.port_value}"
    refused = listed[: max(0, common.upstream_request_attempt_count - 1)]
    for endpoint in refused:
        if endpoint != served:
            yield endpoint, "connect"
    if not address.address:
        return
    if ending.outcome in _FAULTS:
        yield served, ending.outcome.value
    elif ending.outcome is Outcome.DECODE_REFUSED and entry.response.response_code.value >= _SERVER_ERROR:
        yield served, "status_5xx"
    elif ending.phase != "awaiting_headers":  # a client that left before any answer tells nothing
        yield served, None
