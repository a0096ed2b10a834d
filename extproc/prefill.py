"""The prefill leg: which engine, which headers, what its answer means, and whom to try next."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from extproc import openai
from extproc.connectors import Handoff, UnusableHandoff
from extproc.enginehttp import EngineAnswer, EngineClient, EngineUnavailable

if TYPE_CHECKING:
    from extproc.config import Config
    from extproc.fleet.engines import Engine, Fleet
    from extproc.jsonobject import JsonObject
    from extproc.telemetry.metrics import Metrics

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


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill that worked."""

    handoff: Handoff
    request_id: str
    """The X-Request-Id of the attempt that worked, for the decode leg."""
    seconds: float


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
    """Runs prefill legs against the fleet, one engine after another until one delivers."""

    def __init__(self, config: Config, fleet: Fleet, client: EngineClient, metrics: Metrics) -> None:
        self._settings = config.prefill
        self._fleet = fleet
        self._client = client
        self._metrics = metrics

    async def run(self, request: PrefillRequest) -> Prefilled:
        """Raises PrefillRefused for a 4xx, PrefillFailed when all attempts are used up.

        Cancelling it closes the call to the engine.
        """
        reasons: list[str] = []
        tried: list[Engine] = []
        while len(tried) < self._settings.attempts:
            reservation = self._fleet.reserve("prefill", exclude=tried)
            if reservation is None:
                if not tried:
                    reasons.append("no_engine")
                break
            engine = reservation.engine
            tried.append(engine)
            started = time.monotonic()
            try:
                outcome = await self._attempt(engine, request)
            except asyncio.CancelledError:
                self._metrics.prefill_attempts.labels("cancelled").inc()
                raise
            finally:
                reservation.release()
            label = outcome if isinstance(outcome, str) else "ok"
            self._metrics.prefill_attempts.labels(label).inc()
            self._metrics.prefill_seconds.observe(time.monotonic() - started)
            if isinstance(outcome, Prefilled):
                return outcome
            reasons.append(outcome)
        raise PrefillFailed(reasons)

    async def _attempt(self, engine: Engine, request: PrefillRequest) -> Prefilled | str:
        """One call. Returns the reason, a short metric label, where another engine should be tried."""
        request_id = str(uuid.uuid4())
        started = time.monotonic()
        try:
            answer = await self._client.post(
                engine.url + request.path,
                openai.prefill_body(request.body, engine.connector.prefill_edits()),
                forwarded_headers(request.headers, request_id, engine.api_key),
                timeout_s=self._settings.timeout_s,
            )
        except EngineUnavailable as error:
            return error.reason
        if 400 <= answer.status < 500:
            self._metrics.prefill_attempts.labels("refused").inc()
            raise PrefillRefused(answer, engine)
        if answer.status != 200:
            return f"status_{answer.status // 100}xx"
        try:
            handoff = engine.connector.handoff(engine, answer.body, time.monotonic())
        except UnusableHandoff as error:
            return f"unusable_{error}"
        return Prefilled(handoff, request_id, time.monotonic() - started)


def forwarded_headers(headers: Sequence[Header], request_id: str, api_key: str | None) -> list[tuple[bytes, bytes]]:
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
    if api_key and not any(name == b"authorization" for name, _ in forwarded):
        forwarded.append((b"authorization", b"Bearer " + api_key.encode()))
    return forwarded
