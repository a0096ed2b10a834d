"""From how requests end to what is released: tickets out with the request, endings back in, at most one decision each.

Envoy's access log decides, on whichever replica it reaches. Where none comes in, the gRPC streams do: one that ends
before the response headers counts as reset, an answer of 4xx or 5xx as refused, anything later as completed.

Nothing is released while a decoder may still read: that would hand it other requests' blocks, and its prefix cache
would keep them. So an ending must be sure, and a decoder gets a moment to notice that it has lost its client.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from extproc.connections import Connections
from extproc.connectors import connector, known
from extproc.fleet.verdicts import decoder_verdicts
from extproc.outcomes import Outcome, classify, is_final
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.release import ReleaseService, SeenHandoffs, ticket_for
from extproc.replies import OWN_NAMESPACE, TICKET
from extproc.telemetry.logs import log
from extproc.ticket import MAX_CHARS, Ticket, TicketError, TicketSigner

if TYPE_CHECKING:
    from extproc.configsections import Release
    from extproc.connectors import Handoff
    from extproc.fleet.engines import Engine
    from extproc.fleet.fleet import Fleet
    from extproc.releaseways import ReleaseWays
    from extproc.telemetry.metrics import Metrics
    from extproc.telemetry.recent import Recent

# How long a reply of ours may be on its way to Envoy: a stream that ends within that time may have ended before it.
_REPLY_S: Final = 2.0
# Until a decoder whose client is gone has stopped: it notices in some 10 ms, and its engine at the next step.
_DECODER_STOPS_S: Final = 0.1
# Of a request's id in the log: anybody may write to the port it comes from.
_MAX_ID_CHARS: Final = 256
# Outcomes that no decoder is at work after.
_NOBODY_READS: Final = (Outcome.DECODE_UNREACHABLE, Outcome.DECODE_REFUSED)


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """A handoff that was given to Envoy. ``ticket`` tells whether Envoy can give it back."""

    handoff: Handoff
    at: float
    ticket: bool


@dataclass(frozen=True, slots=True)
class _Settling:
    """A handoff whose stream ended before its ending was known: the response's status, if any, and when it ended."""

    handoff: Handoff
    status: int | None
    connection: str
    at: float
    timer: asyncio.TimerHandle


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
        self._on_their_way: dict[int, _Dispatched] = {}
        self._settling: dict[int, _Settling] = {}
        self._decided = SeenHandoffs()
        self._logs: set[asyncio.Task[Any]] = set()
        self._tickets_seen = False
        self.connections = Connections()
        metrics.handoffs_open.set_function(lambda: len(self._on_their_way) + len(self._settling))
        metrics.access_log_streams.set_function(lambda: len(self._logs))

    # ── what exchanges tell ───────────────────────────────────────────────────────────────────────────────────────

    def dispatched(self, handoff: Handoff, request_id: str) -> str | None:
        """The handoff goes to Envoy; returns the ticket to send along, or None where none would be of use."""
        self._recent.handed_over(request_id, _handoff_id(handoff), handoff.prefiller.name)
        text = self._sealed(handoff)
        self._on_their_way[id(handoff)] = _Dispatched(handoff, time.monotonic(), text is not None)
        return text

    def _sealed(self, handoff: Handoff) -> str | None:
        ticket = ticket_for(handoff)
        if ticket is None:
            return None
        try:
            text = self._signer.seal(ticket)
        except (OverflowError, TypeError, ValueError) as error:  # params that msgpack has no way to say
            log.warning("no ticket for these params", connector=ticket.connector, error=str(error))
            return None
        if len(text) > MAX_CHARS:
            log.warning("ticket too large", connector=ticket.connector, characters=len(text))
            return None
        return text

    def never_dispatched(self, handoff: Handoff, request_id: str) -> None:
        """The client left, or we failed, before the decode leg: nobody will read these blocks."""
        self._recent.orphaned(request_id, _handoff_id(handoff), handoff.prefiller.name)
        self._on_their_way.pop(id(handoff), None)
        self._release(handoff)

    def stream_ended(self, handoff: Handoff, status: int | None, connection: str) -> None:
        """The ext_proc stream on that connection is over. ``status`` is the response's, or None where it had not come.

        The access log may still have to say why: it gets a moment.
        """
        dispatched = self._on_their_way.pop(id(handoff), None)
        if dispatched is None or (status is not None and status < 400):
            return
        now = time.monotonic()
        if dispatched.ticket and self._trusts_log and (status is not None or now - dispatched.at > _REPLY_S):
            return  # Envoy has the ticket, and gives it to some replica
        timer = asyncio.get_running_loop().call_later(self._settings.settle_s, self._settle, id(handoff))
        self._settling[id(handoff)] = _Settling(handoff, status, connection, now, timer)

    def let_go(self, handoff: Handoff) -> None:
        """We leave, the request goes on: another replica hears of its end."""
        self._on_their_way.pop(id(handoff), None)

    def open_handoffs(self) -> Counter[Engine]:
        """By prefiller: how many requests of this process have not ended, and may still read its blocks."""
        waiting: Iterable[_Dispatched | _Settling] = (*self._on_their_way.values(), *self._settling.values())
        return Counter(one.handoff.prefiller for one in waiting)

    @property
    def _trusts_log(self) -> bool:
        mode = self._settings.outcomes_from
        return mode == "access_log" or (mode == "auto" and self._tickets_seen)

    def _settle(self, key: int) -> None:
        """The time for an access-log entry is up."""
        settling = self._settling.pop(key)
        handoff = settling.handoff
        if _handoff_id(handoff) in self._decided:
            return
        if settling.status is None and self.connections.broke(settling.connection, settling.at):
            log.warning("connection to Envoy broke", remote_request_id=handoff.remote_request_id)
            self._releases.leave_to_timer(handoff)  # the request may go on without us
        else:
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
        ending = classify(entry)
        self._metrics.outcomes.labels(ending.outcome).inc()
        self._metrics.ended(ending.outcome, entry.common_properties)
        if request_id := entry.request.request_id:
            told = {"outcome": ending.outcome.value, "phase": ending.phase, **_timings(entry)}
            self._recent.note(request_id, **told)
            write = log.debug if ending.outcome is Outcome.COMPLETED else log.info
            write("ended", request_id=request_id[:_MAX_ID_CHARS], **told)
        fields = entry.common_properties.metadata.filter_metadata
        if OWN_NAMESPACE not in fields or self._settings.outcomes_from == "stream":
            return
        try:
            ticket = self._open(fields[OWN_NAMESPACE].fields[TICKET].string_value)
        except TicketError as error:
            self._metrics.tickets_refused.labels(error.reason).inc()
            log.warning("ticket refused", reason=error.reason)
            return
        self._tickets_seen = True
        # Only entries with a ticket of ours are believed about engines: anybody may write to this port.
        for endpoint, reason in decoder_verdicts(entry, ending):
            self._fleet.judge_decoder(endpoint, reason)
        if connector(ticket.connector).leaves_pinned(ending):
            self._releases.request(ticket, delay_s=0.0 if ending.outcome in _NOBODY_READS else _DECODER_STOPS_S)

    def _open(self, text: str) -> Ticket:
        ticket = self._signer.open(text)
        if not known(ticket.connector) or self._ways.prefiller(ticket.prefiller) is None:
            raise TicketError("unknown_engine")
        if not self._decided.add(ticket):
            raise TicketError("replayed")
        return ticket

    def log_opened(self, task: asyncio.Task[Any], connection: str) -> None:
        self._logs.add(task)
        self.connections.opened(connection)

    def log_closed(self, task: asyncio.Task[Any], connection: str) -> None:
        self._logs.discard(task)
        self.connections.closed(connection)

    async def flush(self, deadline: float) -> None:
        """Decide what still waits for the access log, then let its streams go: Envoy opens others, to other replicas.

        ``deadline`` is ``time.monotonic()``; what is not settled by then is decided as it stands.
        """
        last = max((settling.timer.when() for settling in self._settling.values()), default=0.0)
        wait = last - asyncio.get_running_loop().time()
        if self._settling and wait > 0:
            await asyncio.sleep(min(wait, max(0.0, deadline - time.monotonic())))
        for key, settling in list(self._settling.items()):
            settling.timer.cancel()
            self._settle(key)
        for task in list(self._logs):
            task.cancel()


def _handoff_id(handoff: Handoff) -> tuple[str, str]:
    return handoff.prefiller.endpoint or "", handoff.remote_request_id


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
        connection = context.peer()
        self._endings.log_opened(task, connection)
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
            self._endings.log_closed(task, connection)
        return als_pb2.StreamAccessLogsResponse()
