"""A scripted Envoy: speaks ext_proc to a service as Envoy does, and fails the test where Envoy would fail the request.

::

    async with ScriptedEnvoy(target) as envoy:
        exchange = await envoy.request("POST", "/v1/completions", body=b"{}")
        exchange.upstream.headers, exchange.dynamic_metadata["envoy.lb"]
        await exchange.response(200, [("content-type", "application/json")])
        await exchange.finish()
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import grpc

from extproc.pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from tests.support import envoy_rules as rules
from tests.support.envoy_rules import ClientResponse, Headers, ImmediateAnswer, ProtocolViolation, UpstreamRequest
from tests.support.raw_stream import RawStream

Mode = Literal["BUFFERED", "FULL_DUPLEX_STREAMED"]
GivenHeaders = Iterable[tuple[str, str | bytes]]
Phase = Literal["request_headers", "request_body", "request_trailers", "response_headers"]


class StreamFailed(ProtocolViolation):
    """The service ended the stream with an error, or before it had answered."""

    def __init__(self, problem: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(
            f"{problem}: {code.name} {details}".rstrip(), 500, f"ext_proc_error_gRPC_error_{code.value[0]}"
        )
        self.code = code


class Exchange:
    """One HTTP request's way through the ext_proc filter.

    Once the request phase is done, either ``immediate`` is what the client gets or ``upstream`` what the upstream gets.
    """

    def __init__(self, envoy: ScriptedEnvoy, stream: RawStream, request: UpstreamRequest) -> None:
        self._envoy = envoy
        self._streamed = envoy.mode == "FULL_DUPLEX_STREAMED"
        self._headers: Headers = [
            (":authority", request.authority),
            (":path", request.path),
            (":method", request.method),
            (":scheme", request.scheme),
            *request.headers,
        ]
        self._request = request
        self._metadata = rules.Metadata(envoy.receiving_namespaces)
        self._skips_body = False
        self._skips_response = False
        self._first = True
        self.stream = stream
        self.immediate: ImmediateAnswer | None = None
        self.replies: list[ext_proc.ProcessingResponse] = []
        """All replies in order, those that ask for more time too."""
        self.overrides: list[float] = []
        """Seconds asked for by override_message_timeout, in order."""
        self.route_cache_cleared = False
        self._upstream: UpstreamRequest | None = None

    @property
    def upstream(self) -> UpstreamRequest:
        assert self.immediate is None, f"answered without the upstream: {self.immediate}"
        assert self._upstream is not None, "the request phase is not over"
        return self._upstream

    @property
    def dynamic_metadata(self) -> dict[str, dict[str, Any]]:
        """What Envoy keeps: the receiving namespaces alone."""
        return self._metadata.kept

    @property
    def raw_dynamic_metadata(self) -> dict[str, dict[str, Any]]:
        return self._metadata.raw

    # ---- phases ----

    async def run(self, chunks: Sequence[bytes]) -> None:
        """The request phase: headers, body (``chunks``, none for a request without body), trailers."""
        has_body = bool(chunks) or bool(self._request.trailers)
        await self._send(request_headers=_http_headers(self._headers, end_of_stream=not has_body))
        if self._streamed and has_body:
            for chunk in chunks:
                await self._send(request_body=ext_proc.HttpBody(body=chunk))
            if self._request.trailers:
                await self._send(request_trailers=ext_proc.HttpTrailers(trailers=_header_map(self._request.trailers)))
            else:
                await self._send(request_body=ext_proc.HttpBody(end_of_stream=True))
        reply = await self._reply("request_headers")
        body = b"".join(chunks)
        if reply is not None:
            common = reply.request_headers.response
            replaced = rules.header_phase(common, self._headers, "request", streamed=self._streamed)
            self.route_cache_cleared |= common.clear_route_cache
            if replaced is not None:
                body, self._skips_body = replaced, True
            if has_body and not self._skips_body:
                body = await (self._streamed_body() if self._streamed else self._buffered_body(body))
            elif has_body and self._streamed and self._request.trailers:
                raise NotImplementedError("a replaced body with trailers")
        if self.immediate is None:
            if not self._streamed:
                rules.check_content_length(self._headers, body, mutated=False)
            elif has_body:
                self._headers = [item for item in self._headers if item[0] != "content-length"]
            self._upstream = self._leaving(body)

    async def _buffered_body(self, body: bytes) -> bytes:
        await self._send(request_body=ext_proc.HttpBody(body=body, end_of_stream=not self._request.trailers))
        reply = await self._reply("request_body")
        if reply is None:
            return body
        self.route_cache_cleared |= reply.request_body.response.clear_route_cache
        return rules.buffered_body(reply.request_body.response, self._headers, body)

    async def _streamed_body(self) -> bytes:
        trailers = self._request.trailers
        body: list[bytes] = []
        while True:
            reply = await self._reply("request_body", "request_trailers" if trailers else "request_body")
            if reply is None:
                break
            if reply.WhichOneof("response") == "request_trailers":
                rules.mutate_headers(trailers, reply.request_trailers.header_mutation, "request")
                break
            chunk, end = rules.streamed_body(reply.request_body.response, trailers=bool(trailers))
            body.append(chunk)
            if end:
                break
        return b"".join(body)

    async def response(
        self, status: int = 200, headers: GivenHeaders = (), *, end_of_stream: bool = False
    ) -> ClientResponse:
        """The response_headers phase; what the client gets. In the full-duplex mode the stream is half-closed then."""
        assert self._upstream is not None, "there is no upstream that could respond"
        given = [(":status", str(status)), *_latin(headers)]
        if self._skips_response or self.stream.code is grpc.StatusCode.OK:
            # A stream that the service ended cleanly between messages has Envoy go on alone.
            self._nothing_outstanding()
            return ClientResponse(given[1:], status=status)
        changed = list(given)
        await self._send(response_headers=_http_headers(given, end_of_stream=end_of_stream))
        reply = await self._reply("response_headers")
        if reply is None:
            assert self.immediate is not None
            return self.immediate
        rules.header_phase(reply.response_headers.response, changed, "response", streamed=False)
        if _of(changed, "content-length") != _of(given, "content-length"):
            raise ProtocolViolation("content-length of a response changed, its body not: the client misreads it")
        if self._streamed:
            await self.stream.half_close()
        new_status = int(_of(changed, ":status")[0])
        return ClientResponse([item for item in changed if item[0] != ":status"], status=new_status)

    async def finish(self) -> None:
        """End the HTTP stream the normal way, and wait for the service to end its side."""
        await self.stream.half_close()
        await self._no_more()

    async def reset(self) -> None:
        """End it as Envoy does when the client or the upstream is lost: the gRPC stream is cancelled."""
        await self.stream.reset()

    # ---- messages ----

    async def _send(self, **member: Any) -> None:
        if member.keys() & {"request_headers", "response_headers"} or not self._streamed:
            self._nothing_outstanding()
        message = ext_proc.ProcessingRequest(**member)
        message.metadata_context.SetInParent()
        if self._first:
            self._first = False
            message.protocol_config.request_body_mode = ProcessingMode.BodySendMode.Value(self._envoy.mode)  # type: ignore[assignment]
            message.protocol_config.response_body_mode = ProcessingMode.NONE
        await self.stream.send(message)

    def _nothing_outstanding(self) -> None:
        if self.stream.pending:
            raise ProtocolViolation("a reply although no message waits for one", 500, "spurious_message")

    async def _reply(self, *phases: Phase) -> ext_proc.ProcessingResponse | None:
        """The reply to the message just sent; None if it is an immediate response."""
        time_limit, asked = self._envoy.message_timeout_s, False
        while True:
            try:
                reply = await self.stream.receive(time_limit)
            except TimeoutError:
                problem = f"no reply to {phases[0]} within {time_limit:g} s"
                raise ProtocolViolation(problem, 504, "ext_proc_error_per-message_timeout_exceeded") from None
            if reply is None:
                assert self.stream.code is not None
                raise StreamFailed(
                    f"the stream ended before {phases[0]} was answered", self.stream.code, self.stream.details
                )
            self.replies.append(reply)
            if not reply.HasField("override_message_timeout"):
                break
            time_limit = rules.check_timeout_override(reply, self._envoy.max_message_timeout_s)
            if asked:
                raise ProtocolViolation(f"override_message_timeout a second time for {phases[0]}")
            if self._streamed and phases[0] != "response_headers":
                raise ProtocolViolation("override_message_timeout in the full-duplex mode, which has no time limit")
            asked = True
            self.overrides.append(time_limit)
        member = reply.WhichOneof("response")
        if member == "immediate_response":
            await self._answer(reply)
            return None
        if member is None:
            raise ProtocolViolation("a reply without content", 500, "unhandled_message")
        if member not in phases:
            raise ProtocolViolation(f"{member} in reply to {' or '.join(phases)}", 500, "spurious_message")
        self._metadata.merge(reply)
        if reply.HasField("mode_override"):
            self._override_mode(reply.mode_override, phases[0])
        return reply

    async def _answer(self, reply: ext_proc.ProcessingResponse) -> None:
        self._metadata.merge(reply)
        if reply.HasField("mode_override"):
            raise ProtocolViolation("mode_override beside an immediate response")
        self.immediate = rules.immediate_answer(reply.immediate_response)
        await self.stream.half_close()
        await self._no_more()

    async def _no_more(self) -> None:
        try:
            left = await self.stream.ended(self._envoy.message_timeout_s)
        except TimeoutError:
            raise ProtocolViolation("the service does not end its side of a stream that is over") from None
        if left:
            members = ", ".join(reply.WhichOneof("response") or "nothing" for reply in left)
            raise ProtocolViolation(f"replies that nothing waits for: {members}")
        if self.stream.code is not grpc.StatusCode.OK:
            assert self.stream.code is not None
            raise StreamFailed("the stream ended with an error", self.stream.code, self.stream.details)

    def _override_mode(self, mode: ProcessingMode, phase: Phase) -> None:
        """Envoy takes the whole mode over: a body mode left out is NONE."""
        if phase not in ("request_headers", "response_headers"):
            raise ProtocolViolation(f"mode_override in a reply to {phase}")
        if not self._envoy.allow_mode_override:
            raise ProtocolViolation("mode_override, which the filter does not allow")
        if mode.response_body_mode != ProcessingMode.NONE:
            raise NotImplementedError("response bodies are not scripted")
        if phase == "response_headers":
            return
        wanted = ProcessingMode.BodySendMode.Name(mode.request_body_mode)
        if self._streamed and wanted != "FULL_DUPLEX_STREAMED":
            raise ProtocolViolation(f"mode_override to {wanted} while the body is being streamed: the request hangs")
        if wanted not in ("NONE", self._envoy.mode):
            raise NotImplementedError(f"an override to {wanted} is not scripted")
        self._skips_body = wanted == "NONE"
        self._skips_response = mode.response_header_mode == ProcessingMode.SKIP

    def _leaving(self, body: bytes) -> UpstreamRequest:
        pseudo = dict(item for item in self._headers if item[0].startswith(":"))
        return UpstreamRequest(
            [item for item in self._headers if not item[0].startswith(":")],
            body,
            method=pseudo[":method"],
            path=pseudo[":path"],
            authority=pseudo[":authority"],
            scheme=pseudo[":scheme"],
            trailers=self._request.trailers,
        )


class ScriptedEnvoy:
    """An Envoy with one ext_proc filter, talking to the service at ``target`` (``host:port``).

    ``message_timeout_s`` is how long each reply may take, until the service asks for more (``max_message_timeout_s`` at
    most). Leaving the context resets every stream still open.
    """

    def __init__(
        self,
        target: str,
        *,
        mode: Mode = "BUFFERED",
        receiving_namespaces: Iterable[str] = ("envoy.lb", "extproc"),
        allow_mode_override: bool = True,
        message_timeout_s: float = 10.0,
        max_message_timeout_s: float = 3600.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.target = target
        self.mode = mode
        self.receiving_namespaces = frozenset(receiving_namespaces)
        self.allow_mode_override = allow_mode_override
        self.message_timeout_s = message_timeout_s
        self.max_message_timeout_s = max_message_timeout_s
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._streams: list[RawStream] = []

    async def __aenter__(self) -> Self:
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=unlimited)
        else:
            self._channel = grpc.aio.secure_channel(self.target, self._credentials, options=unlimited)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._channel is not None
        for stream in self._streams:
            await stream.reset()
        await self._channel.close()

    def raw_stream(self) -> RawStream:
        """A stream for messages of your own making."""
        assert self._channel is not None, "use `async with`"
        stream = RawStream(external_processor_pb2_grpc.ExternalProcessorStub(self._channel).Process())  # type: ignore[no-untyped-call]
        self._streams.append(stream)
        return stream

    def open(
        self,
        method: str = "POST",
        path: str = "/",
        headers: GivenHeaders = (),
        *,
        trailers: GivenHeaders = (),
        authority: str = "gateway.example",
        request_id: str | None = None,
    ) -> Exchange:
        """An exchange that has sent nothing yet; :meth:`Exchange.run` goes on. For tests that interrupt it."""
        lines = _latin(headers)
        lines.append(("x-forwarded-proto", "http"))
        if request_id is not None:
            lines.append(("x-request-id", request_id))
        request = UpstreamRequest(
            lines, method=method, path=path, authority=authority, scheme="http", trailers=_latin(trailers)
        )
        return Exchange(self, self.raw_stream(), request)

    async def request(
        self,
        method: str = "POST",
        path: str = "/",
        headers: GivenHeaders = (),
        body: bytes = b"",
        *,
        chunks: Sequence[bytes] | None = None,
        trailers: GivenHeaders = (),
        authority: str = "gateway.example",
        request_id: str | None = None,
    ) -> Exchange:
        """Send a request up to where it leaves for the upstream, or is answered.

        With ``chunks`` instead of ``body`` it has no content-length; in the full-duplex mode each is one message. With
        ``request_id``, Envoy's own is added. Cancelling this call is the client going away. Raises ProtocolViolation.
        """
        lines = _latin(headers)
        if chunks is None and (body or method in ("POST", "PUT", "PATCH")) and not _of(lines, "content-length"):
            lines.append(("content-length", str(len(body))))
        exchange = self.open(method, path, lines, trailers=trailers, authority=authority, request_id=request_id)
        try:
            await exchange.run(chunks if chunks is not None else [body] if body else [])
        except BaseException:
            await exchange.reset()
            raise
        return exchange


def _latin(headers: GivenHeaders) -> Headers:
    return [(name.lower(), value.decode("latin-1") if isinstance(value, bytes) else value) for name, value in headers]


def _of(headers: Headers, name: str) -> list[str]:
    return [value for key, value in headers if key == name]


def _header_map(headers: Headers) -> HeaderMap:
    """As Envoy sends them: in ``raw_value`` alone."""
    return HeaderMap(headers=[HeaderValue(key=name, raw_value=value.encode("latin-1")) for name, value in headers])


def _http_headers(headers: Headers, *, end_of_stream: bool) -> ext_proc.HttpHeaders:
    return ext_proc.HttpHeaders(headers=_header_map(headers), end_of_stream=end_of_stream)
