"""Connectors: what a prefill's answer is worth, what a decoder gets of it, and how its blocks are freed."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc import sidechannel
from extproc.connectors import UnusableHandoff, connector, known
from extproc.connectors.base import MAX_PARAMS_BYTES, Connector, Handoff, ReleaseResult
from extproc.connectors.mooncake_ascend import rank_endpoints
from extproc.enginehttp import EngineAnswer
from extproc.fleet.engines import Engine, Spec
from extproc.outcomes import Ending, Outcome
from extproc.ticket import VERSION, Ticket, TicketSigner

# A slow machine is no failure.
_STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = ("nixl", "mooncake-ascend", "timer")

NIXL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[17, 18, 19]],
    "remote_engine_id": "7b1e",
    "remote_request_id": "chatcmpl-3f2a-bb647e8b",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 37,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}
ASCEND = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[5, 6, 7]],
    "remote_engine_id": "0",
    "remote_request_id": "chatcmpl-3f2a-bb647e8b",
    "remote_host": "10.0.0.7",
    "remote_port": 30000,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_ptp_size": 2,
    "last_token_id": 198,
    "remote_multi_nodes_meta_mapping": {
        "0": {"host": "10.0.0.7", "engine_id": "0", "handshake_port": 30000},
        "1": {"host": "10.0.0.7", "engine_id": "0", "handshake_port": 30001},
    },
    "num_prompt_blocks": 3,
    "remote_block_size": 128,
}
HYBRID = {
    key: value
    for key, value in ASCEND.items()
    if key not in ("remote_pcp_size", "remote_dcp_size", "remote_block_size")
} | {"remote_multi_nodes_meta_mapping": {"0": {"host": "10.0.0.7"}, "1": {"host": "10.0.0.7"}}}


def _engine(name: str = "nixl", url: str = "http://10.0.0.7:8000", **options: Any) -> Engine:
    return Engine(Spec(role="prefill", url=url, name="p", connector=connector(name), **options))


def _handoff(params: Any, name: str = "nixl", engine: Engine | None = None) -> Handoff:
    answer = json.dumps({"id": "chatcmpl-1", "choices": [], "kv_transfer_params": params}).encode()
    return connector(name).handoff(engine or _engine(name), answer, 100.0)


def _unusable(answer: bytes, name: str = "nixl") -> str:
    with pytest.raises(UnusableHandoff) as error:
        connector(name).handoff(_engine(name), answer, 100.0)
    return str(error.value)


# ── what a prefill's answer is worth ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("params", [NIXL, ASCEND, HYBRID, {**NIXL, "remote_block_ids": [1, 2]}, {**NIXL, "later": [1]}])
@pytest.mark.parametrize("name", NAMES)
def test_usable_params_go_on_verbatim(name: str, params: dict[str, Any]) -> None:
    text = json.dumps(params, indent=1).replace("37", "37e0").encode()
    engine = _engine(name)

    handoff = connector(name).handoff(engine, b'{"kv_transfer_params": ' + text + b' , "usage":{}}', 100.0)

    assert handoff.params == text
    assert handoff.remote_request_id == "chatcmpl-3f2a-bb647e8b"
    assert handoff.prefiller is engine
    assert handoff.connector is connector(name)
    assert handoff.values == params


def test_a_handoff_is_good_for_the_engines_lease() -> None:
    handoff = _handoff(NIXL, engine=_engine(lease_s=30.0))

    assert not handoff.expired(129.99)
    assert handoff.expired(130.0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "not_json"),
        (b"{", "not_json"),
        (b"[]", "not_json"),
        (b"null", "not_json"),
        (b'data: {"id":1}\n\n', "not_json"),
        (b'{"kv_transfer_params": {"do_remo', "not_json"),
        (b"<html>", "not_json"),
        (b"{}", "no_params"),
        (b'{"choices":[]}', "no_params"),
        (b'{"kv_transfer_params": null}', "no_params"),
        (b'{"kv_transfer_params": []}', "bad_params"),
        (b'{"kv_transfer_params": "x"}', "bad_params"),
        (b'{"kv_transfer_params": {"a": 1e999}}', "bad_params"),
        (b'{"kv_transfer_params": {"a": "\xff"}}', "bad_params"),
        (b'{"kv_transfer_params": {}}', "not_remote"),
        (b'{"kv_transfer_params": {"do_remote_prefill": false}}', "not_remote"),
        (b'{"kv_transfer_params": {"do_remote_prefill": 1}}', "not_remote"),
        (b'{"kv_transfer_params": {"do_remote_prefill": true}}', "missing_remote_block_ids"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_answers_without_usable_params(name: str, answer: bytes, reason: str) -> None:
    assert _unusable(answer, name) == reason


def test_params_beyond_all_measure_are_unusable() -> None:
    room = MAX_PARAMS_BYTES - len(json.dumps({**NIXL, "later": ""}))
    largest = {**NIXL, "later": "x" * room}

    assert len(_handoff(largest).params) == MAX_PARAMS_BYTES
    answer = json.dumps({"kv_transfer_params": {**largest, "later": "x" * (room + 1)}}).encode()
    assert _unusable(answer) == "params_too_large"


@pytest.mark.parametrize("key", ["remote_block_ids", "remote_engine_id", "remote_request_id", "remote_port"])
@pytest.mark.parametrize("name", NAMES)
def test_a_missing_key_makes_a_handoff_unusable(name: str, key: str) -> None:
    """A decoder's scheduler asserts without block ids, and waits for ever without any other."""
    complete = ASCEND if name == "mooncake-ascend" else NIXL
    absent = {other: value for other, value in complete.items() if other != key}

    for params in (absent, {**complete, key: None}, {**complete, key: ""}):
        assert _unusable(json.dumps({"kv_transfer_params": params}).encode(), name) == f"missing_{key}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"remote_block_ids": []}, "bad_remote_block_ids"),
        ({"remote_block_ids": [[]]}, "bad_remote_block_ids"),
        ({"remote_block_ids": [[], []]}, "bad_remote_block_ids"),
        ({"remote_block_ids": {"0": [1]}}, "bad_remote_block_ids"),
        ({"remote_block_ids": "1,2"}, "bad_remote_block_ids"),
        ({"remote_block_ids": [[1], None]}, "bad_remote_block_ids"),
        ({"remote_engine_id": 7}, "bad_remote_engine_id"),
        ({"remote_request_id": ["a"]}, "bad_remote_request_id"),
        ({"remote_port": 0}, "bad_remote_port"),
        ({"remote_port": -1}, "bad_remote_port"),
        ({"remote_port": 65536}, "bad_remote_port"),
        ({"remote_port": "5600"}, "bad_remote_port"),
        ({"remote_port": 5600.5}, "bad_remote_port"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_so_does_a_value_of_another_kind(name: str, changes: dict[str, Any], reason: str) -> None:
    assert _unusable(json.dumps({"kv_transfer_params": {**ASCEND, **changes}}).encode(), name) == reason


@pytest.mark.parametrize("blocks", [[1], [[1]], [[1, 2], []], [[], [3]]])
def test_some_block_is_enough(blocks: Any) -> None:
    assert _handoff({**NIXL, "remote_block_ids": blocks}).values["remote_block_ids"] == blocks


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(_STEADY, max_examples=80)
@given(st.sampled_from(NAMES), st.dictionaries(st.sampled_from([*ASCEND, "tp_size", "remote_hosts"]), _json))
def test_whatever_an_engine_answers_is_a_handoff_or_unusable(name: str, changes: dict[str, Any]) -> None:
    try:
        handoff = _handoff({**ASCEND, **changes}, name)
    except UnusableHandoff:
        return
    data = connector(name).release_data(handoff)
    if data is not None:
        TicketSigner(b"k").seal(_ticket(name, data))


# ── the address that a decoder fetches from ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "host",
    [
        None,
        "",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "localhost.localdomain",
        "ip6-localhost",
        "127.0.0.1",
        "127.8.9.1",
        "0.0.0.0",
        "::",
        "::1",
        "[::1]",
        "::ffff:127.0.0.1",
        "::ffff:0.0.0.0",
        7,
        ["10.0.0.9"],
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_an_address_that_means_nothing_elsewhere_becomes_the_prefillers(name: str, host: Any) -> None:
    handoff = _handoff({**NIXL, "remote_host": host}, name)

    assert json.loads(handoff.params) == {**NIXL, "remote_host": "10.0.0.7"}
    assert handoff.values["remote_host"] == "10.0.0.7"


def test_so_does_none_at_all() -> None:
    without = {key: value for key, value in NIXL.items() if key != "remote_host"}

    assert json.loads(_handoff(without).params) == {**NIXL, "remote_host": "10.0.0.7"}


def test_only_the_address_is_changed() -> None:
    params = b'{ "do_remote_prefill":true, "remote_host" : "0.0.0.0", "remote_block_ids":[[1]],"remote_engine_id":"e",'
    params += b'"remote_request_id":"r","remote_port":1, "n":18446744073709551616,"n2":1.50 }'

    handoff = connector("nixl").handoff(_engine(), b'{"kv_transfer_params":' + params + b"}", 1.0)

    assert handoff.params == params.replace(b"0.0.0.0", b"10.0.0.7")


@pytest.mark.parametrize("host", ["10.0.0.9", "prefill-0.svc", "2001:db8::9", "169.254.1.1", "localhost-0.svc"])
def test_any_other_address_is_the_engines_word(host: str) -> None:
    handoff = _handoff({**NIXL, "remote_host": host})

    assert json.loads(handoff.params)["remote_host"] == host


@pytest.mark.parametrize(
    "elsewhere", [{"remote_multi_nodes_meta_mapping": {"0": {"host": "10.0.0.9"}}}, {"remote_hosts": ["10.0.0.9"]}]
)
def test_a_multi_node_engine_names_its_hosts_itself(elsewhere: dict[str, Any]) -> None:
    assert json.loads(_handoff({**NIXL, "remote_host": "127.0.0.1", **elsewhere}).params)["remote_host"] == "127.0.0.1"
    assert _unusable(json.dumps({"kv_transfer_params": {**NIXL, "remote_host": None, **elsewhere}}).encode()) == (
        "missing_remote_host"
    )


@pytest.mark.parametrize("empty", [{"remote_multi_nodes_meta_mapping": {}}, {"remote_multi_nodes_meta_mapping": None}])
def test_an_empty_map_names_nothing(empty: dict[str, Any]) -> None:
    assert json.loads(_handoff({**NIXL, "remote_host": "::", **empty}).params)["remote_host"] == "10.0.0.7"


def test_an_ipv6_prefiller_is_named_without_brackets() -> None:
    handoff = _handoff({**NIXL, "remote_host": "::"}, engine=_engine(url="http://[2001:db8::1]:8000"))

    assert json.loads(handoff.params)["remote_host"] == "2001:db8::1"


def test_a_prefiller_without_an_address_cannot_lend_one() -> None:
    engine = _engine(url="http://by-name:8000")

    with pytest.raises(UnusableHandoff, match="missing_remote_host"):
        _handoff({**NIXL, "remote_host": "0.0.0.0"}, engine=engine)


# ── what is pinned when ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outcome", list(Outcome))
def test_blocks_that_no_decoder_is_known_to_have_may_be_pinned(name: str, outcome: Outcome) -> None:
    assert connector(name).leaves_pinned(Ending(outcome, "awaiting_first_token", kv_read=False))
    assert not connector(name).leaves_pinned(Ending(outcome, "streaming", kv_read=True))


@pytest.mark.parametrize(
    ("name", "way"), [("nixl", "disconnect"), ("timer", "disconnect"), ("mooncake-ascend", "finish")]
)
def test_what_a_client_that_leaves_during_the_prefill_does_to_it(name: str, way: str) -> None:
    assert connector(name).cancel == way


def test_connectors_by_name() -> None:
    assert {name: connector(name).name for name in NAMES} == {name: name for name in NAMES}
    assert [known(name) for name in (*NAMES, "mooncake", "")] == [True, True, True, False, False]
    with pytest.raises(KeyError):
        connector("mooncake")


# ── the listeners of vLLM Ascend ─────────────────────────────────────────────────────────────────────────────────────


def _mapped(entries: dict[str, Any], **changes: Any) -> list[tuple[str, int]]:
    return rank_endpoints({**ASCEND, "remote_multi_nodes_meta_mapping": entries, **changes})


def test_ranks_by_their_handshake_ports() -> None:
    assert rank_endpoints(ASCEND) == [("10.0.0.7", 30000), ("10.0.0.7", 30001)]


def test_ranks_by_offsets_from_the_base_port() -> None:
    assert rank_endpoints(HYBRID) == [("10.0.0.7", 30000), ("10.0.0.7", 30001)]


def test_ranks_without_a_map() -> None:
    without = {key: value for key, value in ASCEND.items() if key != "remote_multi_nodes_meta_mapping"}

    assert rank_endpoints({**without, "remote_ptp_size": 4}) == [("10.0.0.7", 30000 + rank) for rank in range(4)]
    assert rank_endpoints({**without, "remote_ptp_size": None}) == [("10.0.0.7", 30000)]
    assert rank_endpoints({**without, "remote_ptp_size": 2, "remote_pcp_size": 2}) == [
        ("10.0.0.7", 30000 + rank) for rank in range(4)
    ]


def test_ranks_of_a_data_parallel_engine_above_0() -> None:
    """The keys count from the engine's base port 30000, remote_port is this rank's base."""
    entries = {
        str(offset): {"host": "10.0.0.7", "engine_id": "1", "handshake_port": 30000 + offset} for offset in (2, 3)
    }

    assert _mapped(entries, remote_port=30002) == [("10.0.0.7", 30002), ("10.0.0.7", 30003)]


def test_ranks_on_several_nodes() -> None:
    entries = {str(rank): {"host": f"10.0.0.{7 + rank // 2}", "handshake_port": 30000 + rank} for rank in range(4)}

    assert _mapped(entries, remote_ptp_size=4) == [
        ("10.0.0.7", 30000),
        ("10.0.0.7", 30001),
        ("10.0.0.8", 30002),
        ("10.0.0.8", 30003),
    ]


def test_pipeline_ranks_are_known_by_the_map_alone() -> None:
    entries = {str(rank): {"host": "10.0.0.7", "handshake_port": 30000 + rank} for rank in range(4)}

    assert _mapped(entries, remote_ptp_size=2) == [("10.0.0.7", 30000 + rank) for rank in range(4)]


def test_ranks_that_the_map_leaves_out_are_added() -> None:
    assert _mapped({"1": {"host": "10.0.0.7", "handshake_port": 30001}}, remote_ptp_size=3) == [
        ("10.0.0.7", 30001),
        ("10.0.0.7", 30000),
        ("10.0.0.7", 30002),
    ]


def test_entries_of_a_map_that_say_nothing_are_passed_over() -> None:
    entries = {"0": None, "x": {"host": "h"}, "1": {"handshake_port": "30001"}, "9": {"handshake_port": 70000}, "²": {}}

    assert _mapped(entries) == [("10.0.0.7", 30001), ("10.0.0.7", 30000)]


@pytest.mark.parametrize("count", [10**9, "10000000000", -3, True, [2], "two", 1.5])
def test_an_absurd_number_of_ranks_ends_with_the_ports(count: Any) -> None:
    found = rank_endpoints({**HYBRID, "remote_ptp_size": count, "remote_port": 65533})

    assert set(found) <= {("10.0.0.7", port) for port in (65533, 65534, 65535)}
    assert ("10.0.0.7", 65533) in found


# ── what a ticket holds ──────────────────────────────────────────────────────────────────────────────────────────────


def _ticket(name: str, data: Any) -> Ticket:
    return Ticket(VERSION, name, "10.0.0.7:8000", "chatcmpl-3f2a-bb647e8b", 1.0, 30.0, data)


def _through_a_ticket(name: str, handoff: Handoff) -> Ticket:
    """The ticket as the replica sees it that gets it back."""
    data = connector(name).release_data(handoff)
    assert data is not None
    sign = TicketSigner(b"key")
    text = sign.seal(_ticket(name, data))
    assert len(text) < 1200
    return sign.open(text, now=2.0)


@pytest.mark.parametrize("blocks", [list(range(10_000)), [list(range(10_000)), list(range(5_000)), []]])
def test_a_ticket_is_small_however_long_the_prompt(blocks: Any) -> None:
    ticket = _through_a_ticket("nixl", _handoff({**NIXL, "remote_block_ids": blocks}))

    kept = json.loads(ticket.data["params"])
    assert kept == {**NIXL, "remote_block_ids": [[0], [0], []] if isinstance(blocks[0], list) else [0]}


def test_a_ticket_holds_numbers_of_any_size() -> None:
    params = json.dumps({**NIXL, "later": 10**40}).encode()
    handoff = connector("nixl").handoff(_engine(), b'{"kv_transfer_params":' + params + b"}", 1.0)

    assert json.loads(_through_a_ticket("nixl", handoff).data["params"])["later"] == 10**40


def test_a_ticket_of_a_large_ascend_engine_is_small() -> None:
    entries = {str(rank): {"host": f"10.0.0.{7 + rank // 16}", "handshake_port": 30000 + rank} for rank in range(128)}
    handoff = _handoff(
        {**ASCEND, "remote_multi_nodes_meta_mapping": entries, "remote_ptp_size": 128}, "mooncake-ascend"
    )

    ports = _through_a_ticket("mooncake-ascend", handoff).data["ports"]
    assert sum(len(listed) for listed in ports.values()) == 128
    assert ports["10.0.0.8"] == list(range(30016, 30032))


def test_no_foreign_frame_is_ever_sent_to_a_listener_that_is_not_ascends() -> None:
    """A NIXL engine that is configured as one of vLLM Ascend: its listener would die of it."""
    assert connector("mooncake-ascend").release_data(_handoff(NIXL, "mooncake-ascend")) is None


def test_the_timer_needs_no_ticket() -> None:
    assert connector("timer").release_data(_handoff(NIXL, "timer")) is None


# ── release ──────────────────────────────────────────────────────────────────────────────────────────────────────────

UNKNOWN_MODEL = b'{"error":{"message":"The model `extproc-release` does not exist.","type":"NotFoundError","code":404}}'


class Ways:
    """Records what a release does. Decoders give ``answers``; a side channel gives what ``reply`` says."""

    def __init__(
        self,
        answers: Sequence[tuple[int, bytes]] = (),
        reply: Callable[[str], bytes | None] = lambda address: sidechannel.ACK,
        abort_port: int | None = None,
        hosts: Sequence[str] = ("10.0.0.7", "10.0.0.8"),
    ) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.told: list[tuple[str, bytes]] = []
        self._answers = answers
        self._reply = reply
        self._abort_port = abort_port
        self._hosts = hosts

    def abort_port(self, prefiller: str) -> int | None:
        return self._abort_port

    def side_channel(self, prefiller: str, host: str | None, port: int) -> str | None:
        if host is not None and host not in self._hosts:
            return None
        return sidechannel.endpoint(host or prefiller.partition(":")[0], port)

    async def ask_decoders(
        self, prefiller: str, path: str, body: bytes, *, engine_id: str | None
    ) -> AsyncGenerator[EngineAnswer]:
        assert engine_id == NIXL["remote_engine_id"]
        for status, text in self._answers:
            self.asked.append((prefiller, path, body))
            yield EngineAnswer(status, [], text)

    async def ask_side_channels(self, addresses: Sequence[str], payload: bytes) -> list[bytes | None]:
        self.told += [(address, payload) for address in addresses]
        return [self._reply(address) for address in addresses]

    async def release_on_ascend(self, addresses: Sequence[str], request_id: str) -> list[bytes | None]:
        return await self.ask_side_channels(addresses, request_id.encode())


async def _release(name: str, ticket: Ticket, ways: Ways) -> ReleaseResult:
    used: Any = ways
    return await connector(name).release(ticket, used)


async def test_nixl_hands_the_params_to_a_decoder_that_rejects_them() -> None:
    ways = Ways([(404, UNKNOWN_MODEL)])
    ticket = _through_a_ticket("nixl", _handoff({**NIXL, "remote_block_ids": [[1, 2], [3, 4]]}))

    assert await _release("nixl", ticket, ways) is ReleaseResult.RELEASED

    [(prefiller, path, body)] = ways.asked
    assert (prefiller, path) == ("10.0.0.7:8000", "/v1/completions")
    assert json.loads(body) == {
        "model": "extproc-release",
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {**NIXL, "remote_block_ids": [[1], [3]]},
    }
    assert ways.told == []


@pytest.mark.parametrize(
    ("answers", "result", "asked"),
    [
        ([], ReleaseResult.UNREACHABLE, 0),
        ([(404, UNKNOWN_MODEL), (404, UNKNOWN_MODEL)], ReleaseResult.RELEASED, 1),
        ([(500, b""), (404, UNKNOWN_MODEL)], ReleaseResult.RELEASED, 2),
        ([(401, b"{}"), (404, UNKNOWN_MODEL)], ReleaseResult.RELEASED, 2),
        ([(404, b'{"object":"error","message":"The model does not exist.","code":404}')], ReleaseResult.RELEASED, 1),
        ([(404, b'{"detail":"Not Found"}')], ReleaseResult.REFUSED, 1),
        ([(404, b"<html>no such page</html>")], ReleaseResult.REFUSED, 1),
        ([(404, b"")], ReleaseResult.REFUSED, 1),
        ([(404, b"[]")], ReleaseResult.REFUSED, 1),
        ([(404, b'{"error":"' + b"\xff" + b'"}')], ReleaseResult.REFUSED, 1),
        ([(404, b"[" * 5000)], ReleaseResult.REFUSED, 1),
        ([(200, b'{"choices":[]}')], ReleaseResult.REFUSED, 1),
        ([(401, b'{"error":"Unauthorized"}')], ReleaseResult.REFUSED, 1),
        ([(400, UNKNOWN_MODEL)], ReleaseResult.REFUSED, 1),
        ([(500, UNKNOWN_MODEL), (503, b"")], ReleaseResult.UNREACHABLE, 2),
        ([(401, b""), (503, b"")], ReleaseResult.REFUSED, 2),
    ],
)
async def test_only_the_engines_own_404_counts_as_a_release(
    answers: list[tuple[int, bytes]], result: ReleaseResult, asked: int
) -> None:
    ways = Ways(answers)

    assert await _release("nixl", _through_a_ticket("nixl", _handoff(NIXL)), ways) is result
    assert len(ways.asked) == asked


async def test_a_prefiller_with_the_plugin_is_told_on_the_plugins_ports() -> None:
    ways = Ways([(404, UNKNOWN_MODEL)], abort_port=5700)
    ticket = _through_a_ticket("nixl", _handoff({**NIXL, "tp_size": 3}))

    assert await _release("nixl", ticket, ways) is ReleaseResult.RELEASED

    message = sidechannel.abort_request("chatcmpl-3f2a-bb647e8b")
    assert ways.told == [(f"tcp://10.0.0.7:{port}", message) for port in (5700, 5701, 5702)]
    assert ways.asked == []


@pytest.mark.parametrize("reply", [sidechannel.ACK, b"UNKNOWN"])
async def test_what_the_plugin_no_longer_holds_is_free(reply: bytes) -> None:
    ways = Ways(reply=lambda address: reply, abort_port=5700)

    assert await _release("nixl", _through_a_ticket("nixl", _handoff(NIXL)), ways) is ReleaseResult.RELEASED


@pytest.mark.parametrize("reply", [None, b"ERROR", b""])
async def test_without_the_plugins_word_a_decoder_is_asked(reply: bytes | None) -> None:
    ways = Ways(
        [(404, UNKNOWN_MODEL)],
        reply=lambda address: reply if address.endswith("1") else sidechannel.ACK,
        abort_port=5700,
    )
    ticket = _through_a_ticket("nixl", _handoff({**NIXL, "tp_size": 2}))

    assert await _release("nixl", ticket, ways) is ReleaseResult.RELEASED
    assert (len(ways.told), len(ways.asked)) == (2, 1)


@pytest.mark.parametrize("tp_size", [None, 0, -1, "2", 10**9, [4]])
async def test_a_strange_number_of_ranks_counts_as_one(tp_size: Any) -> None:
    ways = Ways(abort_port=5700)

    await _release("nixl", _through_a_ticket("nixl", _handoff({**NIXL, "tp_size": tp_size})), ways)

    assert [address for address, _ in ways.told] == ["tcp://10.0.0.7:5700"]


async def test_nixls_own_port_is_never_touched() -> None:
    ways = Ways([(500, b"")], abort_port=None)

    assert await _release("nixl", _through_a_ticket("nixl", _handoff(NIXL)), ways) is ReleaseResult.UNREACHABLE
    assert ways.told == []


async def test_ascend_tells_every_rank() -> None:
    ways = Ways()
    entries = {"0": {"host": "10.0.0.7", "handshake_port": 30000}, "1": {"host": "10.0.0.8", "handshake_port": 30001}}
    handoff = _handoff({**ASCEND, "remote_multi_nodes_meta_mapping": entries}, "mooncake-ascend")

    result = await _release("mooncake-ascend", _through_a_ticket("mooncake-ascend", handoff), ways)

    assert result is ReleaseResult.RELEASED
    assert ways.told == [
        ("tcp://10.0.0.7:30000", b"chatcmpl-3f2a-bb647e8b"),
        ("tcp://10.0.0.8:30001", b"chatcmpl-3f2a-bb647e8b"),
    ]


@pytest.mark.parametrize(
    ("second", "result"),
    [(sidechannel.ACK, ReleaseResult.RELEASED), (None, ReleaseResult.UNREACHABLE), (b"?", ReleaseResult.REFUSED)],
)
async def test_ascends_blocks_are_free_only_when_all_ranks_have_said_so(
    second: bytes | None, result: ReleaseResult
) -> None:
    ways = Ways(reply=lambda address: second if address.endswith("30001") else sidechannel.ACK)
    ticket = _through_a_ticket("mooncake-ascend", _handoff(ASCEND, "mooncake-ascend"))

    assert await _release("mooncake-ascend", ticket, ways) is result


async def test_hosts_outside_the_fleet_are_not_contacted() -> None:
    ways = Ways(hosts=("10.0.0.7",))
    entries = {"0": {"host": "10.0.0.7", "handshake_port": 30000}, "1": {"host": "6.6.6.6", "handshake_port": 30001}}
    handoff = _handoff({**ASCEND, "remote_multi_nodes_meta_mapping": entries}, "mooncake-ascend")

    result = await _release("mooncake-ascend", _through_a_ticket("mooncake-ascend", handoff), ways)

    assert result is ReleaseResult.REFUSED
    assert ways.told == []


async def test_the_timer_releases_nothing() -> None:
    ways = Ways([(404, UNKNOWN_MODEL)])

    assert await _release("timer", _ticket("timer", {}), ways) is ReleaseResult.REFUSED
    assert (ways.asked, ways.told) == ([], [])


def test_a_connector_is_complete() -> None:
    for name in NAMES:
        found: Connector = connector(name)
        params = found.prefill_edits()["kv_transfer_params"]
        assert params is not None
        assert json.loads(params)["do_remote_decode"] is True
