"""From how requests end to what is released: tickets out with the request, endings back in, at most one decision each.

Envoy's access log decides, on whichever replica it reaches. Where none comes in, the gRPC streams do: one that ends
before the response headers counts as reset, an answer of 4xx or 5xx as refused, anything later as completed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

import grpc

from extproc.connectors import connector, known
from extproc.fleet.verdicts import decoder_verdicts
from extproc.outcomes import classify, is_final
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.release import ReleaseService, ticket_for
from extproc.replies import OWN_NAMESPACE, TICKET
from extproc.telemetry.logs import log
from extproc.ticket import Ticket, TicketError, TicketSigner

if TYPE_CHECKING:
    from extproc.config import Release
    from extproc.connectors import Handoff
    from extproc.fleet.fleet import Fleet
    from extproc.releaseways import ReleaseWays
    from extproc.telemetry.metrics import Metrics
    from extproc.telemetry.recent import Recent

_REMEMBERED: Final = 100_000


class Endings:
    """What this process knows of handoffs on their way, and what it does when their requests end."""

    def __init__(
        self,
        settings: Release,
        signer: TicketSigner,
        ways: ReleaseWays,
        fleet: Fleet,
        releases: ReleaseService,
        metrics: Metrics,
        recent: Recent,
    ) -> None:
        self._settings = settings
        self._signer = signer
        self._ways = ways
        self._fleet = fleet
        self._releases = releases
        self._metrics = metrics
        self._recent = recent
        self._on_their_way: dict[int, Handoff] = {}
        self._settling: dict[int, Handoff] = {}
        self._decided: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._logs: set[asyncio.Task[Any]] = set()
        self._log_seen = False
        metrics.handoffs_open.set_function(lambda: len(self._on_their_way) + len(self._settling))

    # ── what exchanges tell ───────────────────────────────────────────────────────────────────────────────────────

    def dispatched(self, handoff: Handoff, request_id: str) -> str | None:
        """The handoff goes to Envoy; returns the ticket to send along, or None where none would be of use."""
        self._on_their_way[id(handoff)] = handoff
        self._recent.handed_over(request_id, (handoff.prefiller.endpoint or "", handoff.remote_request_id))
        ticket = ticket_for(handoff)
        return None if ticket is None else self._signer.seal(ticket)

    def never_dispatched(self, handoff: Handoff) -> None:
        """The client left, or we failed, before the decode leg: nobody will read these blocks."""
        self._release(handoff)

    def stream_ended(self, handoff: Handoff, status: int | None) -> None:
        """The ext_proc stream is over. ``status`` is the response's, or None where it had not come.

        The access log may still have to say why: it gets a moment.
        """
        if self._on_their_way.pop(id(handoff), None) is None:
            return
        suspicious = status is None or status >= 400
        if not suspicious and self._trusts_log:
            return
        self._settling[id(handoff)] = handoff
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.settle_s, self._settle, handoff, status is None)

    def let_go(self, handoff: Handoff) -> None:
        """We leave, the request goes on: another replica hears of its end."""
        self._on_their_way.pop(id(handoff), None)

    @property
    def _trusts_log(self) -> bool:
        mode = self._settings.outcomes_from
        return mode == "access_log" or (mode == "auto" and self._log_seen)

    def _settle(self, handoff: Handoff, unanswered: bool) -> None:
        """The time for an access-log entry is up."""
        del self._settling[id(handoff)]
        key = (handoff.prefiller.endpoint or "", handoff.remote_request_id)
        if key in self._decided:
            return
        if self._trusts_log and (not unanswered or not self._logs):
            # The entry went to another replica; or the connection to Envoy broke, and the decoder may be reading.
            return
        self._release(handoff)

    def _release(self, handoff: Handoff) -> None:
        ticket = ticket_for(handoff)
        if ticket is None:
            self._releases.leave_to_timer(handoff)
        else:
            self._releases.request(ticket)

    # ── what Envoy's access log tells ─────────────────────────────────────────────────────────────────────────────

    def logged(self, entry: accesslog_pb2.HTTPAccessLogEntry) -> None:
        """One request's end."""
        if not is_final(entry):
            return
        self._log_seen = True
        ending = classify(entry)
        self._metrics.outcomes.labels(ending.outcome).inc()
        if request_id := entry.request.request_id:
            self._recent.note(request_id, **_timings(entry), outcome=ending.outcome.value, phase=ending.phase)
        fields = entry.common_properties.metadata.filter_metadata
        if OWN_NAMESPACE not in fields or self._settings.outcomes_from == "stream":
            return
        try:
            ticket = self._open(fields[OWN_NAMESPACE].fields[TICKET].string_value)
        except TicketError as error:
            self._metrics.tickets_refused.labels(error.reason).inc()
            log.warning("ticket refused", reason=error.reason)
            return
        # Only entries with a ticket of ours are believed about engines: anybody may write to this port.
        for endpoint, reason in decoder_verdicts(entry, ending):
            self._fleet.judge_decoder(endpoint, reason)
        if connector(ticket.connector).leaves_pinned(ending):
            self._releases.request(ticket)

    def _open(self, text: str) -> Ticket:
        ticket = self._signer.open(text)
        if not known(ticket.connector) or self._ways.prefiller(ticket.prefiller) is None:
            raise TicketError("unknown_engine")
        now = time.time()
        while self._decided and (len(self._decided) >= _REMEMBERED or next(iter(self._decided.values())) < now):
            self._decided.popitem(last=False)
        if ticket.handoff_id in self._decided:
            raise TicketError("replayed")
        self._decided[ticket.handoff_id] = ticket.issued_at + ticket.lease_s
        return ticket

    def log_opened(self, task: asyncio.Task[Any]) -> None:
        self._logs.add(task)

    def log_closed(self, task: asyncio.Task[Any]) -> None:
        self._logs.discard(task)

    async def flush(self) -> None:
        """Decide what still waits for the access log, then let its streams go."""
        if self._settling:
            await asyncio.sleep(self._settings.settle_s)
        for task in list(self._logs):
            task.cancel()


