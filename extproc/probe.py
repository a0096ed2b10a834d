"""``extproc probe``: plays Envoy against a running service for one request, and shows what the service would change.

A dry run for the decode leg only: the service makes a real prefill call. The probe ends its stream before any response,
so the service has the prefiller's blocks freed again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, Final

import grpc
import msgspec

from extproc.configtypes import split_listen
from extproc.errors import ConfigError, ExtprocError
from extproc.pb.envoy.config.core.v3 import base_pb2
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc

_REFUSES: Final = "answers by itself"
_HINT_S: Final = 2.0


class ProbeError(ExtprocError):
    """The service could not be reached, or did not answer as the protocol asks.

    ``code`` is gRPC's, or None where the stream itself went well.
    """

    def __init__(self, message: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ProbeRequest:
    """One HTTP request, as a client would send it through Envoy."""

    path: str
    body: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> ProbeRequest:
        """From a JSON file: an OpenAI body by itself, or ``{"path", "method", "headers", "body"}``.

        Raises ConfigError.
        """
        try:
            text = file.read_bytes()
            value = json.loads(text)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: expected a JSON object")
        if "path" not in value:
            path = "/v1/chat/completions" if "messages" in value else "/v1/completions"
            return cls(path, text)
        try:
            return msgspec.convert(value, _Described).request()
        except msgspec.ValidationError as error:
            raise ConfigError(f"{file}: {error}") from None
        except UnicodeEncodeError as error:
            raise ConfigError(f"{file}: no text: {error.reason}") from None

    def headers_message(self) -> ext_proc.ProcessingRequest:
        """What Envoy sends of it first, in the BUFFERED mode."""
        headers = {
            ":method": self.method,
            ":path": self.path,
            ":scheme": "http",
            ":authority": "probe",
            "content-type": "application/json",
            "content-length": str(len(self.body)),
            **{name.lower(): value for name, value in self.headers.items()},
        }
        pairs = [base_pb2.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
        return ext_proc.ProcessingRequest(
            request_headers=ext_proc.HttpHeaders(
                headers=base_pb2.HeaderMap(headers=pairs), end_of_stream=not self.body
            ),
            protocol_config=ext_proc.ProtocolConfiguration(
                request_body_mode=ProcessingMode.BUFFERED, response_body_mode=ProcessingMode.NONE
            ),
        )

    def body_message(self) -> ext_proc.ProcessingRequest:
        """What it sends next, where there is a body and the service wants it."""
        return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=self.body, end_of_stream=True))


class _Described(msgspec.Struct, forbid_unknown_fields=True):
    """A request as a file describes it."""

    path: Annotated[str, msgspec.Meta(pattern="^/")]
    method: str = "POST"
    headers: dict[str, str] = {}
    body: Any = ""

    def request(self) -> ProbeRequest:
        """Raises UnicodeEncodeError for half a surrogate pair, which JSON can name and HTTP cannot carry."""
        "".join([self.path, self.method, *self.headers, *self.headers.values()]).encode()
        body = self.body if isinstance(self.body, str) else json.dumps(self.body)
        return ProbeRequest(self.path, body.encode(), self.method, self.headers)


@dataclass
class Transcript:
    """What the service answered."""

    set_headers: dict[str, str] = field(default_factory=dict)
    removed_headers: list[str] = field(default_factory=list)
    body: bytes | None = None
    """The new body; None where it stays."""
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    more_time_s: float | None = None
    immediate_status: int | None = None
    immediate_body: bytes = b""
    details: str = ""
    wants_body: bool = True
    """False where the service has told Envoy to keep the body to itself."""

    def take(self, response: ext_proc.ProcessingResponse) -> bool:
        """Add one reply. Returns whether it answers its message (a request for more time does not)."""
        kind = response.WhichOneof("response")
        if kind is None:
            if response.HasField("override_message_timeout"):
                self.more_time_s = response.override_message_timeout.ToMilliseconds() / 1000
                return False
            raise ProbeError("the service sent an empty reply")
        for namespace, value in response.dynamic_metadata.fields.items():
            fields = value.struct_value.fields
            self.metadata.setdefault(namespace, {}).update({key: fields[key].string_value for key in fields})
        if kind == "immediate_response":
            self.immediate_status = response.immediate_response.status.code
            self.immediate_body = response.immediate_response.body
            self.details = response.immediate_response.details
            return True
        if response.HasField("mode_override"):
            self.wants_body = response.mode_override.request_body_mode != ProcessingMode.NONE
        common = getattr(response, kind).response
        for option in common.header_mutation.set_headers:
            self.set_headers[option.header.key] = option.header.raw_value.decode("latin-1")
        self.removed_headers += common.header_mutation.remove_headers
        if common.body_mutation.WhichOneof("mutation") == "body":
            self.body = common.body_mutation.body
        return True


def play(channel: grpc.Channel, request: ProbeRequest, *, timeout_s: float = 120.0) -> Transcript:
    """Send one request's messages in Envoy's order, each after the reply to the one before. Raises ProbeError."""
    stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)  # type: ignore[no-untyped-call]
    outgoing: SimpleQueue[ext_proc.ProcessingRequest | None] = SimpleQueue()
    transcript = Transcript()
    replies = stub.Process(iter(outgoing.get, None), timeout=timeout_s)

    def ask(message: ext_proc.ProcessingRequest) -> None:
        outgoing.put(message)
        while not transcript.take(next(replies)):
            pass

    try:
        ask(request.headers_message())
        if request.body and transcript.wants_body and transcript.immediate_status is None:
            ask(request.body_message())
    except StopIteration:
        raise ProbeError("the service ended the stream without answering") from None
    except grpc.RpcError as error:
        code = error.code()
        what = "cannot be reached" if code is grpc.StatusCode.UNAVAILABLE else "failed"
        raise ProbeError(f"the service {what}: {code.name}: {error.details()}", code) from None
    finally:
        outgoing.put(None)
    with contextlib.suppress(grpc.RpcError):  # the answers are here; this is but the stream's end
        for _ in replies:
            pass
    return transcript


def changes(before: bytes, after: bytes) -> list[tuple[str, str, str]]:
    """(key, before, after) for each top-level member that differs, as JSON text; empty text where it is absent."""
    old, new = (_members(body) for body in (before, after))
    keys = [*old, *(key for key in new if key not in old)]
    return [(key, old.get(key, ""), new.get(key, "")) for key in keys if old.get(key) != new.get(key)]


def _members(body: bytes) -> dict[str, str]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return {key: json.dumps(item) for key, item in value.items()} if isinstance(value, dict) else {}


@dataclass(frozen=True)
class TlsFiles:
    """PEM files for a service with ``grpc.tls``: the CA to trust, and what to show where ``client_ca`` is set."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--certificate and --key belong together")
        try:
            ca, key, certificate = (path and path.read_bytes() for path in (self.ca, self.key, self.certificate))
        except OSError as error:
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # gRPC takes any bytes, and fails each handshake then
        try:
            context.load_verify_locations(self.ca)
        except ssl.SSLError:
            raise ConfigError(f"--ca: {self.ca} holds no PEM certificates") from None
        if self.certificate and self.key:
            try:
                context.load_cert_chain(self.certificate, self.key, password="")
            except ssl.SSLError:
                problem = "are no PEM certificate and its private key without a password"
                raise ConfigError(f"--certificate, --key: {self.certificate} and {self.key} {problem}") from None
        return grpc.ssl_channel_credentials(ca, key, certificate)


