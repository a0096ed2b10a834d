"""One HTTP request's life inside ext_proc: a state machine from Envoy's messages to our replies.

::

    HEADERS ──▶ BODY ──▶ DISPATCHED ──▶ RESPONDING        a P/D request, or one whose body had to be looked at
       └────────────────▶ DISPATCHED                       passed on at the headers: no body, or an opaque one
       └───────┴────────▶ ANSWERED                         ended by us (ImmediateResponse)

Every message gets the replies of its own phase; what arrives out of order changes nothing and is answered all the same,
so that Envoy never waits for us. All I/O goes through what the exchange is given.
"""

from __future__ import annotations

import enum
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from extproc import classify, destinations, openai, replies
from extproc.destinations import Destination
from extproc.errors import RequestError
from extproc.jsonobject import BadJson, JsonObject, NotAnObject, TooDeep
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.picking import Need
from extproc.prefill import Header, Prefilled, PrefillFailed, PrefillRefused, PrefillRequest
from extproc.telemetry.logs import log
from extproc.telemetry.tracing import NO_SPAN

if TYPE_CHECKING:
    from extproc.connectors import Handoff
    from extproc.fleet.engines import Reservation
    from extproc.service import Service

Send = Callable[[ext_proc.ProcessingResponse], Awaitable[None]]

_SERVED_MODES: Final = (ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED)
_TIMEOUT_MARGIN_S: Final = 10.0
_BYTES_PER_TOKEN: Final = 4

# Of a prefiller's refusal: what describes its connection or body framing must not reach the client.
_NOT_ANSWERED: Final = frozenset(
    "connection content-length content-encoding date keep-alive server te trailer transfer-encoding upgrade".split()
)


class State(enum.Enum):
    HEADERS = "headers"
    BODY = "body"
    DISPATCHED = "dispatched"
    RESPONDING = "responding"
    ANSWERED = "answered"


