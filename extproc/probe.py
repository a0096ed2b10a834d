"""``extproc probe``: plays Envoy against a running service for one request, and shows what the service would change.

A dry run for the decode leg only: the service makes a real prefill call. The probe ends its stream before any response,
so the service has the prefiller's blocks freed again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from extproc.errors import ConfigError, ExtprocError
from extproc.pb.envoy.config.core.v3 import base_pb2
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc


class ProbeError(ExtprocError):
    """The service could not be reached, or did not answer as the protocol asks."""


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
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{file}: expected a JSON object")
        if "path" not in value:
            path = "/v1/chat/completions" if "messages" in value else "/v1/completions"
            return cls(path, text)
        if unknown := set(value) - {"path", "method", "headers", "body"}:
            raise ConfigError(f"{file}: unknown keys {sorted(unknown)}")
        body = value.get("body", "")
        encoded = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        return cls(str(value["path"]), encoded, str(value.get("method", "POST")), dict(value.get("headers", {})))

    def messages(self) -> Iterator[ext_proc.ProcessingRequest]:
        """What Envoy sends for it in the BUFFERED mode: headers, then the body if there is one."""
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
        yield ext_proc.ProcessingRequest(
            request_headers=ext_proc.HttpHeaders(
                headers=base_pb2.HeaderMap(headers=pairs), end_of_stream=not self.body
            ),
            protocol_config=ext_proc.ProtocolConfiguration(
                request_body_mode=ProcessingMode.BUFFERED, response_body_mode=ProcessingMode.NONE
            ),
        )
        if self.body:
            yield ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=self.body, end_of_stream=True))


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
    try:
        for message in request.messages():
            outgoing.put(message)
            while not transcript.take(next(replies)):
                pass
            if transcript.immediate_status is not None:
                break
    except StopIteration:
        raise ProbeError("the service ended the stream without answering") from None
    except grpc.RpcError as error:
        raise ProbeError(f"the service failed: {error.code().name}: {error.details()}") from None
    finally:
        outgoing.put(None)
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


def run(target: str, files: Sequence[Path], *, timeout_s: float) -> None:
    """Probe each file's request and print what happens to it. Raises ProbeError or ConfigError."""
    from rich.console import Console

    console = Console()
    with grpc.insecure_channel(target) as channel:
        for file in files:
            request = ProbeRequest.read(file)
            console.print(f"[bold]{request.method} {request.path}[/]  {len(request.body)} bytes")
            _print(console, request, play(channel, request, timeout_s=timeout_s))


def _print(console: Any, request: ProbeRequest, transcript: Transcript) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2))
    if transcript.more_time_s is not None:
        table.add_row("asks Envoy for", f"{transcript.more_time_s:g} s")
    if transcript.immediate_status is not None:
        table.add_row("[red]answers by itself[/]", f"{transcript.immediate_status} ({transcript.details})")
        table.add_row("", transcript.immediate_body.decode(errors="replace"))
    for name, value in transcript.set_headers.items():
        table.add_row("sets header", f"{name}: {value}")
    for name in transcript.removed_headers:
        table.add_row("removes header", name)
    for namespace, values in transcript.metadata.items():
        for key, value in values.items():
            table.add_row("dynamic metadata", f"{namespace} / {key} = {value}")
    if transcript.body is None:
        table.add_row("body", "unchanged")
    else:
        for key, old, new in changes(request.body, transcript.body):
            table.add_row("body", f"{key}: {old or '(absent)'} → {new or '(removed)'}")
    console.print(table, markup=True, highlight=False)
