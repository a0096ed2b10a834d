"""What a request is, from its headers alone: a candidate for P/D, something to look into, or something to pass on."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc.errors import RequestError
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.prefill import Header

if TYPE_CHECKING:
    from extproc.configsections import Limits

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

_MAX_ID_BYTES: Final = 256

# The one media type that vLLM takes for its JSON endpoints.
_JSON: Final = "application/json"

# Bodies in which no engine finds JSON: not looked into, so not held in memory either.
# (Of ``application/…+json``, whatever comes before the plus, FastAPI would read JSON.)
_OPAQUE_TYPES: Final = ("audio/", "image/", "video/")
_OPAQUE: Final = "application/octet-stream"

# Forms: vLLM's transcription takes JSON in a field. In these charsets it is legible as it stands.
_URLENCODED: Final = "application/x-www-form-urlencoded"
_FORM_TYPES: Final = ("multipart/", _URLENCODED)
_PLAIN_CHARSET: Final = re.compile(r'charset="?(?:utf-8|us-ascii|iso-8859-1)"? *(?:;|$)')


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
    """The first line's value, which engines go by; with :attr:`typed_twice` there are more."""
    typed_twice: bool
    content_encoding: str
    upgrade: bool
    spoofed: tuple[str, ...]
    """Headers of the client that must not reach an engine."""

    @property
    def client_id(self) -> str | None:
        """The client's X-Request-Id as text; None where there is none, or one of an absurd length."""
        if not self.request_id or len(self.request_id) > _MAX_ID_BYTES:
            return None
        return self.request_id.decode("latin-1")

    @property
    def media_type(self) -> str:
        return self.content_type.partition(";")[0].strip()

    @property
    def is_opaque(self) -> bool:
        one = self.media_type.startswith(_OPAQUE_TYPES) or self.media_type == _OPAQUE
        return one and not self.typed_twice

    @property
    def is_form(self) -> bool:
        return self.content_type.startswith(_FORM_TYPES)

    @property
    def is_urlencoded(self) -> bool:
        return self.content_type.startswith(_URLENCODED)

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
        typed_twice=sum(name == "content-type" for name, _ in headers) > 1,
        content_encoding=text("content-encoding").lower(),
        upgrade=upgrade,
        spoofed=tuple(spoofed),
    )


def status(message: ext_proc.HttpHeaders) -> int | None:
    """Of response headers."""
    for header in message.headers.headers:
        if header.key == ":status" and (value := header.raw_value or header.value.encode()).isdigit():
            return int(value)
    return None


def check_size(request: Request, limits: Limits) -> None:
    """Raises RequestError (431) for more, or larger, headers than configured. Pseudo headers count, as for Envoy."""
    size = sum([len(name) + len(value) for name, value in request.headers])
    if len(request.headers) > limits.headers or size > limits.header_bytes:
        text = f"The request has more than {limits.headers} headers, or more than {limits.header_bytes} bytes of them."
        raise RequestError(431, "headers_too_large", text)


def plan(request: Request, paths: Collection[str]) -> Candidate | Inspect | Pass:
    """``paths`` are those to disaggregate, exact and without a query.

    Raises RequestError (415) for a body that could not be checked: compressed, or a form in an odd charset.
    """
    if request.upgrade:
        return Pass("upgrade", no_body=not request.has_body)
    if not request.has_body:
        return Pass("method" if request.method != "POST" else "no_body", no_body=True)
    if request.is_opaque:
        return Pass("content_type", no_body=False)
    if request.content_encoding not in ("", "identity"):
        message = f"Content-Encoding {request.content_encoding!r} is not supported; send the body uncompressed."
        raise RequestError(415, "unsupported_content_encoding", message)
    if request.is_form and request.content_type.count("charset") > len(_PLAIN_CHARSET.findall(request.content_type)):
        raise RequestError(415, "unsupported_charset", "Forms are accepted in UTF-8.")
    if request.method != "POST":
        return Inspect("method")
    if request.route_path not in paths:
        return Inspect("path")
    if request.content_type.partition(";")[0] != _JSON:
        return Inspect("content_type")  # the engine's refusal is the client's answer
    return Candidate()
