from __future__ import annotations

import random
from collections import Counter

import pytest

from extproc import configsections
from extproc.fleet.engines import Engine, Reservation, Spec, specs
from extproc.picking import Need
from tests.support.fleet import Clock, fleet_of, named, names, spec
from tests.support.fleet import specs as several


def load_of(*engines: Engine) -> list[tuple[int, int]]:
    return [(engine.inflight, engine.reserved_tokens) for engine in engines]


# ---- sources ----


def test_sources_replace_their_own_engines_only() -> None:
    fleet = fleet_of(spec("prefill", 1), spec("decode", 1))
    fleet.update("file", [spec("decode", 2), spec("decode", 3)])
    assert names(fleet.engines("decode")) == ["decode-1", "decode-2", "decode-3"]
    fleet.update("file", [spec("decode", 3)])
    assert names(fleet.engines()) == ["prefill-1", "decode-1", "decode-3"]
    fleet.update("test", [])
    assert names(fleet.engines()) == ["decode-3"]


def test_an_engine_that_two_sources_know_stays_until_both_forget_it() -> None:
    fleet = fleet_of(spec("decode", 1))
    engine = named(fleet, "decode-1")
    fleet.update("file", [spec("decode", 1, drain=True)])
    assert named(fleet, "decode-1") is engine
    assert engine.draining  # the later source's word counts
    fleet.update("file", [])
    assert named(fleet, "decode-1") is engine
    assert not engine.draining
    fleet.update("test", [])
    assert fleet.engines() == []


def test_one_url_may_serve_both_roles() -> None:
    url = "http://10.0.0.1:8000"
    fleet = fleet_of(spec("prefill", 1, url=url, name="both"), spec("decode", 1, url=url, name="both"))
    assert [(engine.role, engine.name) for engine in fleet.engines()] == [("prefill", "both"), ("decode", "both")]


def test_an_engine_keeps_its_load_health_and_address_when_its_description_changes() -> None:
    fleet = fleet_of(spec("decode", 1, url="http://engine:8000"), spec("decode", 2))
    engine = named(fleet, "decode-1")
    engine.address = "10.9.9.9"
    reservation = fleet.reserve_engine(engine, Need(tokens=7))
    engine.health.probed("ConnectError", 1)
    fleet.update("test", [spec("decode", 1, url="http://engine:8000", name="renamed", group="g", max_inflight=1)])
    assert fleet.engines() == [engine]
    assert (engine.name, engine.pairing, engine.full) == ("renamed", ("g", "nixl"), True)
    assert (engine.address, engine.health.probed_ok, load_of(engine)) == ("10.9.9.9", False, [(1, 7)])
    reservation.release()
    assert load_of(engine) == [(0, 0)]


def test_a_source_that_knows_the_address_now_decides_it() -> None:
    fleet = fleet_of(spec("decode", 1, url="http://engine:8000", address="10.0.0.1"))
    fleet.update("test", [spec("decode", 1, url="http://engine:8000", address="10.0.0.2")])
    assert named(fleet, "decode-1").endpoint == "10.0.0.2:8000"


def test_sources_are_awaited_until_they_have_told_their_engines() -> None:
    fleet = fleet_of(spec("decode", 1))
    fleet.expect("file")
    fleet.expect("dns")
    assert (fleet.awaited, fleet.starting) == (["dns", "file"], ["dns", "file"])
    fleet.report("dns", "look-up failed")
    assert (fleet.awaited, fleet.starting) == (["dns", "file"], ["file"])
    assert fleet.sources == [("test", 1, None), ("dns", 0, "look-up failed"), ("file", 0, None)]
    heard: list[str] = []
    fleet.on_change(lambda: heard.append("changed"))
    fleet.update("file", [])
    assert (fleet.awaited, fleet.starting, heard) == (["dns"], [], ["changed"])
    fleet.update("dns", [spec("decode", 2)])
    assert (fleet.awaited, fleet.sources[-1]) == ([], ("dns", 1, None))
    fleet.report("dns", "look-up failed")  # its engines stay
    assert (fleet.awaited, fleet.sources[-1]) == ([], ("dns", 1, "look-up failed"))


