"""What Envoy does with a processor's reply: pure functions, as strict as the strictest Envoy.

Everything that Envoy refuses, ignores without a word, or carries out to somebody's harm raises
:class:`ProtocolViolation`. What its message says of Envoy was measured with Envoy 1.40 and default mutation rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from google.protobuf.json_format import MessageToDict

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValueOption
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

Side = Literal["request", "response", "immediate"]
Headers = list[tuple[str, str]]
"""Names in lower case, values as latin-1 text, which keeps every byte."""

STREAMED_CHUNK_BYTES: Final = 65_536
ROUTING_HEADERS: Final = frozenset({":method", ":scheme", ":authority", "host"})
_BAD_NAME: Final = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9a-zA-Z:]")
_BAD_VALUE: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
MISMATCH: Final = "mismatch_between_content_length_and_the_length_of_the_mutated_body"


class ProtocolViolation(AssertionError):
    """A reply that a real Envoy would refuse (``status``: what the client gets) or not act upon (``status`` None)."""

    def __init__(self, problem: str, status: int | None = None, details: str = "") -> None:
        outcome = f"Envoy answers {status} {details}".rstrip() if status else "Envoy does not act upon it"
        super().__init__(f"{problem} ({outcome})")
        self.status = status
        self.details = details


@dataclass
class HttpMessage:
    """A request or response as it leaves Envoy. ``headers`` has no pseudo headers."""

    headers: Headers
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """The value of the only line of that name; None if there is none. Raises AssertionError if there are more."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) <= 1, f"{len(values)} lines of {name}: {values}"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class UpstreamRequest(HttpMessage):
    """What the upstream gets. Without a content-length in it, Envoy sends the body chunked."""

    method: str = ""
    path: str = ""
    authority: str = ""
    scheme: str = ""
    trailers: Headers = field(default_factory=list)


@dataclass
class ClientResponse(HttpMessage):
    """What the client gets; ``body`` is filled for an immediate response alone."""

    status: int = 0


@dataclass
class ImmediateAnswer(ClientResponse):
    details: str = ""
    grpc_status: int | None = None


@dataclass
class Metadata:
    """Dynamic metadata by namespace, as plain Python values."""

    receiving_namespaces: Iterable[str]
    raw: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def kept(self) -> dict[str, dict[str, Any]]:
        """Envoy drops other namespaces than the configured ones without a word."""
        return {name: fields for name, fields in self.raw.items() if name in self.receiving_namespaces}

    def merge(self, reply: ext_proc.ProcessingResponse) -> None:
        for namespace, value in reply.dynamic_metadata.fields.items():
            if not value.HasField("struct_value"):
                raise ProtocolViolation(
                    f"dynamic metadata {namespace!r} is not an object but {value.WhichOneof('kind')}"
                )
            self.raw.setdefault(namespace, {}).update(MessageToDict(value.struct_value))


def mutate_headers(headers: Headers, mutation: ext_proc.HeaderMutation, side: Side, *, streamed: bool = False) -> None:
    """Apply the mutation in place; ``headers`` holds the pseudo headers too. Removals come before additions."""
    for name in mutation.remove_headers:
        key = name.lower()
        if key.startswith(":") or key == "host":
            raise ProtocolViolation(f"{key} cannot be removed")
        headers[:] = [item for item in headers if item[0] != key]
    for option in mutation.set_headers:
        key, value = _checked(option, side, streamed)
        headers[:] = [item for item in headers if item[0] != key]
        headers.append((key, value))


def _checked(option: HeaderValueOption, side: Side, streamed: bool) -> tuple[str, str]:
    key, raw = option.header.key.lower(), option.header.raw_value
    if not key:
        raise ProtocolViolation("a header without a name: spoils the request for the upstream")
    if option.header.value:
        raise ProtocolViolation(f"{key}: `value` is filled; Envoy reads `raw_value` and would set {raw!r}")
    if option.HasField("append"):
        raise ProtocolViolation(f"{key}: the deprecated `append` is set; it overrides append_action")
    if option.append_action != HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD:
        action = HeaderValueOption.HeaderAppendAction.Name(option.append_action)
        raise ProtocolViolation(f"{key}: append_action is {action}; Envoy 1.40 overwrites, other releases append")
    if _BAD_NAME.search(key.encode()) or _BAD_VALUE.search(raw):
        details = "header_mutation_set_contains_invalid_character"
        raise ProtocolViolation(f"{key}: {raw!r} is no valid header", 500, details)
    if key.startswith("x-envoy-"):
        raise ProtocolViolation(f"{key}: headers of Envoy's own cannot be set")
    if key == "transfer-encoding":
        raise ProtocolViolation("transfer-encoding: goes out beside content-length, so the peer may misread the body")
    if side == "request" and (key in ROUTING_HEADERS or key == ":status"):
        raise ProtocolViolation(f"{key}: routing headers cannot be set")
    if side == "response" and key.startswith(":") and key != ":status":
        raise ProtocolViolation(f"{key}: is no response header")
    if side == "immediate" and (key.startswith(":") or key == "content-length"):
        raise ProtocolViolation(f"{key}: Envoy sets it itself")
    if key == "content-length" and streamed:
        raise ProtocolViolation("content-length: removed from streamed requests, which go out chunked")
    return key, raw.decode("latin-1")


