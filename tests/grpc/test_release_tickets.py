"""The log port, from which anybody may try: tickets that are not ours, or not good any more, make us contact nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest
import pytest_asyncio

from extproc import ticket as tickets
from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2
from extproc.pb.envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from extproc.replies import OWN_NAMESPACE, TICKET
from extproc.ticket import MAX_CHARS, Ticket, TicketSigner
from tests.grpc.stand import JSON, Stand, through
from tests.support.engines import Answer, RecordedRequest, prefill_params
from tests.support.gateway import CHAT, CHAT_BODY, until
from tests.support.scripted_envoy import Mode

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "of-the-fleet"
MODE: Mode = "BUFFERED"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nixl_stand() -> AsyncIterator[Stand]:
    async with Stand.standing({"fleet": {"api_key": KEY}, "release": {"settle_s": 0.05}}, prefill=1) as stand:
        yield stand


@pytest_asyncio.fixture(loop_scope="module")
async def nixl(nixl_stand: Stand) -> AsyncIterator[Stand]:
    await nixl_stand.reset()
    yield nixl_stand
    await nixl_stand.settled()


class Log:
    """A client of the log port."""

    def __init__(self, stand: Stand, stub: als_pb2_grpc.AccessLogServiceStub) -> None:
        self._stand = stand
        self._stub = stub

    async def send(self, *texts: str) -> None:
        """One entry for each ticket, all of clients that left before the first byte; returns when all were read."""
        before = self._told()
        message = als_pb2.StreamAccessLogsMessage()
        for text in texts:
            message.http_logs.log_entry.append(_entry(text))
        await self._stub.StreamAccessLogs(_once(message))
        await until(lambda: self._told() == before + len(texts))

    def _told(self) -> int:
        return sum(self._stand.counts("extproc_stream_outcomes_total").values())

    def refused(self) -> dict[str, int]:
        return self._stand.counts("extproc_tickets_refused_total")


async def _once(message: als_pb2.StreamAccessLogsMessage) -> AsyncIterator[als_pb2.StreamAccessLogsMessage]:
    yield message


def _entry(text: str) -> accesslog_pb2.HTTPAccessLogEntry:
    entry = accesslog_pb2.HTTPAccessLogEntry()
    entry.common_properties.response_flags.downstream_connection_termination = True
    entry.common_properties.upstream_remote_address.socket_address.address = "10.0.0.8"
    entry.common_properties.metadata.filter_metadata[OWN_NAMESPACE].fields[TICKET].string_value = text
    entry.response.response_code_details = "downstream_remote_disconnect"
    return entry


@contextlib.asynccontextmanager
async def log_port(stand: Stand) -> AsyncIterator[Log]:
    async with grpc.aio.insecure_channel(stand.grpc_address) as channel:
        yield Log(stand, als_pb2_grpc.AccessLogServiceStub(channel))  # type: ignore[no-untyped-call]


async def _ticket(stand: Stand) -> str:
    """The ticket of a request that went well."""
    async with stand.envoy(MODE) as envoy:
        exchange = await through(envoy)
        text = exchange.dynamic_metadata[OWN_NAMESPACE][TICKET]
        assert isinstance(text, str)
        return text


def _released(stand: Stand) -> set[str]:
    """Ids whose blocks decoders were asked to have freed (a decoder that is new to a prefiller is asked repeatedly)."""
    return {json.loads(request.body)["kv_transfer_params"]["remote_request_id"] for request in stand.releases}


def _id(stand: Stand, text: str) -> str:
    return _signer(stand).open(text).request_id


def _signer(stand: Stand) -> TicketSigner:
    assert stand.server is not None
    return tickets.signer(stand.server.config)


def _changed(stand: Stand, text: str, **changes: Any) -> str:
    """A ticket that differs and has a true seal."""
    signer = _signer(stand)
    ticket = signer.open(text)
    return signer.seal(Ticket(**{name: getattr(ticket, name) for name in ticket.__struct_fields__} | changes))


async def _changes(stand: Stand, log: Log, texts: Sequence[str]) -> dict[str, int]:
    """Refusals by reason that these tickets add."""
    before = log.refused()
    await log.send(*texts)
    after = log.refused()
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count != before.get(reason, 0)}


async def test_a_true_ticket_releases_once_with_the_fleets_key(nixl: Stand) -> None:
    assert nixl.server is not None
    requested = nixl.server.releases.accounts.requested
    text = await _ticket(nixl)
    async with log_port(nixl) as log:
        assert await _changes(nixl, log, [text]) == {}
        await until(lambda: _id(nixl, text) in _released(nixl))
        assert await _changes(nixl, log, [text, text]) == {"replayed": 2}
    assert nixl.server.releases.accounts.requested == requested + 1
    release = nixl.releases[0]
    assert release.header("authorization") == f"Bearer {KEY}"
    asked = json.loads(release.body)
    request_id = nixl.prefill.header("x-request-id")
    assert request_id is not None
    # The params as they were, but for the block ids, of which none is read.
    assert asked["kv_transfer_params"] == prefill_params(request_id) | {"remote_block_ids": [[1]]}
    assert asked["model"] == "extproc-release"


async def test_the_release_never_carries_the_clients_key(nixl: Stand) -> None:
    async with nixl.envoy(MODE) as envoy:
        headers = [*JSON, ("authorization", "Bearer of-the-client")]
        exchange = await envoy.request("POST", CHAT, headers, CHAT_BODY)
        assert nixl.prefill.header("authorization") == "Bearer of-the-client"
        request_id = exchange.upstream.json()["kv_transfer_params"]["remote_request_id"]
        await exchange.reset()
    await until(lambda: request_id in _released(nixl))
    assert {release.header("authorization") for release in nixl.releases} == {f"Bearer {KEY}"}
    assert not [release for release in nixl.releases if b"of-the-client" in release.body]


async def test_forgeries_contact_nobody(nixl: Stand) -> None:
    text = await _ticket(nixl)
    another_key = TicketSigner(b"guessed").seal(_signer(nixl).open(text))
    flipped = ("B" if text[9] == "A" else "A").join((text[:9], text[10:]))
    async with log_port(nixl) as log:
        truncated = [text[:-1], text[: len(text) // 2], text[:20]]
        refused = await _changes(nixl, log, [another_key, flipped, *truncated])
        assert sum(refused.values()) == 5
        assert set(refused) <= {"forged", "malformed"}  # a text may be cut where it is no base64
        assert await _changes(nixl, log, ["", "?", "\N{SNOWMAN}", text + "\n"]) == {"malformed": 4}
        assert await _changes(nixl, log, [text + "A" * MAX_CHARS]) == {"oversize": 1}
        assert await _changes(nixl, log, ["A" * 1_000_000]) == {"oversize": 1}
        assert await _changes(nixl, log, [_changed(nixl, text, version=2)]) == {"version": 1}
        assert await _changes(nixl, log, [_changed(nixl, text, issued_at=time.time() - 601)]) == {"expired": 1}
        assert await _changes(nixl, log, [_changed(nixl, text, connector="p2p")]) == {"unknown_engine": 1}
        # An engine of the fleet, but none that prefills; and one that it does not have.
        decoder = nixl.decoders[0].endpoint
        strangers = [_changed(nixl, text, prefiller=prefiller) for prefiller in (decoder, "10.0.0.1:80", "")]
        assert await _changes(nixl, log, strangers) == {"unknown_engine": 3}
        assert nixl.server is not None
        assert nixl.server.releases.accounts.pending == 0
        assert _id(nixl, text) not in _released(nixl)


async def test_entries_of_any_other_shape_harm_nothing(nixl: Stand) -> None:
    async with log_port(nixl) as log:
        message = als_pb2.StreamAccessLogsMessage()
        number, nothing, nested = (_entry("") for _ in range(3))
        number.common_properties.metadata.filter_metadata[OWN_NAMESPACE].fields[TICKET].number_value = 7
        nothing.common_properties.metadata.filter_metadata[OWN_NAMESPACE].fields.clear()
        fields = nested.common_properties.metadata.filter_metadata[OWN_NAMESPACE].fields
        fields[TICKET].struct_value.fields["a"].string_value = "b"
        message.http_logs.log_entry.extend([number, nothing, nested, accesslog_pb2.HTTPAccessLogEntry()])
        await log._stub.StreamAccessLogs(_once(message))
        await log._stub.StreamAccessLogs(_once(als_pb2.StreamAccessLogsMessage()))
        text = await _ticket(nixl)
        await log.send(text)
    await until(lambda: _id(nixl, text) in _released(nixl))


async def test_a_ticket_of_ours_that_names_other_hosts_is_refused() -> None:
    """Signed, as if a prefiller had been made to name them: still nobody outside the fleet is contacted."""
    contacts: list[Any] = []
    outside = await asyncio.start_server(lambda *peer: contacts.append(peer), "127.0.0.2", 0)
    port = outside.sockets[0].getsockname()[1]

    def respond(request: RecordedRequest) -> Answer:
        values = prefill_params(request.header("x-request-id") or "")
        hosts = {"0": {"host": "127.0.0.2", "handshake_port": port}}
        ascend = {"remote_ptp_size": 1, "remote_port": port, "remote_multi_nodes_meta_mapping": hosts}
        return Answer.json({"kv_transfer_params": values | ascend})

    async with outside, Stand.standing({"fleet": {"connector": "mooncake-ascend"}}, prefill=1, decode=1) as stand:
        stand.prefillers[0].respond = respond
        text = await _ticket(stand)
        async with log_port(stand) as log:
            await log.send(text)
        assert stand.server is not None
        accounts = stand.server.releases.accounts
        await until(lambda: accounts.requested == 1 and accounts.pending == 0)
        assert accounts.ended["refused"] == 1
        assert contacts == []


async def test_many_forgeries_cost_no_memory_and_no_descriptor(nixl: Stand) -> None:
    text = await _ticket(nixl)
    descriptors = len(os.listdir("/proc/self/fd"))
    async with log_port(nixl) as log:
        for _ in range(5):
            await log.send(*(text[:-8] + f"{number:08d}" for number in range(400)))
        assert log.refused()["forged"] >= 2000
    assert _id(nixl, text) not in _released(nixl)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)
