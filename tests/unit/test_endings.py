"""From how a request ends to what is released: by the access log, by the stream, by neither where nothing is sure."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import structlog.testing

from extproc import config, configsections
from extproc.connectors import connector
from extproc.connectors.base import Handoff
from extproc.endings import Endings
from extproc.fleet.engines import Engine, Spec
from extproc.fleet.fleet import Fleet, policies
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.replies import OWN_NAMESPACE, TICKET
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.ticket import MAX_CHARS, Ticket, TicketSigner

ENVOY = "ipv4:10.0.0.1:4711"
SETTLE_S = 0.02
Entry = accesslog_pb2.HTTPAccessLogEntry


class Releases:
    """What endings ask for."""

    def __init__(self) -> None:
        self.requested: list[tuple[str, float]] = []
        self.left: list[str] = []

    def request(self, ticket: Ticket, *, delay_s: float = 0.0) -> bool:
        self.requested.append((ticket.request_id, delay_s))
        return True

    def leave_to_timer(self, handoff: Handoff) -> None:
        self.left.append(handoff.remote_request_id)

    @property
    def ids(self) -> list[str]:
        return [request_id for request_id, _ in self.requested]


class Ways:
    """Knows the fleet's one prefiller."""

    def prefiller(self, endpoint: str) -> Engine | None:
        return PREFILLER if endpoint == "10.0.0.7:8000" else None


def prefiller(name: str = "mooncake-ascend") -> Engine:
    spec = Spec(role="prefill", url="http://10.0.0.7:8000", name="p", connector=connector(name))
    return Engine(spec)


PREFILLER = prefiller()
SIGNER = TicketSigner(b"key")


class Bench:
    def __init__(self, **settings: Any) -> None:
        self.releases = Releases()
        self.metrics = Metrics()
        whole = config.Config(fleet={"decode": [{"url": "http://10.0.0.8:8000"}]})  # type: ignore[arg-type]
        ways: Any = Ways()
        releases: Any = self.releases
        self.endings = Endings(
            configsections.Release(**({"settle_s": SETTLE_S} | settings)),
            SIGNER,
            ways,
            Fleet(whole.fleet, policies(whole)),
            releases,
            self.metrics,
            Recent(),
        )
        self.endings.connections.opened(ENVOY)  # some other request's stream: the connection stands

    def count(self, name: str, **labels: str) -> int:
        return int(self.metrics.registry.get_sample_value(name, labels) or 0)

    @property
    def open(self) -> int:
        return self.count("extproc_handoffs_open")

    async def settled(self) -> list[str]:
        """What was released by the time that no handoff is open any more."""
        async with asyncio.timeout(10):
            while self.open:
                await asyncio.sleep(0.001)
        return self.releases.ids

    def trust(self) -> None:
        """One entry with a ticket: Envoy's access log is known to work."""
        before = len(self.releases.requested)
        text = self.endings.dispatched(one := handoff("proof"), "proof")
        self.endings.logged(entry("completed", text))
        self.endings.stream_ended(one, 200, ENVOY)
        assert len(self.releases.requested) == before


def handoff(request_id: str = "chatcmpl-1", name: str = "mooncake-ascend", **changes: Any) -> Handoff:
    values = {
        "remote_host": "10.0.0.7",
        "remote_port": 30000,
        "remote_ptp_size": 1,
        "remote_block_ids": [[1]],
    } | changes
    return Handoff(
        connector=connector(name),
        prefiller=prefiller(name),
        params=b'{"remote_block_ids":[[1]]}',
        remote_request_id=request_id,
        values=values,
        made_at=time.monotonic(),
    )