def connect(target: str, tls: TlsFiles | None = None) -> grpc.Channel:
    """A channel to ``host:port``. Raises ConfigError."""
    try:
        split_listen(target)
    except ValueError:
        raise ConfigError(f"--target: {target!r}: expected host:port, like 127.0.0.1:9002") from None
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    if tls is None:
        return grpc.insecure_channel(target, options)
    return grpc.secure_channel(target, tls.credentials(), options)


def run(target: str, files: Sequence[Path], *, timeout_s: float, tls: TlsFiles | None = None) -> None:
    """Probe each file's request and print what happens to it. Raises ProbeError or ConfigError."""
    from rich.console import Console
    from rich.text import Text

    requests = [ProbeRequest.read(file) for file in files]
    console = Console(highlight=False, soft_wrap=True)
    with connect(target, tls) as channel:
        for request in requests:
            console.print(Text(f"{request.method} {request.path}", "bold"), f"({len(request.body)} bytes)")
            try:
                transcript = play(channel, request, timeout_s=timeout_s)
            except ProbeError as error:
                if error.code is grpc.StatusCode.UNAVAILABLE and (hint := why_unreachable(target, tls)):
                    raise ProbeError(f"{error}\n{hint}", error.code) from None
                raise
            for what, text in told(request, transcript):
                # Others' text, none of it markup.
                console.print(Text.assemble(f"  {what:<18}", text, style="red" if what == _REFUSES else ""))