def test_listeners_hear_of_changes_and_of_nothing_else() -> None:
    fleet = fleet_of(spec("decode", 1))
    heard: list[int] = []

    def listener() -> None:
        heard.append(len(fleet.engines()))

    fleet.on_change(listener)
    fleet.update("test", [spec("decode", 1)])
    fleet.update("dns", [])
    assert heard == []
    fleet.update("dns", [spec("decode", 2)])
    fleet.update("test", [spec("decode", 1, drain=True)])
    fleet.update("dns", [])
    assert heard == [2, 2, 1]
    fleet.drain("decode-1", True)
    assert heard == [2, 2, 1, 1]
    fleet.remove_listener(listener)
    fleet.update("test", [])
    assert heard == [2, 2, 1, 1]


def test_a_prefiller_that_has_left_is_found_for_as_long_as_its_blocks_may_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    fleet = fleet_of(spec("prefill", 1), spec("prefill", 2), spec("decode", 1))
    gone = named(fleet, "prefill-1")
    fleet.update("test", [spec("prefill", 2), spec("decode", 1)])
    assert fleet.prefiller_at("10.0.1.1:8000") is gone
    assert fleet.prefiller_at("10.0.1.2:8000") is named(fleet, "prefill-2")
    assert fleet.prefiller_at("10.0.2.1:8000") is None  # a decoder
    clock.advance(599)
    assert fleet.prefiller_at("10.0.1.1:8000") is gone
    clock.advance(1)
    assert fleet.prefiller_at("10.0.1.1:8000") is None


def test_the_new_engine_at_an_old_address_is_found_first() -> None:
    fleet = fleet_of(spec("prefill", 1))
    old = named(fleet, "prefill-1")
    fleet.update("test", [])
    fleet.update("test", [spec("prefill", 1)])
    found = fleet.prefiller_at("10.0.1.1:8000")
    assert found is named(fleet, "prefill-1")
    assert found is not old


def test_engines_that_come_and_go_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fleet = fleet_of()
    for number in range(1, 200):
        fleet.update("dns", [spec("prefill", number)])
        clock.advance(60)
    assert len(fleet._retired) == 10


def test_reservations_on_an_engine_that_has_left_end_as_any_other() -> None:
    fleet = fleet_of(spec("prefill", 1))
    gone = named(fleet, "prefill-1")
    reservation = fleet.reserve("prefill", Need(tokens=100))
    assert reservation is not None
    fleet.update("test", [spec("prefill", 1, group="new")])
    fleet.update("test", [])
    fleet.update("test", [spec("prefill", 1)])
    reservation.release()
    assert load_of(gone, named(fleet, "prefill-1")) == [(0, 0), (0, 0)]


# ---- drain ----


@pytest.mark.parametrize("by", ["file", "operator"])
def test_a_draining_engine_gets_no_new_work_and_keeps_what_runs(by: str) -> None:
    fleet = fleet_of(spec("decode", 1), spec("decode", 2))
    running = fleet.reserve_engine(named(fleet, "decode-1"))
    if by == "file":
        fleet.update("test", [spec("decode", 1, drain=True), spec("decode", 2)])
    else:
        assert fleet.drain("decode-1", True)
    assert {fleet.reserve("decode").engine.name for _ in range(10)} == {"decode-2"}  # type: ignore[union-attr]
    assert named(fleet, "decode-1").state(0) == "draining"
    assert named(fleet, "decode-1").inflight == 1
    running.release()
    assert named(fleet, "decode-1").inflight == 0
    if by == "file":
        fleet.update("test", [spec("decode", 1), spec("decode", 2)])
    else:
        assert fleet.drain("decode-1", False)
    assert names(fleet.usable("decode")) == ["decode-1", "decode-2"]


def test_what_an_operator_drained_stays_drained_when_the_file_changes() -> None:
    fleet = fleet_of(spec("decode", 1), spec("decode", 2))
    fleet.drain("decode-1", True)
    fleet.update("test", [spec("decode", 1, max_inflight=5), spec("decode", 2)])
    assert names(fleet.usable("decode")) == ["decode-2"]


