from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from extproc.connectors.registry import _CONNECTORS
from extproc.destinations import Destination, choose, moved, subset_hint
from extproc.errors import RequestError
from extproc.fleet.fleet import Fleet
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.picking import ANYTHING, Need
from tests.support.fleet import fleet_of, named, spec, specs


def at(number: int) -> str:
    """The endpoint of ``decode-<number>``."""
    return f"10.0.2.{number}:8000"


def chosen(fleet: Fleet, need: Need = ANYTHING, count: int = 3, *, paired: bool = True) -> Destination:
    """Picks and lets go again."""
    destination = choose(fleet, need, count, paired=paired)
    destination.reservation.release()
    return destination


def listed(destination: Destination) -> list[str]:
    """Its endpoints, without those that are named again."""
    return list(dict.fromkeys(destination.endpoints.split(",")))


def refused(fleet: Fleet, need: Need = ANYTHING, *, paired: bool = True) -> RequestError:
    with pytest.raises(RequestError) as caught:
        choose(fleet, need, 3, paired=paired)
    return caught.value


# ---- the choice and its alternatives ----


def test_the_best_first_then_alternatives_by_load() -> None:
    fleet = fleet_of(*specs("prefill", 1), *specs("decode", 4), policies="least_loaded")
    for number, load in ((1, 3), (2, 1), (3, 2), (4, 0)):
        for _ in range(load):
            fleet.reserve_engine(named(fleet, f"decode-{number}"))
    assert chosen(fleet).endpoints == f"{at(4)},{at(2)},{at(3)}"
    assert chosen(fleet, count=1).endpoints == at(4)
    assert chosen(fleet, count=16).endpoints == f"{at(4)},{at(2)},{at(3)},{at(1)}"


def test_choosing_reserves_in_the_same_step() -> None:
    fleet = fleet_of(*specs("prefill", 1), *specs("decode", 3), policies="least_loaded")
    held = [choose(fleet, Need(tokens=8), 3, paired=True) for _ in range(9)]
    assert [(engine.inflight, engine.reserved_tokens) for engine in fleet.engines("decode")] == [(3, 24)] * 3
    for destination in held:
        destination.reservation.release()
    assert [(engine.inflight, engine.reserved_tokens) for engine in fleet.engines("decode")] == [(0, 0)] * 3


def test_O16_ipv6_decoders_are_named_in_brackets() -> None:
    fleet = fleet_of(spec("decode", 1, url="http://[2001:DB8:0::1]:8000"), spec("decode", 2))
    assert set(chosen(fleet, paired=False).endpoints.split(",")) == {"[2001:db8::1]:8000", at(2)}


# ---- who can hand over to whom ----


def test_a_decoder_that_no_prefiller_can_hand_over_to_is_second_choice() -> None:
    fleet = fleet_of(spec("prefill", 1, group="b"), spec("decode", 1, group="a"), spec("decode", 2, group="b"))
    for _ in range(4):
        destination = chosen(fleet)
        assert (listed(destination), destination.pairing) == ([at(2)], ("b", "nixl"))
    named(fleet, "decode-2").health.probed("ConnectError", 1)
    assert listed(chosen(fleet)) == [at(1)]


def test_a_busy_decoder_of_the_pair_is_not_replaced_by_one_that_gets_no_kv() -> None:
    fleet = fleet_of(
        spec("prefill", 1, group="b"), spec("decode", 1, group="a"), spec("decode", 2, group="b", max_inflight=1)
    )
    choose(fleet, ANYTHING, 3, paired=True)
    error = refused(fleet)
    assert (error.status, error.code, error.headers) == (429, "decoders_busy", {"retry-after": "1"})
    assert listed(chosen(fleet, paired=False)) == [at(1)]  # without a hand-over any will do


def test_alternatives_never_cross_groups_or_connectors() -> None:
    """All pairings of two groups and two connectors at once."""
    groups, connectors = ("a", "b"), ("nixl", "mooncake-ascend")
    prefillers, decoders = [], []
    for number, (group, name, _) in enumerate(itertools.product(groups, connectors, range(2)), 1):
        prefillers.append(spec("prefill", number, group=group, connector_name=name))
        decoders.append(spec("decode", number, group=group, connector_name=name))
    fleet = fleet_of(*prefillers, *decoders)
    seen = set()
    for _ in range(16):
        destination = chosen(fleet)
        engines = [fleet.decoder_at(endpoint) for endpoint in listed(destination)]
        assert [engine.pairing for engine in engines if engine] == [destination.pairing] * 2
        seen.add(destination.pairing)
        prefiller = fleet.reserve("prefill", pairings=[destination.pairing])
        assert prefiller is not None
        assert prefiller.engine.pairing == destination.pairing
    assert seen == set(itertools.product(groups, connectors))