def _timings(entry: accesslog_pb2.HTTPAccessLogEntry) -> dict[str, Any]:
    """Milliseconds since the request's start, as Envoy saw them, and where it went."""
    common = entry.common_properties
    address = common.upstream_remote_address.socket_address
    return {
        "started_at": round(common.start_time.ToMicroseconds() / 1e6, 3),
        "sent_ms": _milliseconds(common, "time_to_first_upstream_tx_byte"),
        "first_byte_ms": _milliseconds(common, "time_to_first_upstream_rx_byte"),
        "last_byte_ms": _milliseconds(common, "time_to_last_upstream_rx_byte"),
        "ended_ms": _milliseconds(common, "duration"),
        "upstream": f"{address.address}:{address.port_value}" if address.address else None,
        "upstream_attempts": common.upstream_request_attempt_count or None,
    }


def _milliseconds(common: accesslog_pb2.AccessLogCommon, name: str) -> float | None:
    return round(getattr(common, name).ToMicroseconds() / 1000, 1) if common.HasField(name) else None


class AccessLogService(als_pb2_grpc.AccessLogServiceServicer):
    """``envoy.service.accesslog.v3.AccessLogService``: Envoy streams entries, we answer once, at the end."""

    def __init__(self, endings: Endings) -> None:
        self._endings = endings

    async def StreamAccessLogs(  # noqa: N802 (gRPC's name)
        self,
        request_iterator: AsyncIterator[als_pb2.StreamAccessLogsMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> als_pb2.StreamAccessLogsResponse:
        task = asyncio.current_task()
        assert task is not None
        self._endings.log_opened(task)
        try:
            async for message in request_iterator:
                for entry in message.http_logs.log_entry:
                    try:
                        self._endings.logged(entry)
                    except Exception:  # noqa: BLE001 (one entry must not cost the others)
                        log.exception("access log entry failed")
        except asyncio.CancelledError:
            if not context.cancelled():
                return als_pb2.StreamAccessLogsResponse()  # drained
            raise
        finally:
            self._endings.log_closed(task)
        return als_pb2.StreamAccessLogsResponse()
