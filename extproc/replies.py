"""Builders of ProcessingResponse messages: what we tell Envoy, in the shape each body mode wants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from extproc.errors import RequestError
from extproc.pb.envoy.config.core.v3 import base_pb2
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

DESTINATION: Final = "x-gateway-destination-endpoint"
"""The endpoint-picker protocol's name, of the header and of the metadata key alike."""
LB_NAMESPACE: Final = "envoy.lb"
OWN_NAMESPACE: Final = "extproc"
TICKET: Final = "ticket"

CHUNK_BYTES: Final = 62_000
"""Envoy refuses streamed body chunks above 64 KiB."""

_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_CONTINUE = ext_proc.CommonResponse.CONTINUE

Headers = Sequence[tuple[str, bytes]]


# Messages are filled in place: one that is put into another is copied, at every level, with the body in it.


def _set(mutation: ext_proc.HeaderMutation, set_headers: Headers) -> None:
    """Every header is overwritten, never appended: two X-Request-Id lines make engines take the first."""
    for key, value in set_headers:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = key
        option.header.raw_value = value


def nothing(phase: str) -> ext_proc.ProcessingResponse:
    """The reply that changes nothing, in the oneof member of its phase (an unset oneof counts as an error).

    ``phase`` is the request's oneof name.
    """
    response = ext_proc.ProcessingResponse()
    member = getattr(response, phase)
    member.SetInParent()
    if not phase.endswith("_trailers"):
        member.response.status = _CONTINUE
    return response


def request_headers(
    set_headers: Headers = (), remove: Iterable[str] = (), *, skip_body: bool = False
) -> ext_proc.ProcessingResponse:
    """``skip_body`` asks Envoy not to send the body at all (it must allow mode overrides, else it ignores this)."""
    response = ext_proc.ProcessingResponse()
    common = response.request_headers.response
    common.status = _CONTINUE
    _set(common.header_mutation, set_headers)
    common.header_mutation.remove_headers.extend(remove)
    if skip_body:
        mode = processing_mode_pb2.ProcessingMode
        response.mode_override.CopyFrom(
            mode(
                request_header_mode=mode.SEND,
                response_header_mode=mode.SEND,
                request_body_mode=mode.NONE,
                response_body_mode=mode.NONE,
                request_trailer_mode=mode.SKIP,
                response_trailer_mode=mode.SKIP,
            )
        )
    return response


def buffered_body(set_headers: Headers, body: bytes | None) -> ext_proc.ProcessingResponse:
    """The request_body reply of the BUFFERED mode. Envoy answers 500 to a changed body without its content-length."""
    response = ext_proc.ProcessingResponse()
    common = response.request_body.response
    common.status = _CONTINUE
    _set(common.header_mutation, set_headers)
    if body is not None:
        _set(common.header_mutation, [("content-length", b"%d" % len(body))])
        common.body_mutation.body = body
    return response


def streamed_body(phase: str, body: bytes, *, end_of_stream: bool) -> Iterator[ext_proc.ProcessingResponse]:
    """The replies of the FULL_DUPLEX_STREAMED mode: chunks, the last of which ends the stream if ``end_of_stream``.

    There, what is not sent is dropped. ``phase`` is request_body or response_body.
    """
    for start in range(0, len(body) or 1, CHUNK_BYTES):
        response = ext_proc.ProcessingResponse()
        common = getattr(response, phase).response
        common.status = _CONTINUE
        chunk = common.body_mutation.streamed_response
        chunk.SetInParent()
        chunk.body = body[start : start + CHUNK_BYTES]
        chunk.end_of_stream = end_of_stream and start + CHUNK_BYTES >= len(body)
        yield response


def response_headers(set_headers: Headers) -> ext_proc.ProcessingResponse:
    response = ext_proc.ProcessingResponse()
    common = response.response_headers.response
    common.status = _CONTINUE
    _set(common.header_mutation, set_headers)
    return response


def more_time(seconds: float) -> ext_proc.ProcessingResponse:
    """Ask Envoy to wait longer for this message's reply: once per message, up to its max_message_timeout."""
    response = ext_proc.ProcessingResponse()
    response.override_message_timeout.FromMilliseconds(int(seconds * 1000))
    return response


def immediate(status: int, headers: Headers, body: bytes, details: str) -> ext_proc.ProcessingResponse:
    """End the request here. ``details`` goes into Envoy's access log as the response code details."""
    response = ext_proc.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status  # type: ignore[assignment]
    _set(answer.headers, headers)
    names: set[str] = set()
    for option in answer.headers.set_headers:
        if option.header.key in names:  # Set-Cookie, say; Envoy 1.40 goes by the deprecated field here
            option.append.value = True
        names.add(option.header.key)
    answer.body = body
    answer.details = details
    return response


def error(problem: RequestError, more_headers: Headers = ()) -> ext_proc.ProcessingResponse:
    headers = [("content-type", b"application/json"), *more_headers]
    headers += [(name, value.encode()) for name, value in problem.headers.items()]
    return immediate(problem.status, headers, problem.body(), f"extproc_{problem.code}")


def route(
    response: ext_proc.ProcessingResponse,
    destination: str,
    ticket: str | None = None,
    *,
    clear_route_cache: bool = False,
) -> None:
    """Put the chosen endpoints (``ip:port[,ip:port]``), and a ticket, into the reply's dynamic metadata.

    ``clear_route_cache`` has Envoy match the request with its routes again.
    """
    fields = response.dynamic_metadata.fields
    fields[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
    if ticket is not None:
        fields[OWN_NAMESPACE].struct_value.fields[TICKET].string_value = ticket
    if clear_route_cache:
        getattr(response, response.WhichOneof("response") or "").response.clear_route_cache = True