def test_without_a_hand_over_the_same_pairing_comes_first_and_others_after_it() -> None:
    fleet = fleet_of(
        *(spec("decode", number, group="ab"[number % 2]) for number in range(1, 5)), policies="least_loaded"
    )
    for number, load in ((1, 0), (2, 1), (3, 3), (4, 2)):
        for _ in range(load):
            fleet.reserve_engine(named(fleet, f"decode-{number}"))
    assert chosen(fleet, count=4, paired=False).endpoints == f"{at(1)},{at(3)},{at(2)},{at(4)}"


def test_without_any_usable_prefiller_a_decoder_is_chosen_all_the_same() -> None:
    """What becomes of the request is the failure policy's to say."""
    fleet = fleet_of(spec("prefill", 1, drain=True), *specs("decode", 2))
    assert chosen(fleet).endpoints in (f"{at(1)},{at(2)}", f"{at(2)},{at(1)}")


def test_in_a_mixed_fleet_the_list_is_as_long_as_envoys_retries() -> None:
    """Envoy tries any host of its cluster once the list is used up."""
    fleet = fleet_of(spec("prefill", 1), *specs("decode", 2))
    assert sorted(chosen(fleet, count=4).endpoints.split(",")) == [at(1), at(2)]  # any other will do
    fleet.update("file", [spec("decode", 3, group="other")])
    for paired in (True, False):
        endpoints = chosen(fleet, count=4, paired=paired).endpoints.split(",")
        assert len(endpoints) == 4
    endpoints = chosen(fleet, count=4).endpoints.split(",")
    assert endpoints[:2] == endpoints[2:]
    assert set(endpoints) == {at(1), at(2)}


def test_a_wish_is_granted_where_it_can_be() -> None:
    fleet = fleet_of(*specs("decode", 3, max_inflight=1), policies="least_loaded")
    wanted = named(fleet, "decode-3")
    for _ in range(3):
        destination = choose(fleet, ANYTHING, 2, paired=False, first=wanted)
        assert destination.reservation.engine is wanted
        assert listed(destination)[0] == at(3)
        assert len(listed(destination)) == 2
        destination.reservation.release()
    held = choose(fleet, ANYTHING, 2, paired=False, first=wanted)
    assert choose(fleet, ANYTHING, 2, paired=False, first=wanted).reservation.engine is not wanted
    held.reservation.release()
    fleet.drain("decode-3", True)
    assert choose(fleet, ANYTHING, 2, paired=False, first=wanted).reservation.engine is not wanted


def test_a_reservation_moves_to_the_decoder_that_really_serves() -> None:
    fleet = fleet_of(*specs("decode", 2), policies="least_loaded")
    held = choose(fleet, Need(tokens=9), 2, paired=False).reservation
    assert moved(fleet, held, held.engine.endpoint or "") is held
    assert moved(fleet, held, "192.0.2.1:8000") is held
    (other,) = [engine for engine in fleet.engines("decode") if engine is not held.engine]
    now = moved(fleet, held, other.endpoint or "")
    assert (held.engine.inflight, held.engine.reserved_tokens) == (0, 0)
    assert (other.inflight, other.reserved_tokens) == (1, 9)
    now.release()
    held.release()
    assert [(engine.inflight, engine.reserved_tokens) for engine in fleet.engines("decode")] == [(0, 0)] * 2


# ---- models ----


def test_a_decoder_that_serves_the_model_with_a_prefiller_that_does() -> None:
    fleet = fleet_of(
        spec("prefill", 1, models=frozenset({"m"}), group="a"),
        spec("prefill", 2, models=frozenset({"other"}), group="b"),
        spec("decode", 1, models=frozenset({"m", "other"}), group="b"),
        spec("decode", 2, models=frozenset({"m", "other"}), group="a"),
        spec("decode", 3, models=frozenset({"x"}), group="a"),
    )
    assert listed(chosen(fleet, Need(model="m"))) == [at(2)]
    assert listed(chosen(fleet, Need(model="other"))) == [at(1)]
    assert listed(chosen(fleet, Need(model="x"), paired=False)) == [at(3)]


def test_a_model_that_nobody_is_known_to_serve_is_an_engines_to_judge() -> None:
    fleet = fleet_of(spec("decode", 1, models=frozenset({"m"})))
    assert chosen(fleet, Need(model="nonsense"), paired=False).endpoints == at(1)


def test_a_model_whose_decoders_are_all_away_is_not_sent_to_others() -> None:
    fleet = fleet_of(spec("decode", 1, models=frozenset({"m"}), drain=True), spec("decode", 2, models=frozenset({"x"})))
    assert refused(fleet, Need(model="m")).status == 503


# ---- nothing to choose ----


def test_no_decoder_ready() -> None:
    error = refused(fleet_of(spec("prefill", 1), spec("decode", 1, drain=True)))
    assert (error.status, error.code, error.headers) == (503, "no_decoder", {"retry-after": "1"})


