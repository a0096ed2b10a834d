"""Envoy's side of the protocol without Envoy: the messages that Envoy 1.40 sends for a chat request, on many streams.

Costs little enough that thousands of streams fit into one process, and leaves the service's CPU to be measured alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import grpc

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.accesslog.v3 import als_pb2
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.replies import DESTINATION, LB_NAMESPACE, OWN_NAMESPACE, TICKET

_PROCESS: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
_LOG: Final = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"

_END_OF_STREAM: Final = grpc.aio.EOF


def _headers(pairs: dict[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=key, raw_value=value.encode()) for key, value in pairs.items()])


def request_headers(size: int) -> bytes:
    """The first message of a request whose body has ``size`` bytes."""
    headers = {
        ":authority": "gateway.example",
        ":path": "/v1/chat/completions",
        ":method": "POST",
        ":scheme": "http",
        "accept": "application/json",
        "accept-encoding": "gzip, deflate",
        "content-type": "application/json",
        "content-length": str(size),
        "user-agent": "OpenAI/Python 1.60.0",
        "authorization": "Bearer 0123456789abcdef",
        "x-stainless-lang": "python",
        "x-forwarded-for": "192.0.2.2",
        "x-forwarded-proto": "http",
        "x-envoy-external-address": "192.0.2.2",
    }
    message = ext_proc.ProcessingRequest(request_headers=ext_proc.HttpHeaders(headers=_headers(headers)))
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def request_body(body: bytes) -> bytes:
    message = ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True))
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def response_headers() -> bytes:
    headers = _headers({":status": "200", "content-type": "application/json", "content-length": "512"})
    message = ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders(headers=headers))
    message.metadata_context.SetInParent()
    return message.SerializeToString()


def log_entry(reply: ext_proc.ProcessingResponse) -> als_pb2.StreamAccessLogsMessage:
    """What the access log says of a request that was answered like this and completed, with the ticket in it."""
    options = {option.header.key: option.header.raw_value for option in _set_headers(reply)}
    endpoint = options[DESTINATION].decode()
    entry = accesslog_pb2.HTTPAccessLogEntry()
    common = entry.common_properties
    common.start_time.GetCurrentTime()
    for number, name in enumerate(
        "time_to_last_rx_byte time_to_first_upstream_tx_byte time_to_last_upstream_tx_byte "
        "time_to_first_upstream_rx_byte time_to_last_upstream_rx_byte time_to_first_downstream_tx_byte "
        "time_to_last_downstream_tx_byte duration".split(),
        1,
    ):
        getattr(common, name).FromMilliseconds(3 * number)
    host, _, port = endpoint.split(",")[0].rpartition(":")
    common.upstream_remote_address.socket_address.address = host
    common.upstream_remote_address.socket_address.port_value = int(port)
    common.upstream_cluster = "decode"
    common.upstream_request_attempt_count = 1
    common.access_log_type = accesslog_pb2.DownstreamEnd
    kept = common.metadata.filter_metadata
    kept[LB_NAMESPACE].fields[DESTINATION].string_value = endpoint
    if OWN_NAMESPACE in reply.dynamic_metadata.fields:
        ticket = reply.dynamic_metadata.fields[OWN_NAMESPACE].struct_value.fields[TICKET].string_value
        kept[OWN_NAMESPACE].fields[TICKET].string_value = ticket
    entry.request.request_id = options.get("x-request-id", b"").decode()
    entry.request.path = "/v1/chat/completions"
    entry.response.response_code.value = 200
    entry.response.response_code_details = "via_upstream"
    entry.response.response_body_bytes = 560
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.append(entry)
    return message


def _set_headers(reply: ext_proc.ProcessingResponse) -> Any:
    return reply.request_body.response.header_mutation.set_headers


@dataclass(frozen=True, slots=True)
class Script:
    """The messages of one kind of request, ready to be sent."""

    headers: bytes
    body: bytes
    answer: bytes

    @classmethod
    def of(cls, body: bytes) -> Self:
        return cls(request_headers(len(body)), request_body(body), response_headers())


class Stream:
    """One request's stream to the service."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.replies = 0
        """Messages that the service has sent."""

    async def ask(self, message: bytes) -> ext_proc.ProcessingResponse:
        """Send one message and return its reply. Raises ConnectionError where the service ends the stream instead."""
        await self._call.write(message)
        while (reply := await self._call.read()) is not _END_OF_STREAM:
            self.replies += 1
            if not reply.HasField("override_message_timeout"):
                return reply  # type: ignore[no-any-return]
        raise ConnectionError("the service ended the stream")

    async def dispatch(self, script: Script) -> ext_proc.ProcessingResponse:
        """Up to the decode leg: the reply that sends it there. Raises RuntimeError where the service refuses."""
        await self.ask(script.headers)
        reply = await self.ask(script.body)
        if not reply.HasField("request_body"):
            raise RuntimeError(f"refused: {reply}")
        return reply

    async def end(self) -> None:
        """As Envoy ends a stream once the response is complete."""
        await self._call.done_writing()
        while await self._call.read() is not _END_OF_STREAM:
            self.replies += 1

    def cut(self) -> None:
        self._call.cancel()


class Client:
    """Connections to one service, as Envoy's worker threads hold them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._open = channel.stream_stream(_PROCESS, response_deserializer=ext_proc.ProcessingResponse.FromString)
        self._log = channel.stream_unary(_LOG, request_serializer=als_pb2.StreamAccessLogsMessage.SerializeToString)()
        self._logging = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def to(cls, target: str) -> AsyncIterator[Self]:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 * 1024 * 1024)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            await channel.channel_ready()
            yield cls(channel)

    def stream(self) -> Stream:
        return Stream(self._open())

    async def log(self, entry: als_pb2.StreamAccessLogsMessage) -> None:
        async with self._logging:  # gRPC takes one write at a time
            await self._log.write(entry)

    async def exchange(self, script: Script, *, logged: bool) -> int:
        """One request from beginning to end; how many messages the service sent. ``logged``: an access log follows."""
        stream = self.stream()
        reply = await stream.dispatch(script)
        await stream.ask(script.answer)
        await stream.end()
        if logged:
            await self.log(log_entry(reply))
        return stream.replies
