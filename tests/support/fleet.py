"""Fleets without sockets, for tests of what is decided about engines."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from extproc import configsections
from extproc.connectors import connector
from extproc.fleet.engines import Engine, Role, Spec
from extproc.fleet.fleet import Fleet
from extproc.picking import policy


def spec(role: Role, number: int, *, connector_name: str = "nixl", **fields: Any) -> Spec:
    """``prefill-3`` at ``10.0.1.3:8000``, ``decode-3`` at ``10.0.2.3:8000``; fields of Spec may be given."""
    network = {"prefill": 1, "decode": 2}[role]
    values: dict[str, Any] = {
        "url": f"http://10.0.{network}.{number}:8000",
        "name": f"{role}-{number}",
        "connector": connector(connector_name),
    }
    return Spec(role=role, **{**values, **fields})


def specs(role: Role, count: int, **fields: Any) -> list[Spec]:
    return [spec(role, number, **fields) for number in range(1, count + 1)]


def settings(**fields: Any) -> configsections.Fleet:
    return configsections.Fleet(**{"decode": [{"url": "http://10.0.2.1:8000"}], **fields})


def fleet_of(*listed: Spec, policies: str = "round_robin", **fields: Any) -> Fleet:
    """A fleet of these engines, no probe made yet; ``fields`` are those of ``configsections.Fleet``."""
    fleet = Fleet(settings(**fields), {"prefill": policy(policies), "decode": policy(policies)})
    fleet.update("test", listed)
    return fleet


def named(fleet: Fleet, name: str) -> Engine:
    (engine,) = [engine for engine in fleet.engines() if engine.name == name]
    return engine


def names(engines: Iterable[Engine]) -> list[str]:
    return [engine.name for engine in engines]


class Clock:
    """``time.monotonic`` for modules of the fleet, under the test's control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        for module in modules or ("extproc.fleet.fleet", "extproc.fleet.engines", "extproc.picking"):
            monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: self.now))

    def advance(self, seconds: float) -> None:
        self.now += seconds
