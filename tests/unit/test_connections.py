"""Connections of Envoy's: one that broke is told from streams that were reset."""

from __future__ import annotations

import time

import pytest

from extproc.connections import Connections

ENVOY = "ipv4:127.0.0.1:4711"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def connections(clock: list[float]) -> Connections:
    return Connections()


def _opened(connections: Connections, streams: int) -> None:
    for _ in range(streams):
        connections.opened(ENVOY)


def test_a_stream_that_ends_while_another_is_open_was_reset(connections: Connections) -> None:
    _opened(connections, 2)
    connections.closed(ENVOY)
    assert not connections.broke(ENVOY, time.monotonic())


def test_streams_that_all_end_at_once_went_with_their_connection(connections: Connections, clock: list[float]) -> None:
    _opened(connections, 3)
    ends = []
    for _ in range(3):
        connections.closed(ENVOY)
        ends.append(clock[0])
        clock[0] += 0.05  # a busy process notices one after the other
    clock[0] += 0.4
    assert [connections.broke(ENVOY, at) for at in ends] == [True] * 3


def test_a_later_stream_proves_that_it_stands(connections: Connections, clock: list[float]) -> None:
    _opened(connections, 2)
    connections.closed(ENVOY)
    connections.closed(ENVOY)
    at = clock[0]
    assert connections.broke(ENVOY, at)
    connections.opened(ENVOY)
    assert not connections.broke(ENVOY, at)
    connections.closed(ENVOY)
    assert not connections.broke(ENVOY, at)


def test_the_only_stream_counts_as_reset(connections: Connections) -> None:
    _opened(connections, 1)
    connections.closed(ENVOY)
    assert not connections.broke(ENVOY, time.monotonic())


def test_ends_apart_in_time_are_resets(connections: Connections, clock: list[float]) -> None:
    _opened(connections, 2)
    connections.closed(ENVOY)
    first = clock[0]
    clock[0] += 0.3
    connections.closed(ENVOY)
    assert not connections.broke(ENVOY, first)
    assert not connections.broke(ENVOY, clock[0])


def test_an_end_before_the_break_was_a_reset(connections: Connections, clock: list[float]) -> None:
    _opened(connections, 3)
    connections.closed(ENVOY)
    early = clock[0]
    clock[0] += 0.3
    connections.closed(ENVOY)
    connections.closed(ENVOY)
    assert not connections.broke(ENVOY, early)
    assert connections.broke(ENVOY, clock[0])


def test_connections_are_apart_and_forgotten_in_time(connections: Connections) -> None:
    for number in range(3000):
        connections.opened(f"ipv4:10.0.0.1:{number}")
        connections.closed(f"ipv4:10.0.0.1:{number}")
    assert len(connections._ends) == 1000
    assert not connections._open
    assert not connections.broke("ipv4:10.0.0.1:5", time.monotonic())
