"""What a request is, from its headers alone: a candidate for P/D, something to look into, or something to pass on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from extproc.errors import RequestError
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.prefill import Header

# Headers by which Envoy, an endpoint picker or an engine is steered. Only this service sets them: a client's own are
# taken off the request.
STEERING: Final = frozenset(
    (
        "x-gateway-destination-endpoint",
        "x-gateway-destination-endpoint-subset",
        "x-gateway-destination-endpoint-served",
        "x-data-parallel-rank",
    )
)
_STEERING_PREFIX: Final = "x-extproc-"

# The one media type that vLLM takes for its JSON endpoints.
_JSON: Final = "application/json"

# Bodies that no engine reads as JSON: not looked into, so not held in memory either.
_OPAQUE_TYPES: Final = ("multipart/", "audio/", "image/", "video/", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Request:
    """The client's request line and headers. Header names are in lower case, as Envoy gives them."""

    method: str
    path: str
    headers: Sequence[Header]
    has_body: bool
    request_id: bytes | None
    """The client's own X-Request-Id, for logs and the response."""
    content_type: str
    content_encoding: str
    upgrade: bool
    spoofed: tuple[str, ...]
    """Headers of the client that must not reach an engine."""

    @property
    def client_id(self) -> str | None:
        """The client's X-Request-Id as text."""
        return self.request_id.decode("latin-1") if self.request_id else None

    @property
    def route_path(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]


@dataclass(frozen=True, slots=True)
class Candidate:
    """May be disaggregated, if its body agrees."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Goes to a decoder, but an engine may read its body as JSON: connector params must be taken out first."""

    reason: str


@dataclass(frozen=True, slots=True)
class Pass:
    """Goes to a decoder as it stands."""

    reason: str
    no_body: bool


def read_headers(message: ext_proc.HttpHeaders) -> Request:
    """Envoy fills ``raw_value``; other clients of the protocol may still fill ``value``."""
    headers = [(header.key.lower(), header.raw_value or header.value.encode()) for header in message.headers.headers]
    first: dict[str, bytes] = {}
    for name, value in headers:
        first.setdefault(name, value)

    def text(name: str) -> str:
        return first.get(name, b"").decode("latin-1")

    method = text(":method")
    upgrade = method == "CONNECT" or "upgrade" in first
    spoofed = [name for name in first if name in STEERING or name.startswith(_STEERING_PREFIX)]
    if upgrade and method not in ("GET", "CONNECT") and "content-type" in first:
        # The body of an upgrade is never seen here. An engine that ignores the upgrade must not read it as JSON.
        spoofed.append("content-type")
    return Request(
        method=method,
        path=text(":path"),
        headers=headers,
        has_body=not message.end_of_stream,
        request_id=first.get("x-request-id"),
        content_type=text("content-type").lower(),
        content_encoding=text("content-encoding").lower(),
        upgrade=upgrade,
        spoofed=tuple(spoofed),
    )


def plan(request: Request, paths: Collection[str]) -> Candidate | Inspect | Pass:
    """``paths`` are those to disaggregate, exact and without a query.

    Raises RequestError (415) for a compressed body: what is in it could not be checked.
    """
    if request.upgrade:
        return Pass("upgrade", no_body=not request.has_body)
    if not request.has_body:
        return Pass("method" if request.method != "POST" else "no_body", no_body=True)
    if request.content_type.startswith(_OPAQUE_TYPES):
        return Pass("content_type", no_body=False)
    if request.content_encoding not in ("", "identity"):
        message = f"Content-Encoding {request.content_encoding!r} is not supported; send the body uncompressed."
        raise RequestError(415, "unsupported_content_encoding", message)
    if request.method != "POST":
        return Inspect("method")
    if request.route_path not in paths:
        return Inspect("path")
    if request.content_type.partition(";")[0] != _JSON:
        return Inspect("content_type")  # the engine's refusal is the client's answer
    return Candidate()