@pytest.mark.parametrize("paired", [True, False])
def test_all_decoders_at_their_cap(paired: bool) -> None:
    fleet = fleet_of(spec("prefill", 1), *specs("decode", 2, max_inflight=2))
    held = [choose(fleet, ANYTHING, 3, paired=paired) for _ in range(4)]
    error = refused(fleet, paired=paired)
    assert (error.status, error.code, error.type) == (429, "decoders_busy", "rate_limit_error")
    held[0].reservation.release()
    assert chosen(fleet, paired=paired).reservation.engine is held[0].reservation.engine
    assert held[3].endpoints == f"10.0.2.{held[3].reservation.engine.name[-1]}:8000"  # full ones are no alternatives


# ---- data-parallel ranks ----


def test_ranks_take_turns_and_fit_every_alternative() -> None:
    fleet = fleet_of(spec("decode", 1, data_parallel_size=4))
    assert [chosen(fleet, paired=False).rank for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    fleet = fleet_of(
        spec("decode", 1, data_parallel_size=4), spec("decode", 2, data_parallel_size=2), policies="round_robin"
    )
    assert [chosen(fleet, paired=False).rank for _ in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_no_rank_where_any_alternative_has_one_only() -> None:
    fleet = fleet_of(spec("decode", 1, data_parallel_size=4), spec("decode", 2))
    assert {chosen(fleet, paired=False).rank for _ in range(8)} == {None}


# ---- the gateway's subset ----


def message(value: Any, key: str = "x-gateway-destination-endpoint-subset") -> ext_proc.ProcessingRequest:
    request = ext_proc.ProcessingRequest()
    request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({key: value})
    return request


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([at(1), at(2)], {at(1), at(2)}),
        (f"{at(1)}, {at(2)},", {at(1), at(2)}),
        (["[2001:db8::1]:8000"], {"[2001:db8::1]:8000"}),
        ([], set()),
        ("", set()),
        ([7, None, at(3)], {at(3)}),
    ],
)
def test_the_subset_hint_as_a_list_or_as_text(given: Any, expected: set[str]) -> None:
    assert subset_hint(message(given)) == frozenset(expected)


def test_no_subset_hint() -> None:
    assert subset_hint(ext_proc.ProcessingRequest()) is None
    assert subset_hint(message([at(1)], key="something-else")) is None


def test_only_decoders_of_the_subset_are_named() -> None:
    fleet = fleet_of(*specs("prefill", 1), *specs("decode", 4))
    need = Need(subset=frozenset({at(2), at(4), "192.0.2.1:8000"}))
    assert {frozenset(chosen(fleet, need).endpoints.split(",")) for _ in range(8)} == {frozenset({at(2), at(4)})}
    assert refused(fleet, Need(subset=frozenset())).status == 503
    assert refused(fleet, Need(subset=frozenset({"192.0.2.1:8000"}))).status == 503


def test_the_subset_is_about_decoders_alone() -> None:
    fleet = fleet_of(spec("prefill", 1, group="b"), spec("decode", 1, group="a"), spec("decode", 2, group="b"))
    assert listed(chosen(fleet, Need(subset=frozenset({at(1), at(2)})))) == [at(2)]


# ---- whatever the fleet ----


def test_every_choice_in_a_random_fleet_keeps_the_rules() -> None:
    chance = random.Random(6)
    names = list(_CONNECTORS)

    def any_spec(role: Any, number: int) -> Any:
        return spec(
            role,
            number,
            group=chance.choice("ab"),
            connector_name=chance.choice(names),
            models=chance.choice([None, frozenset("m"), frozenset("mn")]),
            drain=chance.random() < 0.5,
            max_inflight=chance.choice([None, 1, 2]),
            data_parallel_size=chance.choice([1, 2, 4]),
        )

    outcomes: Counter[str] = Counter()
    for _ in range(300):
        fleet = fleet_of(
            *(any_spec("prefill", number) for number in range(1, 5)),
            *(any_spec("decode", number) for number in range(1, 5)),
            policies=chance.choice(["round_robin", "least_loaded", "power_of_two", "prefix_affinity"]),
        )
        need = Need(model=chance.choice([None, "m", "n"]), tokens=5, affinity=chance.choice([None, b"x" * 16]))
        for _ in range(6):
            try:
                destination = choose(fleet, need, 3, paired=True)
            except RequestError as error:
                outcomes[error.code] += 1
                continue
            outcomes["chosen"] += 1
            engines = [fleet.decoder_at(endpoint) for endpoint in listed(destination)]
            assert 1 <= len(engines) <= 3
            for engine in engines:
                assert engine is not None
                assert engine.pairing == destination.pairing
                assert not engine.draining
                assert engine.serves(need.model) or not any(e.serves(need.model) for e in fleet.engines("decode"))
                if destination.rank is not None:
                    assert destination.rank < engine.spec.data_parallel_size
            reachable = {engine.pairing for engine in fleet.usable("prefill", need)}
            reachable &= {engine.pairing for engine in fleet.usable("decode", need)}
            assert destination.pairing in reachable or not reachable
    assert set(outcomes) == {"chosen", "decoders_busy", "no_decoder"}
    assert min(outcomes.values()) > 20
