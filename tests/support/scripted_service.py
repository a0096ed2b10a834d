"""A scripted ext_proc service, right or wrong as a test wants, and builders of its replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from tests.support.scripted_envoy import Mode, ScriptedEnvoy

Reply = ext_proc.ProcessingResponse
Handler = Callable[[Any], Awaitable[None]]

BODY = b'{"a":1}'


class Servicer(external_processor_pb2_grpc.ExternalProcessorServicer):
    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.ended = asyncio.Event()

    async def Process(self, _: Any, context: Any) -> None:
        try:
            await self.handler(context)
        finally:
            self.ended.set()


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, Servicer]]:
    server, servicer = grpc.aio.server(), Servicer(handler)
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", servicer
    finally:
        await server.stop(1.0)


# ---- replies ----


def header(
    key: str,
    raw: bytes = b"",
    value: str = "",
    action: HeaderValueOption.HeaderAppendAction = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
) -> HeaderValueOption:
    return HeaderValueOption(header=HeaderValue(key=key, raw_value=raw, value=value), append_action=action)


def mutation(*options: HeaderValueOption, remove: Sequence[str] = ()) -> ext_proc.HeaderMutation:
    return ext_proc.HeaderMutation(set_headers=options, remove_headers=remove)


def on_headers(*options: HeaderValueOption, remove: Sequence[str] = (), **common: Any) -> Reply:
    response = ext_proc.CommonResponse(header_mutation=mutation(*options, remove=remove), **common)
    return Reply(request_headers=ext_proc.HeadersResponse(response=response))


def on_body(*options: HeaderValueOption, body: bytes | None = None, **common: Any) -> Reply:
    response = ext_proc.CommonResponse(header_mutation=mutation(*options) if options else None, **common)
    if body is not None:
        response.body_mutation.body = body
    return Reply(request_body=ext_proc.BodyResponse(response=response))


def chunk(body: bytes, *options: HeaderValueOption, end: bool = False) -> Reply:
    reply = on_body(*options)
    reply.request_body.response.body_mutation.streamed_response.body = body
    reply.request_body.response.body_mutation.streamed_response.end_of_stream = end
    return reply


def on_response(*options: HeaderValueOption, **common: Any) -> Reply:
    response = ext_proc.CommonResponse(header_mutation=mutation(*options), **common)
    return Reply(response_headers=ext_proc.HeadersResponse(response=response))


def on_trailers(*options: HeaderValueOption) -> Reply:
    return Reply(request_trailers=ext_proc.TrailersResponse(header_mutation=mutation(*options)))


def immediate(*options: HeaderValueOption, status: int = 429, body: bytes = b"no", details: str = "") -> Reply:
    reply = Reply()
    reply.immediate_response.status.code = status  # type: ignore[assignment]
    reply.immediate_response.headers.CopyFrom(mutation(*options))
    reply.immediate_response.body = body
    reply.immediate_response.details = details
    return reply


def more_time(seconds: float) -> Reply:
    reply = Reply()
    reply.override_message_timeout.FromMicroseconds(int(seconds * 1e6))
    return reply


def metadata(reply: Reply, namespace: str = "envoy.lb", **values: str) -> Reply:
    reply.dynamic_metadata.update({namespace: values})
    return reply


def overriding(reply: Reply, **modes: str) -> Reply:
    reply.mode_override.SetInParent()
    for name, mode in modes.items():
        kind = reply.mode_override.DESCRIPTOR.fields_by_name[name].enum_type
        assert kind is not None
        setattr(reply.mode_override, name, kind.values_by_name[mode].number)
    return reply


def appending(key: str, raw: bytes, *, append: bool) -> HeaderValueOption:
    option = header(key, raw)
    option.append.value = append
    return option


def length(size: int) -> HeaderValueOption:
    return header("content-length", str(size).encode())


Script = Mapping[str, Sequence[Reply]]
RIGHT: dict[str, Sequence[Reply]] = {
    "request_headers": [on_headers()],
    "request_body": [on_body()],
    "request_trailers": [on_trailers()],
    "response_headers": [on_response()],
}


def scripted(script: Script) -> Handler:
    """Answer each message with the replies of its phase; in the full-duplex mode, the request's once it is all here."""

    async def handle(context: Any) -> None:
        full_duplex, late = False, []
        while (message := await context.read()) is not grpc.aio.EOF:
            phase = message.WhichOneof("request")
            if message.HasField("protocol_config"):
                full_duplex = message.protocol_config.request_body_mode == 4
            replies = script.get(phase, RIGHT[phase])
            if full_duplex and phase == "request_headers" and not message.request_headers.end_of_stream:
                late, replies = [*replies, *script.get("request_body", [chunk(BODY, end=True)])], []
            elif full_duplex and phase == "request_body":
                late, replies = ([], late) if message.request_body.end_of_stream else (late, [])
            elif full_duplex and phase == "request_trailers":
                replies = [*late, *replies]
            for reply in replies:
                await context.write(reply)

    return handle


async def play(script: Script, mode: Mode = "BUFFERED", *, answer: bool = True, **options: Any) -> Any:
    """One request against a service of that script, up to its end; returns the exchange and the client's response."""
    settings = {"message_timeout_s": 5.0} | {
        name: options.pop(name)
        for name in ("message_timeout_s", "max_message_timeout_s", "allow_mode_override", "receiving_namespaces")
        if name in options
    }
    request = {
        "path": "/v1/x?q=1",
        "body": BODY,
        "headers": [("X-Dup", "1"), ("x-dup", "2"), ("x-l", b"\xe9")],
    } | options
    async with serving(scripted(script)) as (target, _), ScriptedEnvoy(target, mode=mode, **settings) as envoy:
        exchange = await envoy.request(**request)
        response = None
        if exchange.immediate is None and answer:
            response = await exchange.response(200, [("content-length", "10"), ("x-up", "1")])
        await exchange.finish()
        return exchange, response