def why_unreachable(target: str, tls: TlsFiles | None) -> str:
    """What gRPC does not say of a failed connection, and what to do about it; empty where there is nothing to add."""
    host, port = split_listen(target)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    shown = tls is not None and tls.certificate is not None
    if tls is not None and tls.certificate and tls.key:
        context.load_cert_chain(tls.certificate, tls.key, password="")
    try:
        with socket.create_connection((host, port), timeout=_HINT_S) as connection:
            try:
                with context.wrap_socket(connection) as wrapped:
                    return _about_tls(wrapped, tls, shown=shown)
            except (ssl.SSLError, ConnectionError, TimeoutError):
                return "It does not speak TLS: leave out --ca." if tls else ""
    except OSError as error:
        return f"Nobody answers at {target} ({error.strerror or error}): is `extproc serve` running there?"


def _about_tls(connection: ssl.SSLSocket, tls: TlsFiles | None, *, shown: bool) -> str:
    """Of a service that does speak TLS. Since TLS 1.3 it says only after the handshake that it wants a certificate."""
    try:
        wants_certificate = not connection.recv(1)
    except ssl.SSLError:
        wants_certificate = True
    except OSError:
        wants_certificate = False
    ours = "--certificate and --key, of an authority that its `grpc.tls.client_ca` trusts"
    if tls is None:
        return f"It speaks TLS: name the CA of its certificate with --ca{f', and {ours}' if wants_certificate else ''}."
    if wants_certificate:
        return f"It wants {'another' if shown else 'a'} client certificate: {ours}."
    return f"It speaks TLS: is {tls.ca} the CA of its certificate, and is that made out to the name you called it by?"


def told(request: ProbeRequest, transcript: Transcript) -> Iterator[tuple[str, str]]:
    """(what the service does, to what) for each of its changes, in Envoy's order."""
    if transcript.more_time_s is not None:
        yield "asks Envoy for", f"{transcript.more_time_s:g} s"
    if transcript.immediate_status is not None:
        yield _REFUSES, f"{transcript.immediate_status} ({transcript.details})"
        yield "", transcript.immediate_body.decode(errors="replace")
        return
    for name, value in transcript.set_headers.items():
        yield "sets header", f"{name}: {value}"
    for name in transcript.removed_headers:
        yield "removes header", name
    for namespace, values in transcript.metadata.items():
        for key, value in values.items():
            yield "dynamic metadata", f"{namespace} / {key} = {value}"
    if transcript.body is None:
        yield "body", "unchanged" if transcript.wants_body else "unchanged, and not looked at"
    else:
        for key, old, new in changes(request.body, transcript.body):
            yield "body", f"{key}: {old or '(absent)'} → {new or '(removed)'}"
