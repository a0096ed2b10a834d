"""Metrics: bounded labels that exist from the start, times as the access log gives them, the fleet, the loop's lag."""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry, Counter

import extproc
from extproc.config import build
from extproc.connectors import base
from extproc.outcomes import Outcome
from extproc.pb.envoy.config.core.v3.address_pb2 import Address, SocketAddress
from extproc.pb.envoy.data.accesslog.v3.accesslog_pb2 import (
    AccessLogCommon,
    HTTPAccessLogEntry,
    HTTPResponseProperties,
)
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.server import Server
from extproc.telemetry import labels, looplag
from extproc.telemetry.labels import Labelled
from extproc.telemetry.metrics import Metrics
from tests.support.fleet import fleet_of, named, spec
from tests.support.gateway import until

PACKAGE = Path(extproc.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# By the path inside the package: a checkout may lie under a folder named check or demo.
NOT_THE_SERVICE = {"sim", "pb", "check", "demo", "vllm_plugin"}
SERVICE_SOURCES = [file for file in SOURCES if not NOT_THE_SERVICE & set(file.relative_to(PACKAGE).parts)]


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(value * 1e6))
    return duration


def values(metrics: Metrics, name: str) -> dict[str, float]:
    """A metric's samples of that name, by their labels' values."""
    return {
        ",".join(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


# ── labels ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("extproc_exchanges_total", labels.DECISIONS),
        ("extproc_bypass_total", labels.BYPASS_REASONS),
        ("extproc_fallbacks_total", labels.FALLBACK_RESULTS),
        ("extproc_errors_total", labels.ERROR_CODES),
        ("extproc_queue_rejections_total", ("full", "timeout")),
        ("extproc_prefill_attempts_total", labels.PREFILL_RESULTS),
        ("extproc_prefill_seconds_count", ("ok", "refused", "cancelled", "timeout", "other")),
        ("extproc_stream_outcomes_total", tuple(outcome.value for outcome in Outcome)),
        ("extproc_request_seconds_count", tuple(outcome.value for outcome in Outcome)),
        ("extproc_dispatch_seconds_count", tuple(outcome.value for outcome in Outcome)),
        ("extproc_decode_first_byte_seconds_count", tuple(outcome.value for outcome in Outcome)),
        ("extproc_tickets_refused_total", labels.TICKET_FAULTS),
        ("extproc_picks_total", ("prefill", "decode")),
        ("extproc_engine_requests", ("prefill", "decode")),
    ],
)
def test_every_value_is_there_from_the_start(name: str, expected: tuple[str, ...]) -> None:
    assert values(Metrics(), name) == dict.fromkeys(expected, 0.0)


def test_every_pair_of_values_is_there_from_the_start() -> None:
    metrics = Metrics()
    connectors = ("nixl", "mooncake-ascend", "timer")
    results = ("released", "refused", "timed_out", "dropped", "left_to_timer")
    releases = [f"{connector},{result}" for connector in connectors for result in results]
    assert values(metrics, "extproc_releases_total") == dict.fromkeys(releases, 0.0)
    states = ("ready", "ejected", "unhealthy", "draining", "unresolved")
    engines = [f"{role},{state}" for role in ("prefill", "decode") for state in states]
    assert values(metrics, "extproc_engines") == dict.fromkeys(engines, 0.0)


def test_a_value_that_is_not_known_makes_no_series_of_its_own() -> None:
    metrics = Metrics()
    for number in range(3):
        metrics.bypass.labels(f"invented-{number}").inc()
    metrics.bypass.labels("path").inc()
    metrics.releases.labels("nixl", "invented").inc()
    metrics.releases.labels("invented", "released").inc()
    counted = {reason: count for reason, count in values(metrics, "extproc_bypass_total").items() if count}
    assert counted == {"other": 3.0, "path": 1.0}
    counted = {pair: count for pair, count in values(metrics, "extproc_releases_total").items() if count}
    assert counted == {"nixl,other": 1.0, "other,released": 1.0}


def test_a_wrong_number_of_values_is_an_error() -> None:
    labelled = Labelled(Counter("c", "c", ["a", "b"], registry=CollectorRegistry()), ("x",), ("y",))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        labelled.labels("x", "y", "z")