class Exchange:
    """Feed it Envoy's messages with :meth:`on`; call :meth:`close` once the stream is over, however it ended."""

    def __init__(self, service: Service, send: Send, connection: str = "") -> None:
        self._service = service
        self._send = send
        self._connection = connection
        self._state = State.HEADERS
        self._streamed = False
        self._response_streamed = False
        self._bypass_reason = ""
        self._reason = ""
        self._span = NO_SPAN
        self._subset: frozenset[str] | None = None
        self._request: classify.Request | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._decoder: Reservation | None = None
        self._timings: list[str] = []
        self._fallback = False
        self._closed = False
        self._failed_attempts: Sequence[str] = ()
        self._started = time.monotonic()
        self._prefill_from: float | None = None
        self._prefill_to: float | None = None
        self.request_id = str(uuid.uuid4())
        self.decision = "none"
        self.prefilled: Prefilled | None = None
        self.status: int | None = None

    @property
    def answered(self) -> bool:
        """Whether we ended the request ourselves; Envoy then wants no more replies."""
        return self._state is State.ANSWERED

    def needs_us_no_more(self, late: bool) -> bool:
        """Whether Envoy can go on alone: all its messages are answered (or, ``late``, all that steer the request)."""
        return self._state is State.RESPONDING or (late and self._state is State.DISPATCHED)

    async def on(self, message: ext_proc.ProcessingRequest) -> None:
        """Answer one message. Only cancellation gets out of here: everything else becomes a reply."""
        phase = message.WhichOneof("request") or ""
        try:
            await self._dispatch(phase, message)
        except RequestError as error:
            await self._refuse(error)
        except Exception:  # noqa: BLE001 (an unanswered message would hang the client)
            log.exception("exchange failed", request_id=self.request_id, phase=phase)
            await self._refuse(RequestError(500, "internal", "The gateway failed to process this request."))

    async def _dispatch(self, phase: str, message: ext_proc.ProcessingRequest) -> None:
        if self.answered or not phase:
            return
        if phase == "request_headers" and self._state is State.HEADERS:
            await self._on_request_headers(message)
        elif phase == "request_body" and self._state is State.BODY:
            await self._on_request_body(message.request_body)
        elif phase == "request_trailers" and self._state is State.BODY:
            await self._on_body_complete(trailers=True)
            if not self.answered:
                await self._send(replies.nothing(phase))
        elif phase == "response_headers" and self._state is State.DISPATCHED:
            await self._on_response_headers(message.response_headers)
        else:
            body = getattr(message, phase) if phase.endswith("_body") else None
            streamed = self._streamed if phase == "request_body" else self._response_streamed
            await self._send(replies.nothing(phase, streamed_body=body if streamed else None))

    # ── request headers ───────────────────────────────────────────────────────────────────────────────────────────

    async def _on_request_headers(self, message: ext_proc.ProcessingRequest) -> None:
        self._adopt_mode(message)
        self._subset = destinations.subset_hint(message)
        self._service.admit()
        request = self._request = classify.read_headers(message.request_headers)
        self._span = self._service.tracing.exchange(request.headers)
        recent = self._service.recent
        recent.note(self.request_id, client_request_id=request.client_id, path=request.route_path)
        if request.client_id:  # Envoy's log knows a request that ends before our reply by this id only
            recent.alias(request.client_id, self.request_id)
        plan = classify.plan(request, self._service.config.routing.paths)
        if isinstance(plan, classify.Pass):
            self._bypassed(plan.reason)
            await self._pass_on(plan)
            return
        self._bypass_reason = "" if isinstance(plan, classify.Candidate) else plan.reason
        self._state = State.BODY
        if not self._streamed:
            await self._send(replies.request_headers(remove=self._spoofed()))

    def _adopt_mode(self, message: ext_proc.ProcessingRequest) -> None:
        """Serve the body mode that Envoy says is in force; refuse one that cannot be served correctly."""
        if not message.HasField("protocol_config"):
            return  # an Envoy too old to say; only BUFFERED is documented for those
        mode = message.protocol_config.request_body_mode
        if mode not in _SERVED_MODES:
            name = ProcessingMode.BodySendMode.Name(mode) if mode in ProcessingMode.BodySendMode.values() else str(mode)
            text = (
                f"This gateway's Envoy uses request_body_mode {name}; "
                "extproc needs BUFFERED or FULL_DUPLEX_STREAMED in the ext_proc filter's processing_mode."
            )
            log.error("unsupported processing mode", request_body_mode=name)
            raise RequestError(500, "unsupported_processing_mode", text)
        self._streamed = mode == ProcessingMode.FULL_DUPLEX_STREAMED
        self._response_streamed = message.protocol_config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED

    async def _pass_on(self, plan: classify.Pass) -> None:
        """Decide at the headers: a decoder answers this request as it stands, and nobody needs to see its body."""
        destination = self._reserve_decoder()
        self._decided("bypass")
        reply = replies.request_headers(
            self._routing_headers(destination), self._spoofed(), skip_body=not plan.no_body and not self._streamed
        )
        replies.route(reply, destination.endpoints)
        self._state = State.DISPATCHED
        await self._send(reply)

    # ── request body ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _on_request_body(self, body: ext_proc.HttpBody) -> None:
        self._size += len(body.body)
        if self._size > self._service.config.limits.body_bytes:
            self._chunks.clear()
            limit = self._service.config.limits.body_bytes
            raise RequestError(413, "body_too_large", f"The request body exceeds {limit} bytes.")
        self._chunks.append(body.body)
        if body.end_of_stream or not self._streamed:
            await self._on_body_complete()

    async def _on_body_complete(self, *, trailers: bool = False) -> None:
        text = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        body = self._parse(text)
        if body is None:
            await self._bypass(self._bypass_reason or "not_json", None, text, trailers)
            return
        request = self._request
        assert request is not None  # set before the state BODY
        reason = self._bypass_reason or openai.bypass_reason(request.route_path, body)
        if not reason and len(text) < self._service.config.routing.min_prompt_bytes:
            reason = "small_prompt"
        if not reason:
            reason = self._service.why_not_disaggregate(openai.model(body))
        if reason:
            await self._bypass(reason, body, text, trailers)
        else:
            await self._prefill_then_decode(request, body, text, trailers)

    def _parse(self, text: bytes) -> JsonObject | None:
        """The body as an object; None where an engine would not find params for its KV connector in it either."""
        try:
            return openai.parse(text)
        except TooDeep:
            raise RequestError(400, "json_too_deep", "The request body nests too deeply.") from None
        except NotAnObject:
            return None
        except BadJson:
            pass
        # Engines read bodies with Python's json module, which takes more than RFC 8259: NaN, a BOM, UTF-16. Such a
        # request may pass, but not as a way around the removal of connector params.
        try:
            value = json.loads(text)
        except RecursionError:
            raise RequestError(400, "json_too_deep", "The request body nests too deeply.") from None
        except ValueError:
            return None  # an engine cannot read it either
        if openai.smuggles_connector_keys(value):
            message = "kv_transfer_params are set by the gateway and not accepted from clients."
            raise RequestError(400, "connector_params_not_accepted", message)
        return None

    async def _bypass(self, reason: str, body: JsonObject | None, text: bytes, trailers: bool) -> None:
        self._bypassed(reason)
        destination = self._reserve_decoder(self._need(body, text) if body else None)
        self._decided("bypass")
        await self._to_decoder(text, openai.decode_body(body, None) if body else text, destination, trailers)

    async def _prefill_then_decode(
        self, request: classify.Request, body: JsonObject, text: bytes, trailers: bool
    ) -> None:
        need = self._need(body, text)
        destination = self._reserve_decoder(need, paired=True)
        budget = self._service.config.prefill.budget_s
        if not self._streamed:  # in the full-duplex mode Envoy has no message timeout
            await self._send(replies.more_time(budget + _TIMEOUT_MARGIN_S))
        self._prefill_from = time.monotonic()
        params: bytes | None = None
        try:
            prefilled = await self._service.prefill(
                PrefillRequest(
                    request.path,
                    request.headers,
                    body,
                    self.request_id,
                    replace(need, subset=None),
                    destination.pairing,
                    self._span,
                )
            )
        except PrefillRefused as refusal:
            await self._answer_with(refusal)
            return
        except PrefillFailed as failure:
            self._failed_attempts = failure.reasons
            self._fall_back(failure, len(text))
        else:
            self.prefilled = prefilled
            self._failed_attempts = prefilled.failed_attempts
            if prefilled.request_id != self.request_id:
                self._service.recent.alias(prefilled.request_id, self.request_id)
                self.request_id = prefilled.request_id
            params = prefilled.handoff.params
            self._decided("disaggregated")
        self._prefill_to = time.monotonic()
        self._timings.append(f"prefill;dur={(self._prefill_to - self._prefill_from) * 1000:.1f}")
        await self._to_decoder(text, openai.decode_body(body, params), destination, trailers)

    def _need(self, body: JsonObject, text: bytes) -> Need:
        """What the request asks of an engine. Tokens are estimated: about four bytes each."""
        affinity_bytes = self._service.config.routing.affinity_bytes
        return Need(
            model=openai.model(body),
            tokens=len(text) // _BYTES_PER_TOKEN,
            affinity=openai.prompt_hash(body, affinity_bytes) if self._service.wants_affinity else None,
            subset=self._subset,
        )

    def _fall_back(self, failure: PrefillFailed, size: int) -> None:
        """Let the decoder prefill, where that is configured and within its bounds; raises RequestError otherwise."""
        settings = self._service.config.prefill
        fallbacks = self._service.metrics.fallbacks
        if settings.on_failure == "decode":
            if size <= settings.fallback.max_body_bytes and self._service.take_fallback_slot():
                self._fallback = True
                fallbacks.labels("decode").inc()
                self._decided("fallback")
                return
            fallbacks.labels("out_of_bounds").inc()
        else:
            fallbacks.labels("error").inc()
        log.warning("prefill failed", reasons=failure.reasons)
        if failure.timed_out:
            raise RequestError(504, "prefill_timeout", "No prefill engine answered in time.")
        raise RequestError(503, "prefill_unavailable", "No prefill engine is available.", headers={"retry-after": "1"})

    async def _to_decoder(self, original: bytes, body: bytes, destination: Destination, trailers: bool) -> None:
        """Hand the request to Envoy for its decode leg."""
        headers = self._routing_headers(destination)
        changed = body if body is not original else None
        self._state = State.DISPATCHED
        ticket = None
        if self.prefilled is not None:
            ticket = self._service.endings.dispatched(self.prefilled.handoff, self.request_id)
        if self._streamed:
            reply = replies.request_headers(headers, self._spoofed())
            replies.route(reply, destination.endpoints, ticket)
            await self._send(reply)
            for chunk in replies.streamed_body(body, end_of_stream=not trailers):
                await self._send(chunk)
        else:
            reply = replies.buffered_body(headers, changed)
            replies.route(reply, destination.endpoints, ticket)
            await self._send(reply)

    # ── response ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _on_response_headers(self, message: ext_proc.HttpHeaders) -> None:
        self._state = State.RESPONDING
        status = next((header for header in message.headers.headers if header.key == ":status"), None)
        if status is not None:
            self.status = int(status.raw_value or status.value)
        client_id = self._request.request_id if self._request else None
        headers: list[Header] = [("x-request-id", client_id or self.request_id.encode())]
        if self._timings:
            headers.append(("server-timing", ", ".join(self._timings).encode()))
        await self._send(replies.response_headers(headers))

    # ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_with(self, refusal: PrefillRefused) -> None:
        """Give the client the engine's own answer to a faulty request."""
        answer = refusal.answer
        headers = [
            (name, value.encode("latin-1", "replace")) for name, value in answer.headers if name not in _NOT_ANSWERED
        ]
        self._decided("refused_by_engine")
        self._state = State.ANSWERED
        await self._send(replies.immediate(answer.status, headers, answer.body, "extproc_refused_by_prefill_engine"))

    async def _refuse(self, error: RequestError) -> None:
        self._service.metrics.errors.labels(error.code).inc()
        self._decided("refused")
        self._state = State.ANSWERED
        self.status = error.status
        self._reason = error.code
        await self._send(replies.error(error))

    def close(self, *, let_go: bool = False) -> None:
        """Give back what the exchange holds, once. ``let_go``: we leave, the request goes on without us."""
        if self._closed:
            return
        self._closed = True
        if self.decision == "none":
            self._decided("client_left")
        if self.prefilled is not None:
            self._settle(self.prefilled.handoff, let_go)
        if self._decoder is not None:
            self._decoder.release()
        if self._fallback:
            self._fallback = False
            self._service.return_fallback_slot()
        record = self._record()
        self._span.set(**{key: value for key, value in record.items() if isinstance(value, str | int | float)})
        self._span.end()
        self._service.recent.note(**record)
        log.info("exchange", **record)

    def _record(self) -> dict[str, Any]:
        """What is worth telling of this exchange, for the log and the status page."""
        return {
            "request_id": self.request_id,
            "client_request_id": self._request.client_id if self._request else None,
            "path": self._request.route_path if self._request else None,
            "decision": self.decision,
            "reason": self._reason or None,
            "state": self._state.value,
            "prefiller": self.prefilled.handoff.prefiller.name if self.prefilled else None,
            "decoder": self._decoder.engine.name if self._decoder else None,
            "failed_attempts": list(self._failed_attempts) or None,
            "status": self.status,
            "prefill_ms": round(self.prefilled.seconds * 1000, 1) if self.prefilled else None,
            "queued_ms": round(self.prefilled.queued_s * 1000, 1) if self.prefilled else None,
            "prefill_from_ms": self._since_start(self._prefill_from),
            "prefill_to_ms": self._since_start(self._prefill_to),
            "total_ms": round((time.monotonic() - self._started) * 1000, 1),
        }

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else round((moment - self._started) * 1000, 1)

    def _settle(self, handoff: Handoff, let_go: bool) -> None:
        endings = self._service.endings
        if let_go:
            endings.let_go(handoff)
        elif self._state in (State.DISPATCHED, State.RESPONDING):
            endings.stream_ended(handoff, self.status, self._connection)
        else:
            endings.never_dispatched(handoff)

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _bypassed(self, reason: str) -> None:
        self._reason = reason
        self._service.metrics.bypass.labels(reason).inc()

    def _decided(self, decision: str) -> None:
        self.decision = decision
        self._service.metrics.exchanges.labels(decision).inc()

    def _reserve_decoder(self, need: Need | None = None, *, paired: bool = False) -> Destination:
        """Pick and reserve; raises RequestError where there is nothing to pick."""
        choices = self._service.config.routing.decode_choices
        need = need or Need(subset=self._subset)
        destination = destinations.choose(self._service.fleet, need, choices, paired=paired)
        self._decoder = destination.reservation
        return destination

    def _routing_headers(self, destination: Destination) -> list[Header]:
        """One X-Request-Id line for both legs, and the endpoint-picker's destination."""
        headers = [("x-request-id", self.request_id.encode()), (replies.DESTINATION, destination.endpoints.encode())]
        if destination.rank is not None:
            headers.append(("x-data-parallel-rank", str(destination.rank).encode()))
        return headers

    def _spoofed(self) -> tuple[str, ...]:
        return self._request.spoofed if self._request else ()
