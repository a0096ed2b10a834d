from __future__ import annotations

import pytest

from extproc.configsections import Outlier
from extproc.fleet.fleet import Fleet
from extproc.fleet.health import Health
from tests.support.fleet import Clock, fleet_of, named, names, spec, specs

SETTINGS = Outlier(consecutive=3, base_s=1.0, max_s=30.0)


def fail(health: Health, now: float, times: int = 3) -> list[bool]:
    return [health.failed("connect", SETTINGS, now) for _ in range(times)]


# ---- probes ----


def test_an_engine_is_of_unknown_health_until_its_first_probe() -> None:
    assert Health().probed_ok is None


def test_so_many_failed_probes_in_a_row_make_an_engine_unhealthy_and_one_good_one_healthy() -> None:
    health = Health()
    assert [health.probed(problem, 2) for problem in ("", "", "ConnectError", "", "ConnectError")] == [
        *(True, False),  # None -> True
        *(False, False, False),  # never two in a row
    ]
    assert health.probed_ok is True
    assert health.probed("health 503", 2)
    assert (health.probed_ok, health.reason) == (False, "health 503")
    assert not health.probed("ReadTimeout", 2)
    assert health.probed("", 2)
    assert health.probed_ok is True


def test_an_engine_that_never_answered_becomes_unhealthy_after_as_many_probes() -> None:
    health = Health()
    assert [health.probed("ConnectError", 3) for _ in range(3)] == [False, False, True]
    assert health.probed_ok is False


def test_an_engine_that_was_restarted_starts_with_a_clean_record() -> None:
    health = Health()
    health.probed("", 1)
    fail(health, 0.0)
    fail(health, 2.0)
    health.probed("ConnectError", 1)
    health.probed("", 1)
    assert not health.ejected(2.1)
    fail(health, 3.0)
    assert health.ejected_until == 4.0  # the first ejection's time again


def test_a_good_probe_does_not_undo_an_ejection() -> None:
    """An engine may answer /health and fail every request."""
    health = Health()
    health.probed("", 2)
    fail(health, 0.0)
    health.probed("", 2)
    assert health.ejected(0.5)


# ---- requests ----


def test_failures_in_a_row_eject() -> None:
    health = Health()
    assert fail(health, 10.0) == [False, False, True]
    assert health.ejected_until == 11.0
    assert (health.ejected(10.99), health.ejected(11.0)) == (True, False)


def test_a_success_in_between_starts_the_count_anew() -> None:
    health = Health()
    for _ in range(5):
        assert fail(health, 10.0, times=2) == [False, False]
        assert not health.succeeded()
    assert not health.ejected(10.0)


def test_the_time_doubles_up_to_its_bound() -> None:
    health, now, times = Health(), 0.0, []
    for _ in range(8):
        while not health.failed("status_5xx", SETTINGS, now):
            pass
        times.append(health.ejected_until - now)
        now = health.ejected_until
    assert times == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_an_engine_that_fails_for_days_still_has_a_time() -> None:
    """2 ** 1024 is no float any more."""
    health, now = Health(), 0.0
    for _ in range(1100):
        while not health.failed("status_5xx", SETTINGS, now):
            pass
        assert health.ejected_until - now <= 30.0
        now = health.ejected_until


def test_requests_that_were_under_way_do_not_prolong_the_ejection() -> None:
    """Twenty requests hang at once and time out together: that is one ejection."""
    health = Health()
    assert fail(health, 5.0, times=20) == [False, False, True] + [False] * 17
    assert health.ejected_until == 6.0


def test_one_request_on_trial_decides_for_the_engine() -> None:
    health, first, second = Health(), object(), object()
    fail(health, 0.0)
    health.began(first, 1.0)
    assert health.ejected(1.0)  # everybody else goes elsewhere
    health.began(second, 1.0)  # for want of another engine
    health.ended(second)
    assert health.ejected(1.5)
    assert health.succeeded()
    assert not health.ejected(1.5)
    fail(health, 2.0)
    assert health.ejected_until == 3.0


def test_a_failed_trial_ejects_at_once_and_for_twice_as_long() -> None:
    health, trial = Health(), object()
    fail(health, 0.0)
    health.began(trial, 1.0)
    assert health.failed("timeout", SETTINGS, 1.5)
    health.ended(trial)
    assert health.ejected_until == 3.5
    assert health.reason == "timeout"


def test_a_trial_without_a_verdict_makes_room_for_the_next() -> None:
    health, first, second = Health(), object(), object()
    fail(health, 0.0)
    health.began(first, 1.0)
    health.ended(first)
    assert not health.ejected(1.0)
    health.began(second, 1.0)
    health.ended(first)  # told twice
    assert health.ejected(1.0)


