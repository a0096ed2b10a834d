"""One HTTP request's life inside ext_proc: a state machine from Envoy's messages to our replies.

::

    HEADERS ──▶ BODY ──▶ DISPATCHED ──▶ RESPONDING        a P/D request, or one whose body had to be looked at
       └────────────────▶ DISPATCHED                       passed on at the headers: no body, or an opaque one
       └───────┴────────▶ ANSWERED                         ended by us (ImmediateResponse)
       └───────┴──────────────────────▶ RESPONDING         answered by Envoy itself, or by a filter before us

Every message gets the replies of its own phase; what arrives out of order changes nothing and is answered all the same,
so that Envoy never waits for us. A stream that ended before its request was answered would have Envoy go on with the
request as the client sent it. All I/O goes through what the exchange is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from extproc import classify, destinations, openai, refusals, replies, requestbody
from extproc.decision import decide
from extproc.destinations import Destination
from extproc.errors import RequestError
from extproc.jsonobject import JsonObject
from extproc.modes import Modes, unserved
from extproc.patience import MoreTime
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.picking import Need
from extproc.prefill import Header, Prefilled, PrefillFailed, PrefillRefused, PrefillRequest
from extproc.requestbody import RequestBody
from extproc.telemetry.account import Account
from extproc.telemetry.logs import log

if TYPE_CHECKING:
    from extproc.connectors import Handoff
    from extproc.fleet.engines import Engine, Reservation
    from extproc.prefixes import Prefix
    from extproc.service import Service

Send = Callable[[ext_proc.ProcessingResponse], Awaitable[None]]

_TIMEOUT_MARGIN_S: Final = 10.0


class State(enum.Enum):
    HEADERS = "headers"
    BODY = "body"
    DISPATCHED = "dispatched"
    RESPONDING = "responding"
    ANSWERED = "answered"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Of a body. Held instead of Envoy's message, which would keep the bytes in memory a second time."""

    data: bytes
    end_of_stream: bool