def test_draining_an_unknown_name_says_so() -> None:
    assert not fleet_of(spec("decode", 1)).drain("decode-9", True)


# ---- who can take what ----


def test_an_engine_without_an_address_is_not_picked() -> None:
    fleet = fleet_of(spec("decode", 1, url="http://not-resolved-yet:8000"), spec("decode", 2))
    assert names(fleet.usable("decode")) == ["decode-2"]
    assert named(fleet, "decode-1").state(0) == "unresolved"


def test_models_are_those_configured_else_those_reported_else_any() -> None:
    fleet = fleet_of(spec("decode", 1, models=frozenset({"a"})), spec("decode", 2), spec("decode", 3))
    named(fleet, "decode-1").known_models = frozenset({"b"})  # the configuration's word counts
    named(fleet, "decode-2").known_models = frozenset({"b", "c"})
    served = {model: names(fleet.usable("decode", Need(model=model))) for model in ("a", "b", None)}
    assert served == {
        "a": ["decode-1", "decode-3"],
        "b": ["decode-2", "decode-3"],
        None: ["decode-1", "decode-2", "decode-3"],
    }


def test_a_gateways_subset_limits_the_choice() -> None:
    fleet = fleet_of(*several("decode", 3))
    need = Need(subset=frozenset({"10.0.2.3:8000", "10.0.2.9:8000"}))
    assert names(fleet.usable("decode", need)) == ["decode-3"]


def test_full_engines_are_usable_but_not_picked() -> None:
    fleet = fleet_of(*several("prefill", 2, max_inflight=2))
    held = [fleet.reserve("prefill") for _ in range(4)]
    assert all(held)
    assert fleet.reserve("prefill") is None
    assert len(fleet.usable("prefill")) == 2
    held[0].release()  # type: ignore[union-attr]
    again = fleet.reserve("prefill")
    assert again is not None
    assert again.engine is held[0].engine  # type: ignore[union-attr]


def test_handing_over_stays_within_a_pairing() -> None:
    fleet = fleet_of(
        spec("prefill", 1, group="a"),
        spec("prefill", 2, group="a", connector_name="mooncake-ascend"),
        spec("prefill", 3, group="b"),
    )
    assert names(fleet.usable("prefill", pairings={("a", "nixl")})) == ["prefill-1"]
    assert names(fleet.usable("prefill", pairings={("a", "mooncake-ascend"), ("b", "nixl")})) == [
        "prefill-2",
        "prefill-3",
    ]
    assert fleet.usable("prefill", pairings=()) == []


# ---- reservations ----


def test_O22_a_reservation_is_given_back_exactly_once() -> None:
    fleet = fleet_of(spec("prefill", 1))
    engine = named(fleet, "prefill-1")
    first, second = (fleet.reserve("prefill", Need(tokens=tokens)) for tokens in (100, 11))
    assert first is not None
    assert second is not None
    assert load_of(engine) == [(2, 111)]
    released: list[Engine] = []
    fleet.on_release(lambda: released.append(engine))
    for _ in range(5):
        first.release()
    assert load_of(engine) == [(1, 11)]
    assert len(released) == 1
    second.release()
    assert load_of(engine) == [(0, 0)]


def test_O22_counters_return_to_exactly_zero_whatever_happens_in_between() -> None:
    """A thousand steps by chance: picks, releases (also repeated ones), failures, engines that come, drain and go."""
    chance = random.Random(22)
    fleet = fleet_of(*several("prefill", 4), policies="least_loaded")
    held: list[Reservation] = []
    engines: set[Engine] = set(fleet.engines())
    for _ in range(1000):
        step = chance.random()
        if step < 0.5:
            if reservation := fleet.reserve("prefill", Need(tokens=chance.randrange(5000))):
                held.append(reservation)
        elif step < 0.8 and held:
            chance.choice(held).release()
        elif step < 0.9:
            fleet.failed(chance.choice(fleet.engines() or [Engine(spec("prefill", 9))]), "connect")
        else:
            present = chance.sample(range(1, 7), chance.randrange(1, 5))
            fleet.update("test", [spec("prefill", number, drain=chance.random() < 0.2) for number in present])
            engines |= set(fleet.engines())
        assert all(engine.inflight >= 0 and engine.reserved_tokens >= 0 for engine in engines)
    for reservation in held:
        reservation.release()
    assert Counter(load_of(*engines)) == {(0, 0): len(engines)}
    assert sum(engine.picked for engine in engines) == len(held)


