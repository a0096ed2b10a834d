"""Picking policies: pure functions from candidates to candidates, best first.

A policy gets the usable engines of one role (at least one), a turn number that grows by one with each pick, and what
the request needs. It looks at engines and changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc.fleet.engines import Engine


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of an engine."""

    model: str | None = None
    tokens: int = 0
    """Estimated prompt tokens."""
    affinity: bytes | None = None
    """Hash of the prompt's beginning: requests with the same one share KV blocks."""
    subset: frozenset[str] | None = None
    """Where a gateway limits the choice: the ``ip:port`` that are allowed."""


ANYTHING: Final = Need()

Policy = Callable[[Sequence["Engine"], int, Need], list["Engine"]]

STALE_S: Final = 5.0
"""Engines' own load reports count for this long."""
_FOREIGN_TOKENS: Final = 512  # what another replica's request is taken to weigh
_KV_FULL: Final = 0.95
LOAD_BOUND: Final = 1.25
"""prefix_affinity: an engine with more than this multiple of the average load takes no more."""


def load(engine: Engine, now: float) -> tuple[bool, float, float]:
    """How loaded an engine is; compare with ``<``.

    An engine whose KV cache is full comes last: new work would wait there. Prefillers are weighed by the prompt tokens
    that wait for them, decoders by requests; what other replicas have sent is known from the engine's own report.
    """
    foreign = engine.foreign_load(now, STALE_S)
    fresh = now - engine.report.at <= STALE_S
    full = fresh and engine.report.kv_usage >= _KV_FULL
    requests = engine.inflight + foreign
    if engine.role == "prefill":
        return full, engine.reserved_tokens + foreign * _FOREIGN_TOKENS, requests
    return full, requests, engine.report.kv_usage if fresh else 0.0


def round_robin(candidates: Sequence[Engine], turn: int, need: Need = ANYTHING) -> list[Engine]:
    """Each in its turn, in the order of the fleet."""
    start = turn % len(candidates)
    return [*candidates[start:], *candidates[:start]]


def least_inflight(candidates: Sequence[Engine], turn: int, need: Need = ANYTHING) -> list[Engine]:
    """The fewest requests of this process first; equals take turns."""
    return sorted(round_robin(candidates, turn), key=lambda engine: engine.inflight)


def least_loaded(candidates: Sequence[Engine], turn: int, need: Need = ANYTHING) -> list[Engine]:
    """The least loaded first, by :func:`load`; equals take turns."""
    now = time.monotonic()
    return sorted(round_robin(candidates, turn), key=lambda engine: load(engine, now))


def power_of_two(candidates: Sequence[Engine], turn: int, need: Need = ANYTHING, *, salt: bytes = b"") -> list[Engine]:
    """The less loaded of two, drawn by the turn and the salt; then the rest.

    Replicas (each with its own salt) that see the same stale reports do not all run to the same engine, as they do
    with the least loaded.
    """
    now = time.monotonic()
    drawn = hashlib.blake2b(turn.to_bytes(8, "little"), digest_size=8, key=salt).digest()
    count = len(candidates)
    first = int.from_bytes(drawn[:4], "little") % count
    second = (first + 1 + int.from_bytes(drawn[4:], "little") % max(1, count - 1)) % count
    pair = sorted(dict.fromkeys((first, second)), key=lambda index: load(candidates[index], now))
    others = sorted((index for index in range(count) if index not in pair), key=lambda i: load(candidates[i], now))
    return [candidates[index] for index in (*pair, *others)]


def prefix_affinity(candidates: Sequence[Engine], turn: int, need: Need = ANYTHING) -> list[Engine]:
    """The engine that the prompt's beginning belongs to, unless it has more than its share of the load.

    Rendezvous hashing with bounded loads: every replica orders the engines alike without shared state, an engine that
    comes or goes moves only its own prompts, and a hot prefix spills over to its second choice instead of piling up.
    An engine takes a request if its load is at most :data:`LOAD_BOUND` times the average and this request's own.
    """
    if need.affinity is None:
        return least_loaded(candidates, turn, need)
    affinity = need.affinity
    ranked = sorted(candidates, key=lambda engine: _weight(affinity, engine.url), reverse=True)
    now = time.monotonic()
    loads = {engine: load(engine, now) for engine in ranked}
    own = max(1, need.tokens) if ranked[0].role == "prefill" else 1
    bound = LOAD_BOUND * sum(amount for _, amount, _ in loads.values()) / len(ranked) + own
    within = [engine for engine in ranked if not loads[engine][0] and loads[engine][1] <= bound]
    over = sorted((engine for engine in ranked if engine not in within), key=lambda engine: loads[engine])
    return [*within, *over]


def _weight(affinity: bytes, url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=8, key=affinity[:64]).digest()


_POLICIES: Final[dict[str, Policy]] = {
    "round_robin": round_robin,
    "least_inflight": least_inflight,
    "least_loaded": least_loaded,
    "power_of_two": functools.partial(power_of_two, salt=os.urandom(16)),
    "prefix_affinity": prefix_affinity,
}


def policy(name: str) -> Policy:
    """Raises KeyError for a name that the configuration does not allow."""
    return _POLICIES[name]