class Exchange:
    """Feed it Envoy's messages with :meth:`on`; call :meth:`close` once the stream is over, however it ended."""

    def __init__(
        self, service: Service, send: Send, connection: str = "", trace: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        self._service = service
        self._limits = service.config.limits
        self._send = send
        self._connection = connection
        self._state = State.HEADERS
        self._modes = Modes()
        self._account = Account(service.metrics, service.recent, service.tracing, trace)
        self._deadline = time.monotonic() + self._limits.exchange_s
        self._body = RequestBody(self._limits.body_bytes)
        self._body_timer: asyncio.TimerHandle | None = None
        self._late_answer: asyncio.Task[None] | None = None
        self._request: classify.Request | None = None
        self._bypass_reason = ""
        self._subset: frozenset[str] | None = None
        self._prefix: Prefix | None = None
        self._decoder: Reservation | None = None
        self._prefilled: Prefilled | None = None
        self._fallback = False
        self._closed = False
        self.answering = False
        """Whether a message is being answered right now: a handler that is cancelled while it writes aborts its stream,
        and the client's response with it."""

    @property
    def answered(self) -> bool:
        """Whether we ended the request ourselves; Envoy then wants no more replies."""
        return self._state is State.ANSWERED

    def needs_us_no_more(self, late: bool) -> bool:
        """Whether Envoy can go on alone: all its messages are answered (or, ``late``, all that steer the request)."""
        if self.answering:
            return False
        return self._state is State.RESPONDING or (late and self._state is State.DISPATCHED)

    @property
    def undecided(self) -> bool:
        """Whether the request has not been sent on its way: its body or its prefill is still to come."""
        return self._state in (State.HEADERS, State.BODY)

    def on(self, message: ext_proc.ProcessingRequest) -> Coroutine[Any, Any, None]:
        """Answer one message, once awaited; the message can be let go of before.

        Only cancellation gets out of there: everything else becomes a reply.
        """
        if self._state is State.HEADERS:
            self._modes.adopt(message)
        phase = message.WhichOneof("request") or ""
        if not phase.endswith("_body"):
            return self._answer(phase, message)
        body: ext_proc.HttpBody = getattr(message, phase)
        return self._answer(phase, _Piece(body.body, body.end_of_stream))

    async def _answer(self, phase: str, event: ext_proc.ProcessingRequest | _Piece) -> None:
        try:
            await self._dispatch(phase, event)
        except RequestError as error:
            await self._send(self._refusal(error))
        except Exception:  # noqa: BLE001 (an unanswered message would hang the client)
            log.exception("exchange failed", request_id=self._account.request_id, phase=phase)
            fault = RequestError(500, "internal", "The gateway failed to process this request.")
            await self._send(self._refusal(fault))

    async def _dispatch(self, phase: str, event: ext_proc.ProcessingRequest | _Piece) -> None:
        if self.answered or not phase:
            return
        match phase, self._state, event:
            case "request_headers", State.HEADERS, ext_proc.ProcessingRequest():
                await self._on_request_headers(event)
            case "request_body" | "request_trailers", State.HEADERS, _:
                raise unserved("request_header_mode", "SKIP", "SEND")
            case "request_headers", State.BODY, _ if self._modes.streamed:
                pass  # their reply is held back until the body is here
            case "request_body", State.BODY, _Piece():
                await self._on_request_body(event)
            case "request_trailers", State.BODY, _:
                await self._on_body_complete(trailers=True)
            case "response_headers", State.HEADERS | State.BODY | State.DISPATCHED, ext_proc.ProcessingRequest():
                await self._on_response_headers(event)
            case _, _, _Piece() if self._modes.sends_back(phase):  # there, a body that is not sent back is dropped
                for chunk in replies.streamed_body(phase, event.data, end_of_stream=event.end_of_stream):
                    await self._send(chunk)
            case _:
                await self._send(replies.nothing(phase))

    # ── request headers ───────────────────────────────────────────────────────────────────────────────────────────

    async def _on_request_headers(self, message: ext_proc.ProcessingRequest) -> None:
        request = self._request = classify.read_headers(message.request_headers)
        self._account.began(request)
        self._modes.check()
        self._service.admit()
        classify.check_size(request, self._limits)
        self._subset = destinations.subset_hint(message)
        plan = classify.plan(request, self._service.config.routing.paths)
        if isinstance(plan, classify.Pass):
            await self._pass_on(plan)
            return
        self._bypass_reason = "" if isinstance(plan, classify.Candidate) else plan.reason
        self._state = State.BODY
        if not self._modes.streamed:
            await self._send(replies.request_headers(remove=request.spoofed))
        patience_s = min(self._limits.body_timeout_s, self._limits.exchange_s)
        self._body_timer = asyncio.get_running_loop().call_later(patience_s, self._body_is_late)

    async def _pass_on(self, plan: classify.Pass) -> None:
        """Decide at the headers: a decoder answers this request as it stands, and nobody needs to see its body."""
        self._account.bypassed(plan.reason)
        destination = self._reserve_decoder(Need(subset=self._subset))
        self._account.decided("bypass")
        skip_body = not plan.no_body and not self._modes.streamed  # where it is streamed, Envoy would wait for ever
        reply = replies.request_headers(self._routing_headers(destination), self._spoofed, skip_body=skip_body)
        self._state = State.DISPATCHED
        await self._send(self._routed(reply, destination))

    # ── request body ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _on_request_body(self, piece: _Piece) -> None:
        self._body.add(piece.data)
        if piece.end_of_stream or not self._modes.streamed:
            await self._on_body_complete()

    def _body_is_late(self) -> None:
        if self._state is State.BODY:
            answer = self._refusal(RequestError(408, "body_timeout", "The request body did not arrive in time."))
            self._late_answer = asyncio.create_task(self._send_late(answer), name="late body")

    async def _send_late(self, answer: ext_proc.ProcessingResponse) -> None:
        with contextlib.suppress(Exception):  # the stream may end at the same time
            await self._send(answer)

    async def _on_body_complete(self, *, trailers: bool = False) -> None:
        self._stop_waiting()
        request = self._request
        assert request is not None  # set before the state BODY
        text = self._body.take()
        body = requestbody.read(text, request, json_depth=self._limits.json_depth)
        decision = decide(
            self._service, request.route_path, body, len(text), subset=self._subset, bypass=self._bypass_reason
        )
        self._prefix = decision.prefix
        if body is None or decision.bypass:
            self._account.bypassed(decision.bypass)
            destination = self._reserve_decoder(decision.need, first=decision.decoder)
            self._account.decided("bypass")
            decode = openai.decode_body(body, None) if body else text
            await self._to_decoder(text, decode, destination, trailers)
        else:
            await self._prefill_then_decode(request, body, decision.need, text, trailers)

    async def _prefill_then_decode(
        self, request: classify.Request, body: JsonObject, need: Need, text: bytes, trailers: bool
    ) -> None:
        destination = self._reserve_decoder(need, paired=True)
        time_left_s = max(0.0, self._deadline - time.monotonic())
        # In the full-duplex mode Envoy has no message timeout.
        budget_s = min(self._service.config.prefill.budget_s, time_left_s)
        more_time = MoreTime(self._send, None if self._modes.streamed else budget_s + _TIMEOUT_MARGIN_S)
        params: bytes | None = None
        prefill = PrefillRequest(
            request.path,
            request.headers,
            body,
            self._account.request_id,
            need if need.subset is None else replace(need, subset=None),
            destination.pairing,
            self._account.span,
        )
        self._account.prefill_began()
        try:
            try:
                async with more_time, asyncio.timeout(time_left_s):
                    prefilled = await self._service.prefill(prefill)
            finally:
                self._account.prefill_ended()
        except TimeoutError:
            raise RequestError(504, "exchange_timeout", "The gateway's time for this request is up.") from None
        except PrefillRefused as refusal:
            await self._answer_with(refusal)
            return
        except PrefillFailed as failure:
            self._account.failed_attempts = failure.reasons
            self._fall_back(failure, len(text))
        else:
            self._prefilled = prefilled
            self._account.failed_attempts = prefilled.failed_attempts
            self._account.renamed(prefilled.request_id)
            self._account.decided("disaggregated")
            params = prefilled.handoff.params
        await self._to_decoder(text, openai.decode_body(body, params), destination, trailers)

    def _fall_back(self, failure: PrefillFailed, size: int) -> None:
        """Let the decoder prefill, where that is configured and within its bounds; raises RequestError otherwise."""
        settings = self._service.config.prefill
        fallbacks = self._service.metrics.fallbacks
        if settings.on_failure == "decode":
            if size <= settings.fallback.max_body_bytes and self._service.take_fallback_slot():
                self._fallback = True
                fallbacks.labels("decode").inc()
                self._account.decided("fallback")
                return
            fallbacks.labels("out_of_bounds").inc()
        else:
            fallbacks.labels("error").inc()
        if failure.timed_out:
            raise RequestError(504, "prefill_timeout", "No prefill engine answered in time.")
        raise RequestError(503, "prefill_unavailable", "No prefill engine is available.", headers={"retry-after": "1"})

    async def _to_decoder(self, original: bytes, body: bytes, destination: Destination, trailers: bool) -> None:
        """Hand the request to Envoy for its decode leg; ``trailers``: in answer to those, not to the body."""
        headers = self._routing_headers(destination)
        self._state = State.DISPATCHED
        ticket = None
        if self._prefilled is not None:
            ticket = self._service.endings.dispatched(self._prefilled.handoff, self._account.request_id)
        if self._modes.streamed:
            reply = replies.request_headers(headers, self._spoofed)
            await self._send(self._routed(reply, destination, ticket))
            for chunk in replies.streamed_body("request_body", body, end_of_stream=not trailers):
                await self._send(chunk)
            if trailers:
                await self._send(replies.nothing("request_trailers"))
        elif trailers:  # trailers of no body: the headers have left already
            await self._send(self._routed(replies.nothing("request_trailers"), destination))
        else:
            reply = replies.buffered_body(headers, body if body is not original else None)
            await self._send(self._routed(reply, destination, ticket))

    # ── response ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _on_response_headers(self, message: ext_proc.ProcessingRequest) -> None:
        self._stop_waiting()
        if self._decoder is None:
            self._account.decided("answered_by_envoy")
        elif endpoint := destinations.served(message):
            self._account.served = endpoint
            self._decoder = destinations.moved(self._service.fleet, self._decoder, endpoint)
        self._state = State.RESPONDING
        self._account.status = classify.status(message.response_headers)
        headers = [self._id_for_client()] if self._request else []
        if timing := self._account.server_timing:
            headers.append(("server-timing", timing))
        await self._send(replies.response_headers(headers))

    # ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _answer_with(self, refusal: PrefillRefused) -> None:
        """Give the client the engine's own answer to a faulty request."""
        if refusal.answer.cut_off:
            text = f"A prefill engine answered {refusal.answer.status}, with more to say than can be passed on."
            raise RequestError(400, "refusal_too_large", text)
        reply = refusals.answer(refusal.answer, self._id_for_client())
        self._account.prefiller = refusal.engine.name
        self._account.decided("refused_by_engine")
        self._account.status = refusal.answer.status
        self._state = State.ANSWERED
        await self._send(reply)

    def _refusal(self, error: RequestError) -> ext_proc.ProcessingResponse:
        """From here on the request is answered; the reply has to be sent."""
        self._stop_waiting()
        self._account.refused(error.code, error.status)
        self._state = State.ANSWERED
        return replies.error(error, [self._id_for_client()])

    def _stop_waiting(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def close(self, *, let_go: bool = False) -> None:
        """Give back what the exchange holds, once. ``let_go``: we leave, the request goes on without us."""
        if self._closed:
            return
        self._closed = True
        self._stop_waiting()
        if self._prefilled is not None:
            self._settle(self._prefilled.handoff, let_go)
        if self._decoder is not None:
            self._decoder.release()
            if self._prefix is not None and self._account.status == 200 and not let_go:
                self._service.prefixes.note(self._decoder.engine, self._prefix)
        if self._fallback:
            self._service.return_fallback_slot()
        self._account.close(self._state.value, self._prefilled, self._decoder.engine if self._decoder else None)

    def _settle(self, handoff: Handoff, let_go: bool) -> None:
        endings = self._service.endings
        if let_go:
            endings.let_go(handoff)
        elif self._state in (State.DISPATCHED, State.RESPONDING):
            endings.stream_ended(handoff, self._account.status, self._connection)
        else:
            endings.never_dispatched(handoff, self._account.request_id)

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _reserve_decoder(self, need: Need, *, paired: bool = False, first: Engine | None = None) -> Destination:
        """Pick and reserve; raises RequestError where there is nothing to pick."""
        choices = self._service.config.routing.decode_choices
        destination = destinations.choose(self._service.fleet, need, choices, paired=paired, first=first)
        self._decoder = destination.reservation
        self._account.decoder = destination.reservation.engine.name
        return destination

    def _routing_headers(self, destination: Destination) -> list[Header]:
        """One X-Request-Id line for both legs, and the endpoint-picker's destination."""
        ours = self._account.request_id.encode()
        headers = [("x-request-id", ours), (replies.DESTINATION, destination.endpoints.encode())]
        headers += self._account.decoders_trace
        if destination.rank is not None:
            headers.append(("x-data-parallel-rank", str(destination.rank).encode()))
        return headers

    def _routed(
        self, reply: ext_proc.ProcessingResponse, destination: Destination, ticket: str | None = None
    ) -> ext_proc.ProcessingResponse:
        clear = self._service.config.routing.clear_route_cache
        replies.route(reply, destination.endpoints, ticket, clear_route_cache=clear)
        return reply

    def _id_for_client(self) -> Header:
        """The client's own X-Request-Id, or ours where it sent none."""
        own = self._request.request_id if self._request else None
        return "x-request-id", own or self._account.request_id.encode()

    @property
    def _spoofed(self) -> tuple[str, ...]:
        return self._request.spoofed if self._request else ()
