"""The prefill leg: which engine, which headers, what its answer means, and whom to try next."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from extproc import openai
from extproc.admission import Admission
from extproc.connectors import Handoff, UnusableHandoff
from extproc.enginehttp import Call, EngineAnswer, EngineClient, EngineUnavailable
from extproc.errors import RequestError
from extproc.picking import ANYTHING, Need
from extproc.telemetry.logs import log
from extproc.telemetry.tracing import NO_SPAN, Span, Tracing

if TYPE_CHECKING:
    from extproc.config import Config
    from extproc.fleet.engines import Engine, Reservation
    from extproc.fleet.fleet import Fleet
    from extproc.jsonobject import JsonObject
    from extproc.telemetry.metrics import Metrics

# How near the answer of an abandoned prefill may be for it to be waited for rather than closed: three times what the
# engine's answers took lately, within these bounds. A busy engine answers late and notices late that a client has left.
_NEARLY_DONE_S: Final = (0.5, 2.0)
_NEARLY_DONE_TIMES: Final = 3.0
_NEWEST_WEIGHT: Final = 0.2
# After an engine's sign of life, an answer gets as long again as the sign took, and this at least.
_LEAST_AFTER_SIGN_S: Final = 0.1

Header = tuple[str, bytes]

# Hop-by-hop headers, what describes the client's own body or connection, and what this service or Envoy decides.
_NOT_FORWARDED: Final = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    "upgrade expect host content-length content-encoding accept-encoding accept x-request-id x-data-parallel-rank "
    "x-gateway-destination-endpoint x-gateway-destination-endpoint-subset x-gateway-destination-endpoint-served".split()
)
_NOT_FORWARDED_PREFIXES: Final = (":", "x-envoy-", "x-forwarded-", "x-extproc-", "grpc-")


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """What the client asked for, as far as the prefill leg needs it. ``path`` includes the query."""

    path: str
    headers: Sequence[Header]
    body: JsonObject
    request_id: str
    """X-Request-Id of the first attempt; every further one gets its own."""
    need: Need = ANYTHING
    pairing: tuple[str, str] | None = None
    """The decoder's: hand-over never crosses it. None: any."""
    span: Span = NO_SPAN
    """The exchange's, for traces."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill that worked."""

    handoff: Handoff
    request_id: str
    """The X-Request-Id of the attempt that worked, for the decode leg."""
    seconds: float
    failed_attempts: Sequence[str] = ()
    """Why the attempts before this one failed."""
    queued_s: float = 0.0
    """Spent waiting for a place on a prefiller."""


class PrefillRefused(Exception):
    """The engine found the client's request at fault (4xx): its answer is the client's answer."""

    def __init__(self, answer: EngineAnswer, engine: Engine) -> None:
        super().__init__(f"{engine.name} answered {answer.status}")
        self.answer = answer
        self.engine = engine


