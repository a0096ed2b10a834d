"""Picking: the order in which engines are tried, as a function of their load and of the request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc import picking
from extproc.fleet.engines import Engine, Report, Reservation, Role
from extproc.picking import Need, policy
from tests.support.fleet import Clock, fleet_of, names, spec, specs

# A slow machine is no failure.
_STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = ("round_robin", "least_inflight", "least_loaded", "power_of_two", "prefix_affinity")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def _engines(count: int, role: Any = "decode") -> list[Engine]:
    return [Engine(spec(role, number)) for number in range(1, count + 1)]


def _loaded(counts: list[int], role: Any = "decode") -> list[Engine]:
    engines = _engines(len(counts), role)
    for engine, count in zip(engines, counts, strict=True):
        engine.inflight = count
    return engines


def _numbers(engines: list[Engine]) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in names(engines)]


# ── what holds for every policy ──────────────────────────────────────────────────────────────────────────────────────


@settings(_STEADY, max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 5), min_size=1, max_size=8),
    st.integers(0, 10**6),
    st.none() | st.binary(max_size=80),
)
def test_every_candidate_is_ranked_once_and_nothing_is_changed(
    name: str, counts: list[int], turn: int, affinity: bytes | None
) -> None:
    candidates = _loaded(counts)
    before = list(candidates)

    ranked = policy(name)(candidates, turn, Need(affinity=affinity))

    assert sorted(_numbers(ranked)) == list(range(1, len(counts) + 1))
    assert candidates == before
    assert [engine.inflight for engine in candidates] == counts


@pytest.mark.parametrize("name", NAMES)
def test_one_engine_is_the_best(name: str) -> None:
    [engine] = _loaded([7])

    assert policy(name)([engine], 3, Need(affinity=b"a")) == [engine]


def test_an_unknown_policy() -> None:
    with pytest.raises(KeyError):
        policy("random")


# ── in turn ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_round_robin_gives_each_its_turn_in_the_fleets_order() -> None:
    engines = _loaded([9, 0, 0])

    assert [_numbers(picking.round_robin(engines, turn)) for turn in range(4)] == [
        [1, 2, 3],
        [2, 3, 1],
        [3, 1, 2],
        [1, 2, 3],
    ]


def test_least_inflight_is_by_this_processs_requests_and_equals_take_turns() -> None:
    assert _numbers(picking.least_inflight(_loaded([2, 0, 1]), 0)) == [2, 3, 1]
    assert [_numbers(picking.least_inflight(_loaded([1, 1, 0, 1]), turn)) for turn in range(4)] == [
        [3, 1, 2, 4],
        [3, 2, 4, 1],
        [3, 4, 1, 2],
        [3, 4, 1, 2],
    ]


# ── by load ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _report(clock: Clock, *, age: float = 0.0, foreign: int = 0, kv_usage: float = 0.0) -> Report:
    return Report(foreign=foreign, kv_usage=kv_usage, at=clock.now - age)


def test_decoders_are_weighed_by_requests_those_of_others_included(clock: Clock) -> None:
    engines = _loaded([3, 1, 2])
    engines[1].report = _report(clock, foreign=4)

    assert _numbers(picking.least_loaded(engines, 0)) == [3, 1, 2]


def test_among_equals_the_decoder_with_more_room_comes_first(clock: Clock) -> None:
    engines = _loaded([1, 1, 1])
    for engine, usage in zip(engines, (0.6, 0.2, 0.4), strict=True):
        engine.report = _report(clock, kv_usage=usage)

    assert _numbers(picking.least_loaded(engines, 0)) == [2, 3, 1]
    assert _numbers(picking.least_loaded(engines, 2)) == [2, 3, 1]


def test_prefillers_are_weighed_by_the_tokens_that_wait_for_them(clock: Clock) -> None:
    engines = _engines(3, "prefill")
    held = [Reservation(engines[0], tokens=100), Reservation(engines[0], tokens=100)]
    held.append(Reservation(engines[1], tokens=5000))
    engines[2].report = _report(clock, foreign=1)  # of unknown length

    assert _numbers(picking.least_loaded(engines, 0)) == [1, 3, 2]
    for reservation in held:
        reservation.release()
    assert _numbers(picking.least_loaded(engines, 0)) == [1, 2, 3]


def test_an_engine_whose_kv_cache_is_full_comes_last(clock: Clock) -> None:
    engines = _loaded([0, 5, 9])
    engines[0].report = _report(clock, kv_usage=0.95)

    assert _numbers(picking.least_loaded(engines, 0)) == [2, 3, 1]


def test_stale_reports_do_not_count(clock: Clock) -> None:
    engines = _loaded([0, 1])
    engines[0].report = _report(clock, foreign=50, kv_usage=1.0)
    assert _numbers(picking.least_loaded(engines, 0)) == [2, 1]

    clock.advance(picking.STALE_S)
    assert _numbers(picking.least_loaded(engines, 0)) == [2, 1]
    clock.advance(0.001)
    assert _numbers(picking.least_loaded(engines, 0)) == [1, 2]


def test_without_any_report_equals_take_turns(clock: Clock) -> None:
    assert [_numbers(picking.least_loaded(_loaded([0, 0, 0]), turn))[0] for turn in range(6)] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("name", ["least_inflight", "least_loaded", "round_robin"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_burst_is_spread_evenly_when_each_pick_is_reserved_at_once(name: str, role: str) -> None:
    engines = _engines(4, role)

    for turn in range(256):
        Reservation(policy(name)(engines, turn, Need(tokens=10))[0], tokens=10)

    assert [engine.inflight for engine in engines] == [64, 64, 64, 64]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_O23_256_requests_at_once_are_spread_evenly(name: str, role: Role) -> None:
    """Each with a prompt of its own. Every engine gets its share within a fifth, or, by prefix, about its share."""
    most = 64 * 1.2 if name != "prefix_affinity" else 64 * picking.LOAD_BOUND + 2
    least = 64 * 0.8 if name != "prefix_affinity" else 64 * 0.5
    fleet = fleet_of(*specs(role, 4), policies=name)
    needs = [Need(tokens=1000, affinity=b"prompt %d" % number) for number in range(256)]
    held = [fleet.reserve(role, need) for need in needs]
    assert all(least <= engine.inflight <= most for engine in fleet.engines(role))
    for reservation in held:
        assert reservation is not None
        reservation.release()
    assert [(engine.inflight, engine.reserved_tokens) for engine in fleet.engines(role)] == [(0, 0)] * 4


# ── two choices ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_power_of_two_takes_the_less_loaded_of_two() -> None:
    engines = _loaded([0, 1, 2, 3])
    pairs: Counter[tuple[int, int]] = Counter()

    for turn in range(600):
        ranked = _numbers(picking.power_of_two(engines, turn, salt=b"s"))
        first, second, *others = ranked
        assert first < second  # the numbers are in the order of the loads here
        assert others == sorted(others)
        pairs[first, second] += 1

    assert set(pairs) == {(a, b) for a in range(1, 5) for b in range(a + 1, 5)}
    assert min(pairs.values()) > 60  # 100 each, were chance fair to the last


def test_power_of_two_prefers_none_of_equals() -> None:
    engines = _loaded([0] * 4)

    best = Counter(_numbers(picking.power_of_two(engines, turn, salt=b"s"))[0] for turn in range(800))

    assert set(best) == {1, 2, 3, 4}
    assert min(best.values()) > 140  # 200 each, were chance fair to the last


def test_power_of_two_is_a_function_of_turn_and_salt() -> None:
    engines = _loaded([0] * 8)

    def picks(salt: bytes) -> list[int]:
        return [_numbers(picking.power_of_two(engines, turn, salt=salt))[0] for turn in range(50)]

    assert picks(b"one") == picks(b"one")
    assert picks(b"one") != picks(b"two")


def test_replicas_with_the_same_stale_view_do_not_run_to_the_same_engine(clock: Clock) -> None:
    engines = _engines(4)
    for engine, foreign in zip(engines, (0, 3, 3, 3), strict=True):
        engine.report = _report(clock, foreign=foreign)

    best = Counter(_numbers(picking.power_of_two(engines, 0, salt=b"%d" % replica))[0] for replica in range(400))

    assert set(best) == {1, 2, 3, 4}
    assert 140 < best[1] < 260  # drawn in half of all pairs


# ── by prefix ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _by_prefix(engines: list[Engine], affinity: bytes, turn: int = 0) -> list[int]:
    return _numbers(picking.prefix_affinity(engines, turn, Need(affinity=affinity)))


def test_a_prefix_belongs_to_one_engine_whatever_the_turn_and_the_order() -> None:
    engines = _engines(5)
    prefixes = [b"prefix %d" % number for number in range(200)]

    homes = {prefix: _by_prefix(engines, prefix)[0] for prefix in prefixes}

    assert all(_by_prefix(engines, prefix, turn=7)[0] == home for prefix, home in homes.items())
    assert all(_by_prefix(engines[::-1], prefix)[0] == home for prefix, home in homes.items())
    assert all(count > 15 for count in Counter(homes.values()).values())
    assert set(homes.values()) == {1, 2, 3, 4, 5}


def test_an_engine_that_leaves_moves_its_own_prefixes_only() -> None:
    engines = _engines(5)
    remaining = engines[:2] + engines[3:]

    for number in range(200):
        prefix = b"prefix %d" % number
        home, second, *_ = _by_prefix(engines, prefix)
        assert _by_prefix(remaining, prefix)[0] == (home if home != 3 else second)


def test_a_hot_prefix_spills_over_to_its_next_engine() -> None:
    engines = _engines(3)
    order = _by_prefix(engines, b"hot")
    by_number = dict(zip(_numbers(engines), engines, strict=True))
    by_number[order[0]].inflight = 4

    assert _by_prefix(engines, b"hot") == [order[1], order[2], order[0]]

    for engine in engines:
        engine.inflight = 4
    assert _by_prefix(engines, b"hot") == order


def test_no_engine_gets_much_more_than_its_share_of_a_hot_prefix() -> None:
    engines = _engines(4)

    for _ in range(400):
        Reservation(picking.prefix_affinity(engines, 0, Need(affinity=b"hot"))[0])

    counts = sorted(engine.inflight for engine in engines)
    assert sum(counts) == 400
    assert counts[-1] <= picking.LOAD_BOUND * 400 / 4 + 2
    assert counts[0] > 0


def test_the_load_of_other_replicas_counts_there_too(clock: Clock) -> None:
    engines = _engines(2)
    home = _by_prefix(engines, b"p")[0]
    engines[home - 1].report = _report(clock, foreign=20)

    assert _by_prefix(engines, b"p")[0] != home


def test_a_long_hash_is_cut_to_what_the_algorithm_takes() -> None:
    assert sorted(_by_prefix(_engines(3), b"x" * 1000)) == [1, 2, 3]


def test_without_a_prefix_the_load_decides() -> None:
    assert _numbers(picking.prefix_affinity(_loaded([2, 0, 1]), 0, Need())) == [2, 3, 1]


def test_a_need_asks_for_nothing_by_default() -> None:
    assert Need(model=None, tokens=0, affinity=None, subset=None) == picking.ANYTHING