def test_a_trial_that_takes_long_makes_room_for_the_next() -> None:
    """A decoder is judged at the end of a stream, which may take minutes."""
    health, long, next_one = Health(), object(), object()
    fail(health, 0.0)
    health.began(long, 1.0)
    assert health.ejected(30.9)
    assert not health.ejected(31.0)
    health.began(next_one, 31.0)
    assert health.ejected(31.0)
    health.ended(long)
    assert health.ejected(31.0)
    health.ended(next_one)
    assert not health.ejected(31.0)


def test_a_request_before_the_time_is_up_is_no_trial() -> None:
    health, early = Health(), object()
    fail(health, 0.0)
    health.began(early, 0.5)
    assert not health.ejected(1.0)


# ---- in the fleet ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def eject(fleet: Fleet, *listed: str) -> None:
    for name in listed:
        for _ in range(3):
            fleet.failed(named(fleet, name), "connect")


def test_ejected_engines_get_no_work_until_their_time_is_up(clock: Clock) -> None:
    fleet = fleet_of(*specs("prefill", 3))
    eject(fleet, "prefill-2")
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-3"]
    clock.advance(1.0)
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2", "prefill-3"]


def test_while_one_request_is_on_trial_the_others_go_elsewhere(clock: Clock) -> None:
    fleet = fleet_of(*specs("prefill", 2))
    eject(fleet, "prefill-2")
    clock.advance(1.0)
    trial = fleet.reserve_engine(named(fleet, "prefill-2"))
    assert names(fleet.usable("prefill")) == ["prefill-1"]
    trial.undecided()
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2"]
    again = fleet.reserve_engine(named(fleet, "prefill-2"))
    assert names(fleet.usable("prefill")) == ["prefill-1"]
    trial.release()
    assert names(fleet.usable("prefill")) == ["prefill-1"]
    again.release()
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2"]


def test_the_last_engine_is_never_ejected_by_failed_requests_alone(clock: Clock) -> None:
    fleet = fleet_of(*specs("prefill", 2))
    eject(fleet, "prefill-1", "prefill-2")
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2"]


def test_the_last_engine_of_a_pairing_is_not_ejected_either(clock: Clock) -> None:
    fleet = fleet_of(spec("prefill", 1, group="a"), spec("prefill", 2, group="b"))
    eject(fleet, "prefill-1")
    assert names(fleet.usable("prefill")) == ["prefill-2"]
    assert names(fleet.usable("prefill", pairings=[("a", "nixl")])) == ["prefill-1"]


def test_an_ejected_engine_is_tried_when_all_others_have_been(clock: Clock) -> None:
    fleet = fleet_of(*specs("prefill", 2))
    eject(fleet, "prefill-2")
    tried = named(fleet, "prefill-1")
    assert names(fleet.usable("prefill", exclude=[tried])) == ["prefill-2"]


def test_an_engine_that_probes_find_dead_is_not_used_even_if_it_is_the_last(clock: Clock) -> None:
    fleet = fleet_of(*specs("decode", 1))
    named(fleet, "decode-1").health.probed("ConnectError", 1)
    assert fleet.usable("decode") == []
    assert not fleet.ready("decode")


def test_a_new_engine_gets_work_once_a_probe_has_found_it_well() -> None:
    """An engine may be listed before it listens."""
    fleet = fleet_of(*specs("prefill", 2))
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2"]  # nobody is known yet
    named(fleet, "prefill-1").health.probed("", 2)
    assert names(fleet.usable("prefill")) == ["prefill-1"]
    named(fleet, "prefill-2").health.probed("", 2)
    assert names(fleet.usable("prefill")) == ["prefill-1", "prefill-2"]


def test_an_engine_of_unknown_health_stands_in_for_one_that_is_ejected(clock: Clock) -> None:
    fleet = fleet_of(*specs("prefill", 2))
    named(fleet, "prefill-1").health.probed("", 2)
    eject(fleet, "prefill-1")
    assert names(fleet.usable("prefill")) == ["prefill-2"]


def test_how_requests_ended_judges_the_decoder_at_that_address(clock: Clock) -> None:
    fleet = fleet_of(spec("decode", 1), spec("decode", 2, url="http://[2001:db8::2]:8000"))
    for _ in range(3):
        fleet.judge_decoder("[2001:db8::2]:8000", "connect")
        fleet.judge_decoder("192.0.2.1:8000", "connect")  # nobody's
    assert names(fleet.usable("decode")) == ["decode-1"]
    fleet.judge_decoder("[2001:db8::2]:8000", None)
    assert names(fleet.usable("decode")) == ["decode-1", "decode-2"]