def entry(kind: str = "client_reset", ticket: str | None = None) -> Entry:
    """What Envoy logs of a request that ends like this (read from a real Envoy's log)."""
    made = Entry()
    common, response = made.common_properties, made.response
    common.upstream_remote_address.socket_address.address = "10.0.0.8"
    if ticket is not None:
        fields = common.metadata.filter_metadata[OWN_NAMESPACE].fields
        fields[TICKET].string_value = ticket
    if kind in ("completed", "cut_in_stream"):
        response.response_code.value = 200
        response.response_body_bytes = 100
        response.response_code_details = "via_upstream"
        common.time_to_first_upstream_rx_byte.FromMilliseconds(5)
    if kind == "completed":
        common.time_to_last_upstream_rx_byte.FromMilliseconds(9)
    if kind in ("client_reset", "cut_in_stream"):
        common.response_flags.downstream_connection_termination = True
        response.response_code_details = "downstream_remote_disconnect"
    if kind == "decode_unreachable":
        common.response_flags.upstream_connection_failure = True
        response.response_code.value = 503
    if kind == "decode_refused":
        response.response_code.value = 400
        response.response_body_bytes = 50
        response.response_code_details = "via_upstream"
        common.time_to_first_upstream_rx_byte.FromMilliseconds(5)
    return made


# ── by the access log ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kind", "releases"),
    [
        # A decoder that may still be at work gets a moment to notice that its client has gone.
        ("client_reset", [("chatcmpl-1", 0.1)]),
        ("decode_unreachable", [("chatcmpl-1", 0.0)]),
        ("decode_refused", [("chatcmpl-1", 0.0)]),
        ("completed", []),
        ("cut_in_stream", []),
    ],
)
async def test_an_ending_that_leaves_blocks_pinned_is_released(kind: str, releases: list[tuple[str, float]]) -> None:
    bench = Bench()
    text = bench.endings.dispatched(handoff(), "r")
    bench.endings.logged(entry(kind, text))
    assert bench.releases.requested == releases
    outcome = "client_reset" if kind == "cut_in_stream" else kind
    assert bench.count("extproc_stream_outcomes_total", outcome=outcome) == 1


async def test_the_ticket_is_enough_for_another_replica() -> None:
    text = Bench().endings.dispatched(handoff(), "r")
    other = Bench()
    other.endings.logged(entry("client_reset", text))
    assert other.releases.ids == ["chatcmpl-1"]


async def test_an_entry_without_a_ticket_of_ours_releases_nothing() -> None:
    bench = Bench()
    bench.endings.logged(entry("client_reset"))
    assert bench.releases.requested == []
    assert bench.count("extproc_stream_outcomes_total", outcome="client_reset") == 1


@pytest.mark.parametrize("kind", [accesslog_pb2.DownstreamStart, accesslog_pb2.DownstreamPeriodic])
async def test_only_the_end_counts(kind: Any) -> None:
    bench = Bench()
    text = bench.endings.dispatched(handoff(), "r")
    running = entry("client_reset", text)
    running.common_properties.access_log_type = kind
    bench.endings.logged(running)
    assert bench.releases.requested == []
    assert bench.count("extproc_stream_outcomes_total", outcome="client_reset") == 0
    running.common_properties.access_log_type = accesslog_pb2.DownstreamEnd
    bench.endings.logged(running)
    assert bench.releases.ids == ["chatcmpl-1"]


async def test_an_ending_is_decided_once() -> None:
    bench = Bench()
    text = bench.endings.dispatched(handoff(), "r")
    bench.endings.logged(entry("completed", text))
    for _ in range(2):
        bench.endings.logged(entry("client_reset", text))
    assert bench.releases.requested == []
    assert bench.count("extproc_tickets_refused_total", reason="replayed") == 2


def _tampered(text: str, reason: str) -> str:
    match reason:
        case "forged":
            return TicketSigner(b"another key").seal(SIGNER.open(text))
        case "malformed":
            return "not base64 at all!"
        case "oversize":
            return "A" * (MAX_CHARS + 1)
        case "version":
            ticket = SIGNER.open(text)
            return SIGNER.seal(
                Ticket(**{name: getattr(ticket, name) for name in ticket.__struct_fields__} | {"version": 99})
            )
        case "expired":
            ticket = SIGNER.open(text)
            fields = {name: getattr(ticket, name) for name in ticket.__struct_fields__}
            return SIGNER.seal(Ticket(**fields | {"issued_at": time.time() - 3600}))
        case "unknown_engine":
            ticket = SIGNER.open(text)
            fields = {name: getattr(ticket, name) for name in ticket.__struct_fields__}
            return SIGNER.seal(Ticket(**fields | {"prefiller": "10.9.9.9:8000"}))
    raise AssertionError(reason)