def literals(visit: Callable[[ast.AST], Iterator[str]]) -> set[str]:
    found = set()
    for file in SERVICE_SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            found |= set(visit(node))
    return found


def argument_of(position: int, *functions: str) -> Callable[[ast.AST], Iterator[str]]:
    """The texts that are passed at ``position`` to functions of these names, wherever the service's code calls them."""

    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Call) and len(node.args) > position:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            value = node.args[position]
            if name in functions:
                yield from texts(value)

    return visit


def returned_by(*functions: str) -> Callable[[ast.AST], Iterator[str]]:
    def visit(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    yield from texts(inner.value)

    return visit


def texts(node: ast.AST) -> Iterator[str]:
    """The texts that an expression can come to; none that is empty, or that is put together."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, ast.BoolOp):
        yield from (text for value in node.values for text in texts(value))


def test_the_known_error_codes_are_those_that_the_service_answers_with() -> None:
    assert literals(argument_of(1, "RequestError")) == set(labels.ERROR_CODES)


def test_the_known_ticket_faults_are_those_that_are_raised() -> None:
    assert literals(argument_of(0, "TicketError")) == set(labels.TICKET_FAULTS)


def test_the_known_bypass_reasons_are_those_that_are_given() -> None:
    given = literals(argument_of(0, "Pass", "Inspect"))
    given |= literals(returned_by("bypass_reason", "why_not_disaggregate"))
    here = {"not_json", "small_prompt", "cached_prefix"}
    assert given | here == set(labels.BYPASS_REASONS)
    assert here <= literals(texts)


def test_the_known_faults_of_handoffs_are_those_that_connectors_find() -> None:
    whole = literals(argument_of(0, "UnusableHandoff"))
    keyed = {f"{fault}_{key}" for fault in ("missing", "bad") for key in base._REQUIRED}
    assert whole | keyed == set(labels.UNUSABLE_HANDOFFS)


# ── times ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def entry(**times: float) -> AccessLogCommon:
    return AccessLogCommon(**{name: seconds(value) for name, value in times.items()})


def test_phases_are_timed_from_the_access_log() -> None:
    metrics = Metrics()
    whole = entry(time_to_first_upstream_tx_byte=0.75, time_to_first_upstream_rx_byte=0.875, duration=12.5)
    metrics.ended(Outcome.COMPLETED, whole)
    sums = {
        phase: values(metrics, f"extproc_{phase}_seconds_sum")["completed"]
        for phase in ("dispatch", "decode_first_byte", "request")
    }
    assert sums == {"dispatch": 0.75, "decode_first_byte": 0.125, "request": 12.5}
    assert values(metrics, "extproc_request_seconds_count")["client_reset"] == 0


def test_a_phase_that_was_not_reached_has_no_time() -> None:
    metrics = Metrics()
    metrics.ended(Outcome.CLIENT_RESET, entry(duration=2.0))
    metrics.ended(Outcome.CLIENT_RESET, entry(duration=3.0, time_to_first_upstream_tx_byte=1.0))
    counts = [
        values(metrics, f"extproc_{phase}_seconds_count")["client_reset"]
        for phase in ("dispatch", "decode_first_byte", "request")
    ]
    assert counts == [1, 0, 2]


def test_buckets_reach_beyond_what_a_phase_may_take_by_default() -> None:
    limits = build({"fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]}})
    buckets = {
        name: {float(key.rsplit(",", 1)[-1]) for key in values(Metrics(), f"extproc_{name}_seconds_bucket")}
        for name in ("queue", "prefill", "dispatch", "release", "request")
    }
    largest = {name: max(bounds - {float("inf")}) for name, bounds in buckets.items()}
    assert largest["queue"] > limits.prefill.admission.max_wait_s
    assert largest["prefill"] > limits.prefill.timeout_s
    assert largest["dispatch"] >= limits.prefill.timeout_s * limits.prefill.attempts
    assert largest["release"] > limits.release.deadline_s
    assert largest["request"] > limits.limits.exchange_s


# ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_engines_are_counted_as_they_are_when_asked() -> None:
    metrics = Metrics()
    fleet = fleet_of(spec("prefill", 1), spec("prefill", 2, drain=True), spec("decode", 1), spec("decode", 2))
    metrics.watch(fleet)
    named(fleet, "decode-2").health.probed_ok = False
    counted = {pair: count for pair, count in values(metrics, "extproc_engines").items() if count}
    assert counted == {"prefill,ready": 1, "prefill,draining": 1, "decode,ready": 1, "decode,unhealthy": 1}

    fleet.update("test", [spec("decode", 1)])
    counted = {pair: count for pair, count in values(metrics, "extproc_engines").items() if count}
    assert counted == {"decode,ready": 1}


def test_picks_outlive_their_engines_and_requests_do_not_outlive_theirs() -> None:
    metrics = Metrics()
    fleet = fleet_of(spec("prefill", 1), spec("decode", 1))
    metrics.watch(fleet)
    held = [fleet.reserve("decode"), fleet.reserve("decode"), fleet.reserve("prefill")]
    assert values(metrics, "extproc_engine_requests") == {"prefill": 1, "decode": 2}
    for reservation in held:
        assert reservation is not None
        reservation.release()
    fleet.update("test", [spec("decode", 1)])
    assert values(metrics, "extproc_engine_requests") == {"prefill": 0, "decode": 0}
    assert values(metrics, "extproc_picks_total") == {"prefill": 1, "decode": 2}


# ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_blocks_the_loop_is_seen_as_its_lag() -> None:
    metrics = Metrics()
    sampler = asyncio.create_task(looplag.sample(metrics.loop_lag, interval_s=0.01))
    await until(lambda: values(metrics, "extproc_loop_lag_seconds_count")[""] >= 1)
    before = values(metrics, "extproc_loop_lag_seconds_sum")[""]
    time.sleep(0.15)  # noqa: ASYNC251 (that is the test)
    await until(lambda: values(metrics, "extproc_loop_lag_seconds_sum")[""] >= before + 0.13)
    sampler.cancel()


# ── in the service ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_running_service_exposes_itself() -> None:
    config = build(
        {
            "grpc": {"listen": "127.0.0.1:0"},
            "admin": {"listen": "127.0.0.1:0"},
            "fleet": {"decode": [{"url": "http://127.0.0.1:9"}], "scrape_s": 0},
            "life": {"notice_s": 0, "drain_s": 1},
        }
    )
    ended = HTTPAccessLogEntry(
        common_properties=AccessLogCommon(
            duration=seconds(4),
            time_to_first_upstream_tx_byte=seconds(1),
            time_to_first_upstream_rx_byte=seconds(3),
            upstream_remote_address=Address(socket_address=SocketAddress(address="127.0.0.1", port_value=9)),
        ),
        response=HTTPResponseProperties(response_code_details="via_upstream", response_body_bytes=5),
    )
    ended.response.response_code.value = 200
    async with (
        Server(config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.admin_port}", trust_env=False) as client,
    ):
        metrics = server.service.metrics
        await until(lambda: server.why_not_ready() is None)
        await until(lambda: values(metrics, "extproc_loop_lag_seconds_count")[""] >= 1)
        stream = als_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs()
        message = als_pb2.StreamAccessLogsMessage()
        message.http_logs.log_entry.append(ended)
        await stream.write(message)
        await until(lambda: values(metrics, "extproc_stream_outcomes_total")["completed"] == 1)
        lines = (await client.get("/metrics")).text.splitlines()
        await stream.done_writing()
        await stream
    for line in (
        "extproc_ready 1.0",
        'extproc_info{version="0.1.0"} 1.0',
        "extproc_access_log_streams 1.0",
        "extproc_releases_pending 0.0",
        'extproc_engines{role="decode",state="ready"} 1.0',
        'extproc_dispatch_seconds_sum{outcome="completed"} 1.0',
        'extproc_decode_first_byte_seconds_sum{outcome="completed"} 2.0',
        'extproc_request_seconds_sum{outcome="completed"} 4.0',
    ):
        assert line in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)
