"""However a request ends, through the real Envoy: how often its handoff is released, under which id, how soon."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

import h2.connection
import h2.events
import pytest
import pytest_asyncio

from extproc.connectors import Handoff
from extproc.sim.server import SimEngine
from tests.support.simulated import Pair, Pairing, Request, SimGateway, Stalls, chat, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


# One decode at a time, so that a test can keep a decoder busy; a prompt of chat() takes about 0.1 s to prefill.
_ENGINES: Final = {"prefill_us_per_token": 500}
_DECODERS: Final = {"max_num_seqs": 1}
_ASCEND: Final = _ENGINES | {"connector": "mooncake-ascend", "tp": 2}
PAIRINGS: Final = {
    "nixl": Pairing(_ENGINES | {"connector": "nixl"}, _DECODERS),
    "ascend-v1": Pairing(_ASCEND, _DECODERS),
    "ascend-v1-abort": Pairing(_ASCEND | {"ascend_abort": True}, _DECODERS),
    "ascend-hybrid": Pairing(_ASCEND | {"ascend_variant": "hybrid"}, _DECODERS),
    "ascend-hybrid-abort": Pairing(_ASCEND | {"ascend_variant": "hybrid", "ascend_abort": True}, _DECODERS),
}
_SETTINGS: Final = {"prefill": {"timeout_s": 10, "attempts": 1}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def logged() -> AsyncIterator[SimGateway]:
    """Envoy reports how requests end."""
    async with SimGateway.started(PAIRINGS, settings=_SETTINGS) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unlogged() -> AsyncIterator[SimGateway]:
    """Envoy without an access log: the gRPC streams are all there is."""
    async with SimGateway.started(PAIRINGS, settings=_SETTINGS, access_log=False) as gateway:
        yield gateway


# ---- how requests end: each returns when the blocks had no reader any more, by time.monotonic() ----


async def completed(pair: Pair) -> float:
    assert b'"finish_reason":"length"' in await pair.complete()
    return time.monotonic()


async def streamed_to_its_end(pair: Pair) -> float:
    assert b"[DONE]" in await pair.complete(stream=True)
    return time.monotonic()


async def cut_in_the_prefill(pair: Pair) -> float:
    """Its answer is near, so it is waited for: closing the call could come too late."""
    request = await pair.open(words=80)
    await until(lambda: pair.prefiller.engine.running == 1)
    return request.cut()


async def cut_in_a_long_prefill(pair: Pair) -> float:
    """It is closed; the engine stops, and pins nothing."""
    request = await pair.open(words=1100)
    await until(lambda: pair.prefiller.engine.running == 1)
    return request.cut()


async def cut_before_the_dispatch(pair: Pair) -> float:
    """The prefill has answered; Envoy has dropped the request before our reply reaches it."""
    endings = pair.gateway.server.service.endings
    dispatched, cut_at = endings.dispatched, [0.0]
    request: Request

    def dispatching(handoff: Handoff, request_id: str) -> str | None:
        cut_at[0] = request.cut_now()
        # The loop stands still meanwhile, so that the reply cannot be faster than the client's leaving.
        stats = f"{pair.gateway.envoy.admin_url}/stats?format=json&filter=http.gateway.downstream_rq_active"
        deadline = time.monotonic() + 5
        while json.load(urllib.request.urlopen(stats))["stats"][0]["value"] != 0:
            assert time.monotonic() < deadline
        return dispatched(handoff, request_id)

    endings.dispatched = dispatching  # type: ignore[method-assign]
    try:
        request = await pair.open()
        await until(lambda: cut_at[0] > 0)
    finally:
        endings.dispatched = dispatched  # type: ignore[method-assign]
    return cut_at[0]


async def cut_between_headers_and_first_chunk(pair: Pair) -> float:
    """The decoder is busy: it has answered with headers, and the request waits in its queue."""
    busy = await pair.open(pair.decoder.url, max_tokens=4000, ignore_eos=True, stream=True)
    await busy.until(b"data: ")
    request = await pair.open(stream=True)
    assert await request.head() == 200
    assert pair.decoder.engine.waiting == 1
    cut_at = request.cut()
    busy.cut()
    return cut_at


async def cut_in_the_stream(pair: Pair) -> float:
    request = await pair.open(stream=True, max_tokens=500, ignore_eos=True)
    await request.until(b"data: ")
    return request.cut()


async def cut_right_after_the_end(pair: Pair) -> float:
    request = await pair.open(stream=True)
    await request.until(b"[DONE]")
    return request.cut(reset=True)


async def cut_while_an_answer_is_computed(pair: Pair) -> float:
    request = await pair.open(max_tokens=500, ignore_eos=True)
    await until(lambda: pair.decoder.engine.running == 1)
    return request.cut()


async def reset_by_an_http2_client(pair: Pair) -> float:
    """RST_STREAM on a connection that stays."""
    await pair.decoder.fail("hang", leg="decode", count=1)
    client = h2.connection.H2Connection()
    client.initiate_connection()
    body = json.dumps({"model": pair.name, **chat()}).encode()
    headers = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "gateway")]
    client.send_headers(1, [*headers, ("content-type", "application/json")])
    client.send_data(1, body, end_stream=True)
    request = await Request.connect(pair.gateway.url)
    request.write(client.data_to_send())
    await until(lambda: bool(pair.decodes()))
    client.reset_stream(1, error_code=8)
    request.write(client.data_to_send())
    pair.gateway.keep(request)
    return time.monotonic()


async def decoder_refuses_the_connection(pair: Pair) -> float:
    """NIXL needs a decoder for the release: it succeeds once there is one again."""
    await pair.decoder.fail("refuse")
    request = await pair.open()
    assert await request.head() == 503
    if pair.connector == "nixl":
        await until(lambda: pair.gateway.accounts.pending == 1)
        await pair.decoder.heal()
    await request.to_end()
    return time.monotonic()


async def decoder_rejects_the_request(pair: Pair) -> float:
    """An engine-level rejection."""
    request = await pair.open(max_tokens=100_000)
    assert await request.head() == 400
    assert b"max_model_len" in await request.to_end()
    return time.monotonic()


async def decoder_rejects_the_body(pair: Pair) -> float:
    """A body that fails the schema never reaches the code that tells the prefiller."""
    request = await pair.open(max_tokens="x")
    assert await request.head() == 400
    await request.to_end()
    return time.monotonic()


async def decoder_answers_500(pair: Pair) -> float:
    await pair.decoder.fail("status", status=500, leg="decode", count=1)
    request = await pair.open()
    assert await request.head() == 500
    await request.to_end()
    return time.monotonic()


async def decoder_closes_without_an_answer(pair: Pair) -> float:
    await pair.decoder.fail("close_without_answer", leg="decode", count=1)
    request = await pair.open()
    assert await request.head() == 503
    await request.to_end()
    return time.monotonic()


async def decoder_dies_before_the_first_chunk(pair: Pair) -> float:
    await pair.decoder.fail("die_before_first_token", leg="decode", count=1)
    await pair.open(stream=True)
    return await _decode_failed(pair)


async def decoder_dies_after_the_first_chunk(pair: Pair) -> float:
    await pair.decoder.fail("die_mid_stream", leg="decode", tokens=2, count=1)
    request = await pair.open(stream=True)
    await request.until(b"data: ")
    freed_s = await pair.freed(since=await _decode_failed(pair))
    assert b"[DONE]" not in await request.to_end()  # Envoy takes a second to hang up (delayed_close_timeout)
    return time.monotonic() - freed_s


async def _decode_failed(pair: Pair) -> float:
    await until(lambda: [record.outcome for record in pair.decodes()] == ["failed"])
    return time.monotonic()


async def decoder_hangs_and_the_client_gives_up(pair: Pair) -> float:
    await pair.decoder.fail("hang", leg="decode", count=1)
    request = await pair.open()
    await until(lambda: bool(pair.decodes()))
    return request.cut()


async def prefill_times_out(pair: Pair) -> float:
    """The prefiller is not dead, only slow: a call that is not closed hands over in the end."""
    timeout_s, takes_s = (0.3, 2.5) if pair.connector == "nixl" else (1.5, 2.1)
    await pair.prefiller.fail("slow", delay_s=takes_s, leg="prefill", count=1)
    prefiller = pair.gateway.server._prefiller
    settings = prefiller._settings
    prefiller._settings = settings.model_copy(update={"timeout_s": timeout_s})
    try:
        request = await pair.open(words=10)
        assert await request.head() == 504
    finally:
        prefiller._settings = settings
    await until(lambda: [record.outcome for record in pair.prefiller.requests] != ["running"])
    return time.monotonic()


async def prefiller_rejects_the_request(pair: Pair) -> float:
    request = await pair.open(temperature=-1)
    assert await request.head() == 400
    await request.to_end()
    return time.monotonic()


# ---- what must come of it ----


@dataclass(frozen=True)
class Row:
    end: Callable[[Pair], Awaitable[float]]
    outcome: str
    releases: int
    ascend: int | None = None
    """Where it differs: Ascend's prefills are finished when nobody waits for them, NIXL's long ones are closed."""
    only: tuple[str, ...] = ()
    """The pairs that can play it, if not all."""
    unlogged: int | None = 0
    """Without an access log: how many on NIXL; None: not looked at."""
    handoffs: int = 1
    """How many prefills left blocks pinned."""
    within_s: float = 1.0
    """From the end of the last possible reader to free blocks."""

    def expected(self, pair: Pair, releases: int) -> int:
        return self.ascend if self.ascend is not None and pair.connector != "nixl" else releases


ROWS: Final = (
    Row(completed, "completed", 0),
    Row(streamed_to_its_end, "completed", 0),
    Row(cut_in_the_prefill, "client_reset", 1, unlogged=1),
    # Its answer might be near: the call is closed after a moment.
    Row(cut_in_a_long_prefill, "client_reset", 0, only=("nixl",), handoffs=0, within_s=3.0),
    Row(cut_before_the_dispatch, "client_reset", 1, unlogged=1),
    # Without the log this looks like any other end after the headers; NIXL's decoder tells its prefiller itself.
    Row(cut_between_headers_and_first_chunk, "client_reset", 1, unlogged=None),
    Row(cut_in_the_stream, "client_reset", 0),
    Row(cut_right_after_the_end, "completed", 0),
    Row(cut_while_an_answer_is_computed, "client_reset", 1, unlogged=1),
    Row(reset_by_an_http2_client, "client_reset", 1, unlogged=1),
    Row(decoder_refuses_the_connection, "decode_unreachable", 1, unlogged=1),
    Row(decoder_rejects_the_request, "decode_refused", 1, unlogged=1),
    Row(decoder_rejects_the_body, "decode_refused", 1, unlogged=1),
    Row(decoder_answers_500, "decode_refused", 1, unlogged=1),
    Row(decoder_closes_without_an_answer, "decode_reset", 1, unlogged=1),
    Row(decoder_dies_before_the_first_chunk, "decode_reset", 1, unlogged=None),
    Row(decoder_dies_after_the_first_chunk, "decode_reset", 0),
    Row(decoder_hangs_and_the_client_gives_up, "client_reset", 1, unlogged=1),
    Row(prefill_times_out, "rejected_by_us", 0, ascend=1, only=("nixl", "ascend-v1"), handoffs=0),
    Row(prefiller_rejects_the_request, "rejected_by_us", 0, handoffs=0),
)


def _matrix(names: Iterable[str], rows: Iterable[Row]) -> pytest.MarkDecorator:
    cells = [(name, row) for name, row in itertools.product(names, rows) if not row.only or name in row.only]
    return pytest.mark.parametrize(
        ("name", "row"), [pytest.param(name, row, id=f"{name}-{row.end.__name__}") for name, row in cells]
    )


@_matrix(PAIRINGS, ROWS)
async def test_with_the_access_log(logged: SimGateway, name: str, row: Row) -> None:
    pair = logged[name]
    await logged.mark()
    async with Stalls() as stalls:
        freed_s = await pair.freed(since=await row.end(pair))
    await logged.settled()
    await pair.all_free()

    assert logged.outcomes == {row.outcome: 1}
    _check(pair, row, row.expected(pair, row.releases), freed_s - stalls.seconds)


@_matrix(("nixl", "ascend-v1", "ascend-hybrid-abort"), (row for row in ROWS if row.unlogged is not None))
async def test_without_the_access_log(unlogged: SimGateway, name: str, row: Row) -> None:
    pair = unlogged[name]
    await unlogged.mark()
    async with Stalls() as stalls:
        freed_s = await pair.freed(since=await row.end(pair))
    await unlogged.settled(outcomes=0)
    await pair.all_free()

    assert unlogged.outcomes == {}
    assert row.unlogged is not None
    _check(pair, row, row.expected(pair, row.unlogged), freed_s - stalls.seconds)


def _check(pair: Pair, row: Row, releases: int, freed_s: float) -> None:
    gateway = pair.gateway
    assert gateway.releases == ({"released": releases} if releases else {})
    assert gateway.accounts.requested == sum(gateway.accounts.ended.values())
    handoffs = max(row.handoffs, releases)
    assert len(pair.pinned) == handoffs
    assert [ticket.request_id for ticket in gateway.requested] == pair.pinned[:releases]
    assert [ticket.prefiller for ticket in gateway.requested] == [_endpoint(pair.prefiller)] * releases
    # A decoder is asked for NIXL's releases alone, once each.
    asked = [
        json.loads(record.body or b"")["kv_transfer_params"]["remote_request_id"]
        for record in pair.decodes(releases=True)
    ]
    assert asked == (pair.pinned[:releases] if pair.connector == "nixl" else [])
    assert pair.expired == []
    assert freed_s < row.within_s
    pair.assert_alive()


def _endpoint(engine: SimEngine) -> str:
    return engine.url.removeprefix("http://")