@pytest.mark.parametrize("reason", ["forged", "malformed", "oversize", "version", "expired", "unknown_engine"])
async def test_tickets_that_are_not_acted_on(reason: str) -> None:
    bench = Bench()
    text = bench.endings.dispatched(handoff(), "r")
    assert text is not None
    with structlog.testing.capture_logs() as logs:
        bench.endings.logged(entry("client_reset", _tampered(text, reason)))
    assert bench.releases.requested == []
    assert bench.count("extproc_tickets_refused_total", reason=reason) == 1
    assert [log for log in logs if log["log_level"] == "warning"] == [
        {"event": "ticket refused", "reason": reason, "log_level": "warning"}
    ]
    # The true one is good all the same.
    bench.endings.logged(entry("client_reset", text))
    assert bench.releases.ids == ["chatcmpl-1"]


async def test_every_truncation_is_refused() -> None:
    bench = Bench()
    text = bench.endings.dispatched(handoff(), "r")
    assert text is not None
    for length in range(len(text)):
        bench.endings.logged(entry("client_reset", text[:length]))
    assert bench.releases.requested == []


# ── by the stream, where no access log comes in ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["stream", "auto"])
@pytest.mark.parametrize(("status", "released"), [(None, 1), (200, 0), (302, 0), (400, 1), (404, 1), (503, 1)])
async def test_the_streams_end_decides(mode: str, status: int | None, released: int) -> None:
    bench = Bench(outcomes_from=mode)
    one = handoff()
    bench.endings.dispatched(one, "r")
    assert bench.open == 1
    bench.endings.stream_ended(one, status, ENVOY)
    assert await bench.settled() == ["chatcmpl-1"] * released
    bench.endings.stream_ended(one, None, ENVOY)  # it ends but once
    assert await bench.settled() == ["chatcmpl-1"] * released


async def test_told_to_go_by_the_stream_the_log_decides_nothing() -> None:
    bench = Bench(outcomes_from="stream")
    text = bench.endings.dispatched(one := handoff(), "r")
    bench.endings.logged(entry("client_reset", text))
    assert bench.releases.requested == []
    assert bench.count("extproc_stream_outcomes_total", outcome="client_reset") == 1
    bench.endings.stream_ended(one, None, ENVOY)
    assert await bench.settled() == ["chatcmpl-1"]


async def test_an_entry_that_comes_in_time_decides_instead() -> None:
    bench = Bench(settle_s=5)
    text = bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, None, ENVOY)
    bench.endings.logged(entry("completed", text))  # Envoy knows better
    await bench.endings.flush(time.monotonic())
    assert bench.open == 0
    assert bench.releases.requested == []


async def test_anybody_can_write_entries_but_only_a_ticket_makes_the_log_trusted() -> None:
    bench = Bench()
    for ticket in (None, "forged"):
        bench.endings.logged(entry("completed", ticket))
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, 503, ENVOY)
    assert await bench.settled() == ["chatcmpl-1"]


# ── by the stream, where the access log is trusted ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["access_log", "auto"])
async def test_a_response_proves_that_envoy_has_the_ticket(mode: str) -> None:
    """Another replica may be told of the end."""
    bench = Bench(outcomes_from=mode)
    bench.trust()
    for number, status in enumerate((200, 400, 503)):
        bench.endings.dispatched(one := handoff(str(number)), "r")
        bench.endings.stream_ended(one, status, ENVOY)
        assert bench.open == 0
    assert bench.releases.requested == []


@pytest.mark.parametrize("mode", ["access_log", "auto"])
async def test_a_stream_that_ends_right_after_our_reply_may_have_ended_before_it(mode: str) -> None:
    """Envoy dropped the request while our reply was on its way: no entry brings this ticket back."""
    bench = Bench(outcomes_from=mode)
    bench.trust()
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, None, ENVOY)
    assert await bench.settled() == ["chatcmpl-1"]


async def test_one_that_ends_later_is_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.trust()
    bench.endings.dispatched(one := handoff(), "r")
    later = time.monotonic() + 2.1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    bench.endings.stream_ended(one, None, ENVOY)
    assert bench.open == 0
    assert bench.releases.requested == []


