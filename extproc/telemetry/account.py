"""What is told of one exchange: counted as it happens; at its end in the log, on the status page, and as a span."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from extproc.outcomes import Outcome
from extproc.telemetry.logs import log
from extproc.telemetry.tracing import NO_SPAN

if TYPE_CHECKING:
    from extproc.classify import Request
    from extproc.fleet.engines import Engine
    from extproc.prefill import Prefilled
    from extproc.telemetry.metrics import Metrics
    from extproc.telemetry.recent import Recent
    from extproc.telemetry.tracing import Tracing

_MAX_PATH: Final = 256
# Of requests that never got our X-Request-Id: without one of the client's, Envoy's log cannot name them.
_OUTCOMES: Final = {"client_left": Outcome.CLIENT_RESET, "refused": Outcome.REJECTED_BY_US}


class Account:
    """One exchange's. ``request_id`` is ours, the X-Request-Id of both legs."""

    def __init__(
        self, metrics: Metrics, recent: Recent, tracing: Tracing, trace: Sequence[tuple[str, bytes]] = ()
    ) -> None:
        """``trace`` is what Envoy says of its own span."""
        self._metrics = metrics
        self._recent = recent
        self._tracing = tracing
        self._started = time.monotonic()
        self._prefill_from: float | None = None
        self._prefill_to: float | None = None
        self._reason = ""
        self._client_id: str | None = None
        self._path: str | None = None
        self._trace = trace
        self.span = NO_SPAN
        self.decoders_trace: Sequence[tuple[str, bytes]] = ()
        """Headers for the decode leg, where nobody else has any: an Envoy that traces puts its own there."""
        self.request_id = str(uuid.uuid4())
        self.decision = "none"
        self.status: int | None = None
        """The response's, once it is known."""
        self.decoder: str | None = None
        """The one that was picked."""
        self.prefiller: str | None = None
        """The one that answered: with a handoff, or with the client's fault."""
        self.served: str | None = None
        """The endpoint that Envoy says it used."""
        self.failed_attempts: Sequence[str] = ()

    def began(self, request: Request) -> None:
        self._client_id, self._path = request.client_id, request.route_path[:_MAX_PATH]
        self.span = self._tracing.exchange(self._trace or request.headers)
        traced = self._trace or any(name == "traceparent" for name, _ in request.headers)
        if self.span is not NO_SPAN and not traced:
            self.decoders_trace = self._tracing.inject(self.span, ())
        self._recent.note(self.request_id, client_request_id=self._client_id, path=self._path)
        if self._client_id:  # Envoy's log knows a request that ends before our reply by this id only
            self._recent.alias(self._client_id, self.request_id)

    def renamed(self, request_id: str) -> None:
        """The attempt that worked had an id of its own."""
        if request_id != self.request_id:
            self._recent.alias(request_id, self.request_id)
            self.request_id = request_id

    def bypassed(self, reason: str) -> None:
        self._reason = reason
        self._metrics.bypass.labels(reason).inc()

    def decided(self, decision: str) -> None:
        self.decision = decision
        self._metrics.exchanges.labels(decision).inc()
        self._recent.note(self.request_id, decision=decision, decoder=self.decoder, **self._prefill_times())

    def refused(self, code: str, status: int) -> None:
        """We answered with an error."""
        self._metrics.errors.labels(code).inc()
        self.decided("refused")
        self._reason, self.status = code, status

    def prefill_began(self) -> None:
        self._prefill_from = time.monotonic()

    def prefill_ended(self) -> None:
        self._prefill_to = time.monotonic()

    @property
    def server_timing(self) -> bytes | None:
        """The Server-Timing header's value; None where there was no prefill."""
        if self._prefill_from is None or self._prefill_to is None:
            return None
        return b"prefill;dur=%.1f" % ((self._prefill_to - self._prefill_from) * 1000)

    def close(self, state: str, prefilled: Prefilled | None, decoder: Engine | None) -> None:
        """``state`` is how far the exchange came."""
        if self.decision == "none":
            self.decided("client_left")
        record: dict[str, Any] = {
            "request_id": self.request_id,
            "client_request_id": self._client_id,
            "path": self._path,
            "decision": self.decision,
            "reason": self._reason or None,
            "state": state,
            "prefiller": prefilled.handoff.prefiller.name if prefilled else self.prefiller,
            "decoder": decoder.name if decoder else None,
            "served": self.served,
            "failed_attempts": list(self.failed_attempts) or None,
            "status": self.status,
            "prefill_ms": round(prefilled.seconds * 1000, 1) if prefilled else None,
            "queued_ms": round(prefilled.queued_s * 1000, 1) if prefilled else None,
            **self._prefill_times(),
            "total_ms": self._since_start(time.monotonic()),
        }
        failed = self.status is not None and self.status >= 500
        if self.span is not NO_SPAN:
            self.span.set(**{key: value for key, value in record.items() if isinstance(value, str | int | float)})
            if failed:
                self.span.fail(self._reason or f"status_{self.status}")
            self.span.end()
        self._recent.note(self.request_id, **record)
        if outcome := _OUTCOMES.get(self.decision):
            self._recent.presume(self.request_id, outcome=outcome.value)
        known = self._recent.outcome(self.request_id)  # of most requests Envoy tells it a little later: "ended"
        (log.warning if failed else log.info)("exchange", outcome=known, **record)

    def _prefill_times(self) -> dict[str, float | None]:
        return {
            "prefill_from_ms": self._since_start(self._prefill_from),
            "prefill_to_ms": self._since_start(self._prefill_to),
        }

    def _since_start(self, moment: float | None) -> float | None:
        return None if moment is None else round((moment - self._started) * 1000, 1)
