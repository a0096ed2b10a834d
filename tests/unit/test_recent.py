"""The record of recent requests: put together from reports in any order, bounded, and free of what nobody may see."""

from __future__ import annotations

import time
from typing import Any

import pytest

from extproc.telemetry.recent import Recent


def only(recent: Recent) -> dict[str, Any]:
    (record,) = recent.list()
    return record


def test_reports_of_one_request_make_one_record() -> None:
    recent = Recent()
    recent.note("r1", path="/v1/completions", decision=None)
    recent.note("r1", decision="disaggregated", total_ms=12.5)
    recent.note("r1", outcome="completed")
    record = only(recent)
    assert record.pop("noted_at") == pytest.approx(time.time(), abs=60)
    assert record == {
        "request_id": "r1",
        "path": "/v1/completions",
        "decision": "disaggregated",
        "total_ms": 12.5,
        "outcome": "completed",
    }


def test_what_is_presumed_gives_way_to_what_is_told() -> None:
    recent = Recent()
    recent.alias("of the client", "r1")
    recent.note("r1", outcome="decode_reset")
    recent.presume("r1", outcome="client_reset", phase="prefill")
    recent.presume("r2", outcome="client_reset")
    recent.note("r2", outcome="completed")
    outcomes = {record["request_id"]: record["outcome"] for record in recent.list()}
    assert outcomes == {"r1": "decode_reset", "r2": "completed"}


def test_the_newest_come_first() -> None:
    recent = Recent()
    for name in ("r1", "r2", "r3", "r1"):
        recent.note(name)
    assert [record["request_id"] for record in recent.list()] == ["r3", "r2", "r1"]


def test_the_oldest_are_forgotten_with_all_that_belongs_to_them() -> None:
    recent = Recent(kept=2)
    for number in range(100):
        recent.note(f"r{number}")
        recent.alias(f"client-{number}", f"r{number}")
        recent.handed_over(f"r{number}", ("10.0.0.7:8000", f"h{number}"), "prefill-1")
    assert [record["request_id"] for record in recent.list()] == ["r99", "r98"]
    assert (len(recent._records), len(recent._aliases), len(recent._handoffs)) == (2, 2, 2)


def test_a_report_under_the_clients_id_is_taken_for_the_request() -> None:
    """Envoy logs a request that ended before our reply under the id that its client sent."""
    recent = Recent()
    recent.note("r1", client_request_id="mine")
    recent.alias("mine", "r1")
    recent.note("mine", outcome="client_reset")
    assert (only(recent)["request_id"], only(recent)["outcome"]) == ("r1", "client_reset")


def test_a_later_attempt_has_an_id_of_its_own() -> None:
    recent = Recent()
    recent.note("r1")
    recent.alias("r2", "r1")
    recent.alias("r3", "r2")  # through an alias
    recent.note("r3", request_id="r3", outcome="completed")
    record = only(recent)
    assert (record["request_id"], record["outcome"]) == ("r3", "completed")
    recent.note("r1", status=200)  # known by its first one all the same
    assert only(recent)["status"] == 200


def test_a_client_that_uses_an_id_again_means_its_newest_request() -> None:
    recent = Recent(kept=2)
    for number in range(3):
        recent.note(f"r{number}")
        recent.alias("same", f"r{number}")
    recent.note("same", outcome="completed")
    assert {record["request_id"]: record.get("outcome") for record in recent.list()} == {"r2": "completed", "r1": None}


def test_an_alias_of_what_is_not_known_is_none() -> None:
    recent = Recent()
    recent.alias("mine", "r1")
    recent.alias("r1", "r1")
    assert recent.list() == []
    recent.note("mine")
    assert only(recent)["request_id"] == "mine"


def test_a_release_belongs_to_its_request() -> None:
    recent = Recent()
    recent.note("r1")
    recent.handed_over("r1", ("10.0.0.7:8000", "cmpl-1"), "prefill-1")
    recent.released(("10.0.0.7:8000", "cmpl-1"), "released", 0.01234)
    recent.released(("10.0.0.8:8000", "cmpl-1"), "timed_out", 5)  # another prefiller's, another replica's
    record = only(recent)
    assert (record["release"], record["release_ms"], record["prefiller"]) == ("released", 12.3, "prefill-1")


def test_a_handoff_that_came_too_late_belongs_to_its_request() -> None:
    """Its prefiller is told only where no other one delivered."""
    recent = Recent(kept=2)
    for request_id, prefiller in (("r1", None), ("r2", "prefill-2")):
        recent.note(request_id, prefiller=prefiller)
        recent.orphaned(request_id, ("10.0.0.7:8000", f"cmpl-{request_id}"), "prefill-1")
        recent.released(("10.0.0.7:8000", f"cmpl-{request_id}"), "released", 0.01)
    assert [(r["prefiller"], r["release"]) for r in recent.list()] == [
        ("prefill-2", "released"),
        ("prefill-1", "released"),
    ]
    recent.orphaned("forgotten", ("10.0.0.7:8000", "cmpl"), "prefill-1")
    assert len(recent.list()) == 2


def test_what_it_keeps_for_itself_is_not_shown() -> None:
    recent = Recent()
    recent.note("r1")
    recent.alias("mine", "r1")
    recent.handed_over("r1", ("10.0.0.7:8000", "cmpl-1"), "prefill-1")
    assert set(only(recent)) == {"request_id", "noted_at", "prefiller"}


@pytest.mark.parametrize("kept", [1, 3])
def test_it_never_grows_beyond_its_bound(kept: int) -> None:
    recent = Recent(kept=kept)
    for number in range(10):
        recent.note(f"r{number}")
        assert len(recent.list()) == min(kept, number + 1)
