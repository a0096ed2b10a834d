"""Traces, as a real OTLP collector receives them from a running service."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Final

import grpc
import pytest
import pytest_asyncio

from extproc import configsections
from extproc.errors import ConfigError
from extproc.pb.envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.server import Server
from extproc.telemetry.tracing import NO_SPAN, Tracing
from tests.grpc.stand import JSON, Stand, refused, through
from tests.support.engines import ID_SUFFIX, Answer, RecordedRequest, StubEngine
from tests.support.gateway import CHAT_BODY, until
from tests.support.otlp import Collector, ReceivedSpan
from tests.support.scripted_envoy import ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE: Final = "0af7651916cd43dd8448eb211c80319c"
CALLER: Final = "b7ad6b7169203331"
TRACEPARENT: Final = f"00-{TRACE}-{CALLER}-01"
TRACED: Final = [*JSON, ("traceparent", TRACEPARENT), ("tracestate", "vendor=opaque")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def receiving() -> AsyncIterator[Collector]:
    async with Collector() as collector:
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(receiving: Collector) -> AsyncIterator[Stand]:
    settings = {"tracing": {"endpoint": receiving.endpoint, "service_name": "gateway-7"}, "prefill": {"attempts": 2}}
    async with Stand.standing(settings) as stand:
        yield stand


@pytest_asyncio.fixture(loop_scope="module")
async def collector(receiving: Collector) -> Collector:
    receiving.spans.clear()
    return receiving


@pytest_asyncio.fixture(loop_scope="module")
async def stand(standing: Stand, collector: Collector) -> AsyncIterator[Stand]:
    await standing.reset()
    yield standing
    await standing.settled()


@pytest_asyncio.fixture(loop_scope="module")
async def envoy(stand: Stand) -> AsyncIterator[ScriptedEnvoy]:
    async with stand.envoy("BUFFERED") as envoy:
        yield envoy


async def trace(collector: Collector, trace_id: str = TRACE) -> dict[str, list[ReceivedSpan]]:
    """The spans of one exchange by name, each in order of its start. The exchange's own ends last."""

    def whole(spans: list[ReceivedSpan]) -> bool:
        return any(span.trace_id == trace_id and span.name == "extproc exchange" for span in spans)

    found: dict[str, list[ReceivedSpan]] = {}
    for span in sorted(await collector.until(whole), key=lambda span: span.start):
        if span.trace_id == trace_id:
            found.setdefault(span.name, []).append(span)
    return found


async def test_an_exchange_is_one_tree_below_the_callers_span(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector
) -> None:
    await through(envoy, headers=[*TRACED, ("x-request-id", "mine")])
    spans = await trace(collector)
    assert {name: len(found) for name, found in spans.items()} == {"extproc exchange": 1, "pick": 1, "prefill": 1}
    (exchange,), (pick,), (prefill,) = spans["extproc exchange"], spans["pick"], spans["prefill"]

    assert (exchange.kind, exchange.parent_id, exchange.error) == ("SERVER", CALLER, None)
    request_id = stand.prefill.header("x-request-id")
    assert exchange.attributes["extproc.request_id"] == request_id
    assert exchange.attributes["extproc.client_request_id"] == "mine"
    assert exchange.attributes["extproc.path"] == "/v1/chat/completions"
    assert exchange.attributes["extproc.decision"] == "disaggregated"
    assert exchange.attributes["extproc.status"] == 200
    assert exchange.resource["service.name"] == "gateway-7"

    assert (pick.kind, pick.parent_id, pick.error) == ("INTERNAL", exchange.span_id, None)
    assert (prefill.kind, prefill.parent_id, prefill.error) == ("CLIENT", exchange.span_id, None)
    engine = exchange.attributes["extproc.prefiller"]
    assert pick.attributes == {"extproc.engine": engine}
    assert prefill.attributes == {
        "extproc.engine": engine,
        "extproc.request_id": request_id,
        "extproc.result": "ok",
    }
    assert exchange.start <= pick.start <= pick.end <= prefill.start <= prefill.end <= exchange.end


