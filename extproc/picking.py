"""Picking policies: pure functions from candidates to candidates, best first.

A policy gets the usable engines of one role (at least one) and a turn number that grows by one with each pick.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.fleet.engines import Engine

Policy = Callable[[Sequence["Engine"], int], list["Engine"]]


def round_robin(candidates: Sequence[Engine], turn: int) -> list[Engine]:
    """Each in its turn, in the order of the configuration."""
    start = turn % len(candidates)
    return [*candidates[start:], *candidates[:start]]


def least_inflight(candidates: Sequence[Engine], turn: int) -> list[Engine]:
    """The fewest requests of this process first; equals take turns."""
    return sorted(round_robin(candidates, turn), key=lambda engine: engine.inflight)


_POLICIES: dict[str, Policy] = {"round_robin": round_robin, "least_inflight": least_inflight}


def policy(name: str) -> Policy:
    """Raises KeyError for a name that the configuration does not allow."""
    return _POLICIES[name]