class PrefillFailed(Exception):
    """No prefiller delivered. ``timed_out`` tells whether the last one was too slow rather than broken."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__(", ".join(reasons))
        self.reasons = list(reasons)

    @property
    def timed_out(self) -> bool:
        return bool(self.reasons) and self.reasons[-1] == "timeout"


class Prefiller:
    """Runs prefill legs against the fleet, one engine after another until one delivers.

    A leg that nobody waits for any more is closed or finished, as its connector says is safe; what it still hands over
    goes to ``on_orphan``, with the request's id.
    """

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        client: EngineClient,
        metrics: Metrics,
        on_orphan: Callable[[Handoff, str], None],
        tracing: Tracing,
    ) -> None:
        self._settings = config.prefill
        self._health_path = config.fleet.health.path
        self._max_finishing = config.release.max_finishing
        self._fleet = fleet
        self._admission = Admission(config.prefill.admission, fleet, metrics)
        self._client = client
        self._metrics = metrics
        self._on_orphan = on_orphan
        self._tracing = tracing
        self._abandoned: set[asyncio.Task[None]] = set()
        self._finishing = 0
        self._usual_s: dict[str, float] = {}  # by the engine's URL

    async def run(self, request: PrefillRequest) -> Prefilled:
        """Raises PrefillRefused for a 4xx, PrefillFailed when all attempts are used up.

        Cancelling it abandons the running attempt.
        """
        queued_s = 0.0
        reasons: list[str] = []
        tried: list[Engine] = []
        for attempt in range(self._settings.attempts):
            asked_at = time.monotonic()
            reservation = await self._pick(request, tried, queued_s)
            queued_s += time.monotonic() - asked_at
            if reservation is None:
                if not attempt:
                    reasons.append("no_engine")
                break
            request_id = str(uuid.uuid4()) if attempt else request.request_id
            outcome = await self._supervised(reservation, request, request_id)
            if isinstance(outcome, Prefilled):
                if not outcome.handoff.expired(time.monotonic()):
                    return Prefilled(outcome.handoff, outcome.request_id, outcome.seconds, reasons, queued_s)
                # The engine may have recycled the blocks: a decoder would answer 200 with wrong text.
                self._metrics.handoffs_expired.inc()
                outcome = "expired"
            else:
                tried.append(reservation.engine)
            reasons.append(outcome)
        raise PrefillFailed(reasons)

    async def _pick(self, request: PrefillRequest, tried: Sequence[Engine], queued_s: float) -> Reservation | None:
        """A place on a prefiller, waited for where all are full. Raises RequestError where the queue turns it away."""
        span = self._tracing.child(request.span, "pick")
        reservation = None
        try:
            reservation = await self._admission.reserve(
                request.need,
                client=self._client_key(request),
                exclude=tuple(tried),
                pairing=request.pairing,
                patience_s=self._settings.admission.max_wait_s - queued_s,  # for all attempts together
            )
        except RequestError as error:
            span.fail(error.code)
            raise
        finally:
            span.set(engine=reservation.engine.name if reservation else None)
            span.end()
        return reservation

    async def _supervised(self, reservation: Reservation, request: PrefillRequest, request_id: str) -> Prefilled | str:
        """One attempt within its time. The reservation lasts as long as the engine is really at work."""
        started = time.monotonic()
        call = Call()
        span = self._tracing.child(request.span, "prefill", client=True)
        attempt = asyncio.create_task(self._attempt(reservation, request, request_id, call, span), name="prefill")
        attempt.add_done_callback(lambda _: reservation.release())
        result = "cancelled"
        try:
            done, _ = await asyncio.wait({attempt}, timeout=self._settings.timeout_s)
            if not done:
                result = "timeout"
                self._abandon(attempt, reservation.engine, call, request.request_id)
                return result
            try:
                outcome = attempt.result()
            except PrefillRefused:
                result = "refused"
                raise
            result = outcome if isinstance(outcome, str) else "ok"
            return outcome
        except asyncio.CancelledError:
            self._abandon(attempt, reservation.engine, call, request.request_id)
            raise
        finally:
            span.set(engine=reservation.engine.name, request_id=request_id, result=result)
            if result not in ("ok", "refused", "cancelled"):
                span.fail(result)
            span.end()
            if result == "ok":
                self._learn(reservation.engine, time.monotonic() - started)
            self._judge(reservation, result)
            self._metrics.prefill_attempts.labels(result).inc()
            self._metrics.prefill_seconds.labels(result).observe(time.monotonic() - started)

    def _judge(self, reservation: Reservation, result: str) -> None:
        """What the attempt tells of the engine: a client's fault is an answer too, a client's leaving tells nothing."""
        if result in ("ok", "refused"):
            self._fleet.succeeded(reservation.engine)
        elif result == "cancelled":
            reservation.undecided()
        else:
            self._fleet.failed(reservation.engine, result)

    def _client_key(self, request: PrefillRequest) -> bytes:
        fair_by = self._settings.admission.fair_by
        return next((value for name, value in request.headers if name == fair_by), b"")

    async def _attempt(
        self, reservation: Reservation, request: PrefillRequest, request_id: str, call: Call, span: Span
    ) -> Prefilled | str:
        """One call. Returns the reason, a short metric label, where another engine should be tried."""
        engine = reservation.engine
        headers = self._tracing.inject(span, request.headers)
        started = time.monotonic()
        try:
            answer = await self._client.post(
                engine.url + request.path,
                openai.prefill_body(request.body, engine.connector.prefill_edits()),
                forwarded_headers(headers, request_id, engine.api_key, reservation.rank()),
                timeout_s=self._settings.timeout_s * 2,  # of use to an abandoned attempt alone
                call=call,
            )
        except EngineUnavailable as error:
            return error.reason
        if 400 <= answer.status < 500:
            raise PrefillRefused(answer, engine)
        if answer.status != 200:
            return f"status_{answer.status // 100}xx"
        try:
            handoff = engine.connector.handoff(engine, answer.body, call.answering_since or started)
        except UnusableHandoff as error:
            return f"unusable_{error}"
        if reference := span.reference:
            handoff = replace(handoff, trace=reference)
        return Prefilled(handoff, request_id, time.monotonic() - started)

    # ── attempts that nobody waits for any more ───────────────────────────────────────────────────────────────────

    def _abandon(self, attempt: asyncio.Task[Prefilled | str], engine: Engine, call: Call, request_id: str) -> None:
        seeing_off = self._see_off(attempt, engine, call, request_id)
        task = asyncio.create_task(seeing_off, name="abandoned prefill")
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def _see_off(
        self, attempt: asyncio.Task[Prefilled | str], engine: Engine, call: Call, request_id: str
    ) -> None:
        """Let the call finish, or close it after a moment; nothing that it hands over stays pinned.

        An engine frees an unfinished prefill when its client leaves. One that finishes before it has noticed keeps the
        blocks pinned, under an id that only the answer tells. So a call is closed only where its answer is not near:
        a short prefill gets the time to finish, so does one whose engine is behind with its sockets, and an answer that
        is coming in is read to its end.
        """
        way = engine.connector.cancel if self._settings.cancel == "auto" else self._settings.cancel
        try:
            if call.sent and self._finishing < self._max_finishing:
                self._finishing += 1
                try:
                    if way == "finish":
                        await asyncio.wait({attempt})
                    else:
                        await self._wait_while_near(attempt, engine)
                finally:
                    self._finishing -= 1
            if call.answering_since is None:
                attempt.cancel()
            outcome = await attempt
        except (asyncio.CancelledError, PrefillRefused):
            return
        except Exception:  # noqa: BLE001 (nobody else is there to be told)
            log.exception("abandoned prefill failed", engine=engine.name)
            return
        finally:
            attempt.cancel()
        if isinstance(outcome, Prefilled):
            self._learn(engine, outcome.seconds)
            self._on_orphan(outcome.handoff, request_id)

    async def _wait_while_near(self, attempt: asyncio.Task[Prefilled | str], engine: Engine) -> None:
        """Until the attempt has ended, or its answer is not near.

        A server that does not get to its sockets has not seen the engine's answer either, and would not see that we
        leave. So it is asked for a sign of life first, and what it has finished by then may follow.
        """
        done, _ = await asyncio.wait({attempt}, timeout=self._nearly_done_s(engine))
        if done:
            return
        asked_at = time.monotonic()
        sign = asyncio.create_task(self._client.answers(engine.url + self._health_path, timeout_s=_NEARLY_DONE_S[1]))
        try:
            await asyncio.wait({attempt, sign}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done() and sign.result():
                await asyncio.wait({attempt}, timeout=max(_LEAST_AFTER_SIGN_S, time.monotonic() - asked_at))
        finally:
            sign.cancel()

    def _nearly_done_s(self, engine: Engine) -> float:
        least, most = _NEARLY_DONE_S
        return min(max(least, _NEARLY_DONE_TIMES * self._usual_s.get(engine.url, 0.0)), most)

    def _learn(self, engine: Engine, seconds: float) -> None:
        """What an answer of this engine took."""
        usual = self._usual_s.get(engine.url, seconds)
        self._usual_s[engine.url] = usual + _NEWEST_WEIGHT * (seconds - usual)

    async def flush(self, deadline: float) -> None:
        """Wait for abandoned attempts until ``deadline`` (``time.monotonic()``), then close them."""
        while self._abandoned and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._abandoned), timeout=remaining)
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)


def forwarded_headers(
    headers: Sequence[Header], request_id: str, api_key: str | None, rank: int | None = None
) -> list[tuple[bytes, bytes]]:
    """The client's end-to-end headers for the prefill leg, with our X-Request-Id.

    The client's Authorization goes along; without one the engine's configured key is sent, or none.
    """
    forwarded = [
        (name.encode("latin-1", "replace"), value)
        for name, value in headers
        if name not in _NOT_FORWARDED and not name.startswith(_NOT_FORWARDED_PREFIXES)
    ]
    forwarded += [
        (b"x-request-id", request_id.encode()),
        (b"accept", b"application/json"),
        (b"accept-encoding", b"identity"),
    ]
    if rank is not None:
        forwarded.append((b"x-data-parallel-rank", str(rank).encode()))
    if api_key and not any(name == b"authorization" for name, _ in forwarded):
        forwarded.append((b"authorization", b"Bearer " + api_key.encode()))
    return forwarded