async def test_the_prefiller_hears_of_its_own_span(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    upstream = (await through(envoy, headers=TRACED)).upstream
    (prefill,) = (await trace(collector))["prefill"]
    # `header` insists on exactly one line.
    assert prefill.sent(stand.prefill.header("traceparent"))
    assert stand.prefill.header("tracestate") == "vendor=opaque"
    # The decode leg is Envoy's: what it has put there stays.
    assert upstream.header("traceparent") == TRACEPARENT
    assert upstream.header("tracestate") == "vendor=opaque"


async def test_a_failed_attempt_is_an_error_beside_the_one_that_worked(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector
) -> None:
    answers = iter([Answer(503)])

    def fail_once(request: RecordedRequest) -> Answer:
        return next(answers, None) or StubEngine().respond(request)  # type: ignore[return-value]

    for engine in stand.prefillers:
        engine.respond = fail_once
    await through(envoy, headers=TRACED)
    spans = await trace(collector)
    (exchange,) = spans["extproc exchange"]
    first, second = spans["prefill"]
    assert (first.error, first.attributes["extproc.result"]) == ("status_5xx", "status_5xx")
    assert (second.error, second.attributes["extproc.result"]) == (None, "ok")
    assert {first.parent_id, second.parent_id} == {exchange.span_id}
    assert first.attributes["extproc.engine"] != second.attributes["extproc.engine"]
    assert first.attributes["extproc.request_id"] != second.attributes["extproc.request_id"]
    assert [pick.attributes["extproc.engine"] for pick in spans["pick"]] == [
        first.attributes["extproc.engine"],
        second.attributes["extproc.engine"],
    ]
    by_id = {request.header("x-request-id"): request.header("traceparent") for request in stand.prefills}
    assert len(by_id) == 2
    assert all(span.sent(by_id[span.attributes["extproc.request_id"]]) for span in (first, second))
    assert exchange.error is None  # the request itself was well


async def test_a_request_that_we_fail_is_an_error(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    for engine in stand.prefillers:
        engine.respond = lambda _: Answer(500)
    await refused(envoy, 503, "prefill_unavailable", headers=TRACED)
    spans = await trace(collector)
    (exchange,) = spans["extproc exchange"]
    assert (exchange.error, exchange.attributes["extproc.status"]) == ("prefill_unavailable", 503)
    assert [span.error for span in spans["prefill"]] == ["status_5xx"] * 2


async def test_a_clients_fault_is_no_error(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    for engine in stand.prefillers:
        engine.respond = lambda _: Answer.json({"error": "no"}, status=400)
    await through(envoy, headers=TRACED)
    spans = await trace(collector)
    (exchange,), (prefill,) = spans["extproc exchange"], spans["prefill"]
    assert (exchange.error, exchange.attributes["extproc.decision"]) == (None, "refused_by_engine")
    assert (prefill.error, prefill.attributes["extproc.result"]) == (None, "refused")


async def test_a_client_that_leaves_is_no_error(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    for engine in stand.prefillers:
        engine.hang = True
    call = asyncio.create_task(envoy.request("POST", "/v1/chat/completions", TRACED, b'{"model":"m","messages":[]}'))
    await until(lambda: bool(stand.prefills))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    spans = await trace(collector)
    (exchange,), (prefill,) = spans["extproc exchange"], spans["prefill"]
    assert (exchange.error, exchange.attributes["extproc.decision"]) == (None, "client_left")
    assert (prefill.error, prefill.attributes["extproc.result"]) == (None, "cancelled")


async def test_without_a_traceparent_a_trace_begins(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    await through(envoy)
    spans = await collector.until(lambda spans: any(span.name == "extproc exchange" for span in spans))
    (exchange,) = [span for span in spans if span.name == "extproc exchange"]
    assert exchange.parent_id == ""
    assert {span.trace_id for span in spans} == {exchange.trace_id}
    (prefill,) = [span for span in spans if span.name == "prefill"]
    assert prefill.sent(stand.prefill.header("traceparent"))


@pytest.mark.parametrize(
    "lines",
    [
        [TRACEPARENT, TRACEPARENT.replace("b7ad", "c7ad")],
        ["00-not-a-trace"],
        [f"00-{'0' * 32}-{CALLER}-01"],
        ["\xff\xfe"],
    ],
)
async def test_a_traceparent_that_means_nothing_begins_a_trace(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector, lines: list[str]
) -> None:
    await through(envoy, headers=[*JSON, *(("traceparent", line.encode("latin-1")) for line in lines)])
    spans = await collector.until(lambda spans: any(span.name == "extproc exchange" for span in spans))
    (exchange,) = [span for span in spans if span.name == "extproc exchange"]
    assert (exchange.parent_id, exchange.trace_id == TRACE) == ("", False)
    (prefill,) = [span for span in spans if span.name == "prefill"]
    assert prefill.sent(stand.prefill.header("traceparent"))


async def test_a_tracestate_in_several_lines_goes_on_whole(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector
) -> None:
    states = [("tracestate", "a=1"), ("tracestate", "b=2")]
    await through(envoy, headers=[*JSON, ("traceparent", TRACEPARENT), *states])
    await trace(collector)
    assert stand.prefill.header("tracestate") == "a=1,b=2"


async def test_callers_that_do_not_sample_are_obeyed(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    await through(envoy, headers=[*JSON, ("traceparent", f"00-{TRACE}-{CALLER}-00")])
    await through(envoy, headers=[("traceparent", f"00-{TRACE[::-1]}-{CALLER}-01"), *JSON])
    await trace(collector, TRACE[::-1])  # by then the first one would have come, too
    assert TRACE not in {span.trace_id for span in collector.spans}
    # The decision travels on.
    told = next(filter(None, (request.header("traceparent") for request in stand.prefills)))
    assert (told.split("-")[1], told.split("-")[3]) == (TRACE, "00")


async def _released(collector: Collector) -> tuple[ReceivedSpan, ReceivedSpan]:
    """The only prefill of the trace, and the release that belongs to it."""

    def both(spans: list[ReceivedSpan]) -> bool:
        return {"prefill", "release"} <= {span.name for span in spans if span.trace_id == TRACE}

    spans = {span.name: span for span in await collector.until(both) if span.trace_id == TRACE}
    return spans["prefill"], spans["release"]


async def test_a_release_is_part_of_the_trace(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    exchange = await envoy.request("POST", "/v1/chat/completions", TRACED, CHAT_BODY)
    await exchange.reset()  # before any response: the blocks are still pinned
    prefill, release = await _released(collector)
    assert (release.parent_id, release.kind, release.error) == (prefill.span_id, "INTERNAL", None)
    (prefiller,) = [engine for engine in stand.prefillers if engine.requests]
    assert release.attributes == {
        "extproc.prefiller": prefiller.endpoint,
        "extproc.connector": "nixl",
        "extproc.remote_request_id": f"chatcmpl-{prefill.attributes['extproc.request_id']}-{ID_SUFFIX}",
        "extproc.result": "released",
    }
    assert release.start >= prefill.end


async def test_a_release_that_fails_is_an_error(stand: Stand, envoy: ScriptedEnvoy, collector: Collector) -> None:
    async def unwilling(_: RecordedRequest) -> Answer:
        return Answer(401)

    for decoder in stand.decoders:
        decoder.answer = unwilling  # type: ignore[method-assign]
    try:
        exchange = await envoy.request("POST", "/v1/chat/completions", TRACED, CHAT_BODY)
        await exchange.reset()
        _, release = await _released(collector)
    finally:
        for decoder in stand.decoders:
            del decoder.answer
    assert (release.error, release.attributes["extproc.result"]) == ("refused", "refused")


async def test_another_replicas_release_is_part_of_the_trace(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector
) -> None:
    exchange = await envoy.request("POST", "/v1/chat/completions", TRACED, CHAT_BODY)
    ticket = exchange.dynamic_metadata["extproc"]["ticket"]
    await exchange.response()
    await exchange.finish()  # so that this replica has nothing to release
    (prefill,) = (await trace(collector))["prefill"]

    assert stand.server is not None
    other = stand.server.config.model_copy(
        update={"tracing": configsections.Tracing(endpoint=collector.endpoint, service_name="gateway-8")}
    )
    async with Server(other) as server:
        await _tell(server, ticket)
        _, release = await _released(collector)
    assert release.parent_id == prefill.span_id
    assert (prefill.resource["service.name"], release.resource["service.name"]) == ("gateway-7", "gateway-8")


async def _tell(server: Server, ticket: str) -> None:
    """What Envoy logs of a request whose decoder refused the connection."""
    entry = HTTPAccessLogEntry()
    entry.common_properties.response_flags.upstream_connection_failure = True
    entry.common_properties.metadata.filter_metadata["extproc"].update({"ticket": ticket})
    message = als_pb2.StreamAccessLogsMessage()
    message.http_logs.log_entry.append(entry)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stream = als_pb2_grpc.AccessLogServiceStub(channel).StreamAccessLogs()  # type: ignore[no-untyped-call]
        await stream.write(message)
        await stream.done_writing()
        await stream


async def test_unsampled_and_untraced_releases_make_no_span(
    stand: Stand, envoy: ScriptedEnvoy, collector: Collector
) -> None:
    for headers in ([*JSON, ("traceparent", f"00-{TRACE[::-1]}-{CALLER}-00")], TRACED):
        exchange = await envoy.request("POST", "/v1/chat/completions", headers, CHAT_BODY)
        await exchange.reset()
    await _released(collector)
    await collector.until(lambda spans: any(span.name == "extproc exchange" for span in spans))
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len([span for span in collector.spans if span.name == "release"]) == 1


async def test_references_are_small_and_strict() -> None:
    tracing = Tracing(configsections.Tracing(endpoint="http://127.0.0.1:9", sample_ratio=0))
    span = tracing.exchange([("traceparent", TRACEPARENT.encode())])
    reference = span.reference
    assert (len(reference), reference[:16].hex(), reference[24]) == (25, TRACE, 1)
    assert tracing.resumed(reference, "release").reference[:16] == reference[:16]
    for faulty in (b"", reference[:-1], reference + b"\0", b"\0" * 24):
        assert tracing.resumed(faulty, "release") is NO_SPAN
    assert Tracing(configsections.Tracing()).resumed(reference, "release") is NO_SPAN
    assert NO_SPAN.reference == b""
    tracing.shutdown()


async def test_the_end_of_the_service_sends_what_is_left(collector: Collector) -> None:
    async with Stand.standing({"tracing": {"endpoint": collector.endpoint}}) as stand:
        async with stand.envoy("BUFFERED") as envoy:
            await through(envoy, headers=TRACED)
        assert collector.spans == []  # sent once a second
    assert {span.name for span in collector.spans} == {"extproc exchange", "pick", "prefill"}


async def test_a_dead_collector_holds_up_nothing() -> None:
    tracing = Tracing(configsections.Tracing(endpoint="http://127.0.0.1:9"))
    tracing.exchange([]).end()
    started = time.monotonic()
    await asyncio.to_thread(tracing.shutdown)
    assert time.monotonic() - started < 5


# ── off ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_off_headers_pass_on_as_they_are() -> None:
    async with Stand.standing() as stand, stand.envoy("BUFFERED") as envoy:
        upstream = (await through(envoy, headers=TRACED)).upstream
        for request in (stand.prefill, upstream):
            assert request.header("traceparent") == TRACEPARENT
            assert request.header("tracestate") == "vendor=opaque"


async def test_off_there_are_no_spans() -> None:
    tracing = Tracing(configsections.Tracing())
    assert tracing.exchange([("traceparent", TRACEPARENT.encode())]) is NO_SPAN
    assert tracing.child(NO_SPAN, "prefill") is NO_SPAN
    headers = [("traceparent", TRACEPARENT.encode())]
    assert tracing.inject(NO_SPAN, headers) is headers
    NO_SPAN.set(anything=1)
    NO_SPAN.fail("nothing")
    NO_SPAN.end()
    tracing.shutdown()


_SERVE: Final = """
import asyncio, sys
from extproc.config import build
from extproc.server import Server

async def main():
    values = {"decode": [{"url": "http://127.0.0.1:9"}], "prefill": [{"url": "http://127.0.0.1:9"}]}
    listen = {"listen": "127.0.0.1:0"}
    life = {"notice_s": 0, "drain_s": 1}
    async with Server(build({"fleet": values, "grpc": listen, "admin": listen, "life": life})):
        pass

asyncio.run(main())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"opentelemetry"}))
"""


async def test_off_nothing_of_opentelemetry_is_imported() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVE, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert (process.returncode, output.splitlines()[-1]) == (0, b"[]")


async def test_without_the_sdk_the_configuration_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"^tracing\.endpoint: needs OpenTelemetry; pip install 'extproc\[otlp\]'$"):
        Tracing(configsections.Tracing(endpoint="http://127.0.0.1:4317"))