def check_content_length(headers: Headers, body: bytes, *, mutated: bool) -> None:
    values = [value for name, value in headers if name == "content-length"]
    if values and values != [str(len(body))]:
        problem = f"content-length is {', '.join(values)}, the body has {len(body)} bytes"
        if mutated:
            raise ProtocolViolation(problem, 500, MISMATCH)
        raise ProtocolViolation(f"{problem}: what is beyond is taken for another request by the upstream")


def check_timeout_override(reply: ext_proc.ProcessingResponse, limit_s: float) -> float:
    """The seconds asked for."""
    others = [name.name for name, _ in reply.ListFields() if name.name != "override_message_timeout"]
    if others:
        raise ProtocolViolation(f"{', '.join(others)} beside override_message_timeout, which must stand alone")
    seconds = reply.override_message_timeout.ToTimedelta().total_seconds()
    if not 0.001 <= seconds <= limit_s:
        raise ProtocolViolation(f"override_message_timeout of {seconds:g} s is not within 1 ms and {limit_s:g} s")
    return seconds


def buffered_body(common: ext_proc.CommonResponse, headers: Headers, body: bytes) -> bytes:
    """The body after a request_body reply in the BUFFERED mode; ``headers`` are changed in place."""
    _check_common(common, replaces=False)
    mutation = common.body_mutation.WhichOneof("mutation")
    if mutation == "streamed_response":
        raise ProtocolViolation("streamed_response in the BUFFERED mode empties the body", 500, MISMATCH)
    mutate_headers(headers, common.header_mutation, "request")
    if mutation == "body":
        body = common.body_mutation.body
    elif mutation == "clear_body" and common.body_mutation.clear_body:
        body = b""
    check_content_length(headers, body, mutated=mutation is not None)
    return body


def streamed_body(common: ext_proc.CommonResponse, *, trailers: bool) -> tuple[bytes, bool]:
    """(chunk, end of stream) of a request_body reply in the FULL_DUPLEX_STREAMED mode."""
    _check_common(common, replaces=False)
    if common.header_mutation.ListFields():
        raise ProtocolViolation("a header mutation in a reply to a streamed body; the headers are on their way")
    if common.body_mutation.WhichOneof("mutation") != "streamed_response":
        details = "spurious_message:_Normal_body_mutation_response_is_received_while_body_mode__is_FULL_DUPLEX_STREAMED"
        raise ProtocolViolation("a reply to a streamed body without streamed_response", 500, details)
    chunk = common.body_mutation.streamed_response
    if len(chunk.body) > STREAMED_CHUNK_BYTES:
        problem = f"a streamed chunk of {len(chunk.body)} bytes; implementations take at most {STREAMED_CHUNK_BYTES}"
        raise ProtocolViolation(problem)
    if chunk.end_of_stream and trailers:
        raise ProtocolViolation("end_of_stream in a body that has trailers")
    return chunk.body, chunk.end_of_stream


def header_phase(common: ext_proc.CommonResponse, headers: Headers, side: Side, *, streamed: bool) -> bytes | None:
    """Apply a reply to headers; returns the body that replaces the one to come, or None."""
    replaces = common.status == ext_proc.CommonResponse.CONTINUE_AND_REPLACE
    _check_common(common, replaces=replaces)
    if common.HasField("body_mutation") and not replaces:
        raise ProtocolViolation("a body mutation in a reply to headers without CONTINUE_AND_REPLACE")
    mutate_headers(headers, common.header_mutation, side, streamed=streamed)
    if not replaces:
        return None
    if side == "response" or common.body_mutation.WhichOneof("mutation") == "streamed_response":
        raise ProtocolViolation("CONTINUE_AND_REPLACE with something else than a whole request body")
    headers[:] = [item for item in headers if item[0] != "content-length"]
    return common.body_mutation.body


def _check_common(common: ext_proc.CommonResponse, *, replaces: bool) -> None:
    if common.HasField("trailers"):
        raise ProtocolViolation("trailers in a reply to a part that is not the last")
    if common.status != ext_proc.CommonResponse.CONTINUE and not replaces:
        raise ProtocolViolation("CONTINUE_AND_REPLACE in a reply to a body")


def immediate_answer(response: ext_proc.ImmediateResponse) -> ImmediateAnswer:
    status = int(response.status.code)
    if status < 200:
        raise ProtocolViolation(f"an immediate response with status {status}", 200)
    headers: Headers = [("content-type", "text/plain")] if response.body else []
    mutate_headers(headers, response.headers, "immediate")
    return ImmediateAnswer(
        headers=[*headers, ("content-length", str(len(response.body)))],
        body=response.body,
        status=status,
        details=re.sub(r"\s", "_", response.details),
        grpc_status=response.grpc_status.status if response.HasField("grpc_status") else None,
    )