async def test_a_handoff_whose_ticket_is_too_large_to_travel_is_the_streams() -> None:
    bench = Bench()
    bench.trust()
    hosts = {str(n): {"host": f"host-{n}.of.a.very.large.prefiller", "handshake_port": 30000 + n} for n in range(500)}
    one = handoff(remote_multi_nodes_meta_mapping=hosts)
    assert bench.endings.dispatched(one, "r") is None
    bench.endings.stream_ended(one, 503, ENVOY)
    assert await bench.settled() == ["chatcmpl-1"]


# ── while a decoder may be reading ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["stream", "auto", "access_log"])
async def test_a_connection_that_broke_is_no_reset(mode: str) -> None:
    """Envoy may go on without us, and the decoder with it."""
    bench = Bench(outcomes_from=mode)
    connections = bench.endings.connections
    connection = "ipv4:10.0.0.2:1"
    gone = [handoff(str(number)) for number in range(3)]
    for one in gone:
        connections.opened(connection)
        bench.endings.dispatched(one, "r")
    for one in gone:
        bench.endings.stream_ended(one, None, connection)
        connections.closed(connection)
    assert await bench.settled() == []
    assert bench.releases.left == ["0", "1", "2"]


async def test_a_connection_with_other_streams_stands() -> None:
    bench = Bench()
    connections = bench.endings.connections
    connection = "ipv4:10.0.0.2:1"
    log = asyncio.get_running_loop().create_task(asyncio.sleep(0))
    bench.endings.log_opened(log, connection)
    gone = [handoff(str(number)) for number in range(3)]
    for one in gone:
        connections.opened(connection)
        bench.endings.dispatched(one, "r")
        bench.endings.stream_ended(one, None, connection)
        connections.closed(connection)
    assert await bench.settled() == ["0", "1", "2"]
    bench.endings.log_closed(log, connection)
    await log


async def test_an_answered_request_is_over_however_its_connection_ended() -> None:
    bench = Bench()
    connections = bench.endings.connections
    connection = "ipv4:10.0.0.2:1"
    for _ in range(2):
        connections.opened(connection)
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, 503, connection)
    for _ in range(2):
        connections.closed(connection)
    assert await bench.settled() == ["chatcmpl-1"]


# ── other ways to end ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_handoff_that_never_left_is_released_at_once() -> None:
    bench = Bench()
    bench.trust()
    bench.endings.never_dispatched(handoff("orphan"), "r")
    bench.endings.dispatched(failed := handoff("failed"), "r")
    bench.endings.never_dispatched(failed, "r")
    assert bench.releases.requested == [("orphan", 0.0), ("failed", 0.0)]
    assert bench.open == 0


async def test_what_we_leave_behind_is_another_replicas() -> None:
    bench = Bench()
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.let_go(one)
    assert bench.open == 0
    bench.endings.stream_ended(one, None, ENVOY)
    assert await bench.settled() == []


async def test_what_only_a_timer_frees_is_counted() -> None:
    bench = Bench()
    bench.trust()
    one = handoff("1", "timer")
    assert bench.endings.dispatched(one, "r") is None
    bench.endings.stream_ended(one, 503, ENVOY)
    bench.endings.never_dispatched(handoff("2", "timer"), "r")
    assert await bench.settled() == []
    assert sorted(bench.releases.left) == ["1", "2"]


async def test_a_flush_decides_what_is_not_settled_and_ends_the_log_streams() -> None:
    bench = Bench(settle_s=60)
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, None, ENVOY)
    log = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    bench.endings.log_opened(log, ENVOY)
    started = time.monotonic()
    await bench.endings.flush(started + 0.05)
    assert 0.05 <= time.monotonic() - started < 5
    assert bench.releases.ids == ["chatcmpl-1"]
    assert bench.open == 0
    with pytest.raises(asyncio.CancelledError):
        await log


async def test_a_flush_waits_no_longer_than_it_must() -> None:
    bench = Bench()
    started = time.monotonic()
    await bench.endings.flush(started + 60)
    bench.endings.dispatched(one := handoff(), "r")
    bench.endings.stream_ended(one, None, ENVOY)
    await bench.endings.flush(started + 60)
    assert bench.releases.ids == ["chatcmpl-1"]
    assert time.monotonic() - started < 5