def test_data_parallel_ranks_take_turns_even_in_a_burst() -> None:
    fleet = fleet_of(spec("prefill", 1, data_parallel_size=4))
    held = [fleet.reserve("prefill") for _ in range(8)]
    assert [reservation.rank() for reservation in held if reservation] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [reservation.rank(2) for reservation in held if reservation] == [0, 1, 0, 1, 0, 1, 0, 1]


def test_an_engine_with_one_rank_has_none_to_name() -> None:
    reservation = fleet_of(spec("prefill", 1)).reserve("prefill")
    assert reservation is not None
    assert (reservation.rank(), reservation.rank(1)) == (None, None)


# ---- what an engine is ----


@pytest.mark.parametrize(
    ("url", "host", "port", "endpoint", "tls"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1", 8000, "10.0.0.1:8000", False),
        ("http://10.0.0.1", "10.0.0.1", 80, "10.0.0.1:80", False),
        ("https://10.0.0.1", "10.0.0.1", 443, "10.0.0.1:443", True),
        ("http://[2001:db8::1]:8000", "2001:db8::1", 8000, "[2001:db8::1]:8000", False),
        # Envoy compares hosts as text, in the canonical spelling.
        ("http://[2001:DB8:0:0::0001]:8000", "2001:db8:0:0::0001", 8000, "[2001:db8::1]:8000", False),
        ("http://prefill-0.pods:8000", "prefill-0.pods", 8000, None, False),
    ],
)
def test_O16_addresses(url: str, host: str, port: int, endpoint: str | None, tls: bool) -> None:
    engine = Engine(spec("prefill", 1, url=url))
    assert (engine.host, engine.port, engine.endpoint, engine.tls) == (host, port, endpoint, tls)


def test_O16_an_ipv6_engine_is_found_by_the_address_that_envoy_logs() -> None:
    fleet = fleet_of(
        spec("prefill", 1, url="http://[2001:DB8:0::7]:8000"), spec("decode", 1, address="2001:db8:0:0::8")
    )
    assert fleet.prefiller_at("[2001:db8::7]:8000") is named(fleet, "prefill-1")
    assert fleet.decoder_at("[2001:db8::8]:8000") is named(fleet, "decode-1")


def test_the_configurations_defaults_are_filled_in() -> None:
    fleet = configsections.Fleet(
        prefill=[
            {"url": "http://p1:8000"},
            {
                "url": "http://[2001:db8::1]:9000",
                "name": "own",
                "connector": "mooncake-ascend",
                "lease_s": 5,
                "api_key": "own-key",
                "abort_port": 5557,
                "models": ["m"],
                "group": "g",
                "data_parallel_size": 2,
                "max_inflight": 3,
                "drain": True,
                "side_channel_hosts": ["10.0.0.2"],
            },
        ],
        decode=[{"url": "http://d1:8000"}],
        connector="timer",
        lease_s=20,
        api_key="fleet-key",
        max_inflight={"prefill": 8},
    )
    default, own, decoder = specs(fleet, fleet)
    assert (default.role, default.name, default.connector.name) == ("prefill", "p1:8000", "timer")
    assert (default.lease_s, default.api_key, default.max_inflight) == (20, "fleet-key", 8)
    assert (default.models, default.group, default.data_parallel_size, default.drain) == (None, "", 1, False)
    assert own == Spec(
        role="prefill",
        url="http://[2001:db8::1]:9000",
        name="own",
        connector=own.connector,
        lease_s=5,
        api_key="own-key",
        abort_port=5557,
        side_channel_hosts=("10.0.0.2",),
        models=frozenset({"m"}),
        group="g",
        data_parallel_size=2,
        max_inflight=3,
        drain=True,
    )
    assert own.connector.name == "mooncake-ascend"
    assert (decoder.role, decoder.max_inflight, decoder.api_key) == ("decode", None, "fleet-key")
    assert "own-key" not in repr(own)
