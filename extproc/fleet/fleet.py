"""The fleet: all engines, who of them can take work, and the one step that picks and reserves."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from extproc import config, configsections
from extproc.fleet.engines import ROLES, Engine, Reservation, Role, Spec, canonical
from extproc.picking import ANYTHING, Need, Policy, policy
from extproc.telemetry.logs import log

Listener = Callable[[], None]
Pairing = tuple[str, str]
"""Group and connector (:attr:`Engine.pairing`)."""

_KEPT_AFTER_REMOVAL_S: Final = 600.0


class Source(NamedTuple):
    """Where engines come from, how many it lists, and why its last word is not in force (None: it is)."""

    source: str
    engines: int
    problem: str | None


class Fleet:
    """Engines by role. Everything here is synchronous: a burst of picks never sees the same stale load.

    Sources (configuration, watched file, DNS) each replace their own engines with :meth:`update`.
    """

    def __init__(self, settings: configsections.Fleet, policies: dict[Role, Policy]) -> None:
        self.settings = settings
        self._policies = policies
        self._engines: dict[tuple[Role, str], Engine] = {}
        self._sources: dict[str, dict[tuple[Role, str], Spec]] = {}
        self._problems: dict[str, str] = {}
        self._awaited: set[str] = set()
        self._retired: dict[Engine, float] = {}
        self._turns: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.picks: dict[Role, int] = dict.fromkeys(ROLES, 0)
        """Reservations made since the start."""
        self.pairings: frozenset[Pairing] = frozenset()
        """All engines'."""
        self._on_change: list[Listener] = []
        self._on_release: list[Listener] = []

    # ── membership ────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, source: str) -> None:
        """There is a source that has not told its engines yet."""
        self._awaited.add(source)

    def report(self, source: str, problem: str | None) -> None:
        """Why a source's last word could not be taken over, so that its engines stay as they were; None: it was."""
        if problem is None:
            self._problems.pop(source, None)
        else:
            self._problems[source] = problem

    @property
    def sources(self) -> list[Source]:
        names = dict.fromkeys((*self._sources, *sorted(self._awaited)))
        return [Source(name, len(self._sources.get(name, ())), self._problems.get(name)) for name in names]

    @property
    def awaited(self) -> list[str]:
        """Sources that have not told their engines yet, those that fail included: the fleet is not all there."""
        return sorted(self._awaited)

    @property
    def starting(self) -> list[str]:
        """Those of them that may still do so at any moment."""
        return sorted(self._awaited - self._problems.keys())

    def update(self, source: str, specs: Iterable[Spec]) -> None:
        """The engines that a source knows now. An engine that stays keeps its load, its health and its address."""
        told_at_last = source in self._awaited
        self._awaited.discard(source)
        self.report(source, None)
        self._sources[source] = {(spec.role, spec.url): spec for spec in specs}
        wanted: dict[tuple[Role, str], Spec] = {}
        for known in self._sources.values():
            wanted.update(known)
        changed = told_at_last
        now = time.monotonic()
        for key in [key for key in self._engines if key not in wanted]:
            engine = self._engines.pop(key)
            self._retired[engine] = now
            changed = True
            log.info("engine removed", engine=engine.name, role=engine.role)
        for key, spec in wanted.items():
            if (known_engine := self._engines.get(key)) is None:
                self._engines[key] = Engine(spec)
                changed = True
                log.info("engine added", engine=spec.name, role=spec.role)
            elif known_engine.spec != spec:
                known_engine.address = canonical(spec.address or "") or known_engine.address
                known_engine.spec = spec
                changed = True
        self._retired = {engine: at for engine, at in self._retired.items() if now - at < _KEPT_AFTER_REMOVAL_S}
        if changed:
            self.changed()

    def on_change(self, listener: Listener) -> None:
        """Call ``listener`` after engines came, went, drained or got another address."""
        self._on_change.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Undo :meth:`on_change` or :meth:`on_release`."""
        for listeners in (self._on_change, self._on_release):
            if listener in listeners:
                listeners.remove(listener)

    def on_release(self, listener: Listener) -> None:
        """Call ``listener`` whenever a reservation is given back."""
        self._on_release.append(listener)

    def changed(self) -> None:
        self.pairings = frozenset(engine.pairing for engine in self._engines.values())
        for listener in list(self._on_change):
            listener()

    def engines(self, role: Role | None = None) -> list[Engine]:
        return [engine for engine in self._engines.values() if role is None or engine.role == role]

    def address_of(self, host: str) -> str | None:
        """The IP address that this name of an engine had when it was resolved last."""
        return next((engine.address for engine in self._engines.values() if engine.host == host), None)

    def prefiller_at(self, endpoint: str) -> Engine | None:
        """The prefiller at ``ip:port``, one that has left lately included: its blocks may still have to be freed."""
        found = self._at("prefill", endpoint, self._engines.values())
        if found is None:
            oldest = time.monotonic() - _KEPT_AFTER_REMOVAL_S
            found = self._at("prefill", endpoint, [engine for engine, at in self._retired.items() if at > oldest])
        return found

    def decoder_at(self, endpoint: str) -> Engine | None:
        """The decoder at ``ip:port``."""
        return self._at("decode", endpoint, self._engines.values())

    @staticmethod
    def _at(role: Role, endpoint: str, engines: Iterable[Engine]) -> Engine | None:
        return next((engine for engine in engines if engine.role == role and engine.endpoint == endpoint), None)

    def drain(self, name: str, drained: bool) -> list[Engine]:
        """An operator takes every engine of this name out, or back in. Returns them."""
        named = [engine for engine in self._engines.values() if engine.name == name]
        for engine in named:
            engine.drained = drained
            log.info("engine drained" if drained else "engine undrained", engine=name, role=engine.role)
        if named:
            self.changed()
        return named

    # ── picking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def usable(
        self,
        role: Role,
        need: Need = ANYTHING,
        *,
        exclude: Collection[Engine] = (),
        pairings: Collection[Pairing] | None = None,
    ) -> list[Engine]:
        """Engines that can take this work, busy ones included.

        Best are those that a probe has found healthy and that are not ejected. An engine that no probe has reached yet
        is used where there is none of them; and failed requests alone never take the last engine out: where all are
        ejected, all are used.
        """
        now = time.monotonic()
        alive = [
            engine
            for engine in self._engines.values()
            if engine.role == role
            and engine.address is not None
            and not engine.draining
            and engine.health.probed_ok is not False
            and engine.serves(need.model)
            and (need.subset is None or engine.endpoint in need.subset)
            and engine not in exclude
            and (pairings is None or engine.pairing in pairings)
        ]
        fit = [engine for engine in alive if not engine.health.ejected(now)]
        return [engine for engine in fit if engine.health.probed_ok] or fit or alive

    def ready(self, role: Role) -> bool:
        """Whether any engine of the role could be picked now."""
        return bool(self.usable(role))

    def preferences(
        self,
        role: Role,
        need: Need = ANYTHING,
        *,
        exclude: Collection[Engine] = (),
        pairings: Collection[Pairing] | None = None,
    ) -> list[Engine]:
        """The usable engines that are below their cap, best first."""
        usable = self.usable(role, need, exclude=exclude, pairings=pairings)
        candidates = [engine for engine in usable if not engine.full]
        if len(candidates) <= 1:
            return candidates
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return self._policies[role](candidates, turn, need)

    def reserve(
        self,
        role: Role,
        need: Need = ANYTHING,
        *,
        exclude: Collection[Engine] = (),
        pairings: Collection[Pairing] | None = None,
    ) -> Reservation | None:
        """Pick the best engine and count it as loaded, in one step. None where there is no engine to pick."""
        best = self.preferences(role, need, exclude=exclude, pairings=pairings)
        return self.reserve_engine(best[0], need) if best else None

    def reserve_engine(self, engine: Engine, need: Need = ANYTHING) -> Reservation:
        self.picks[engine.role] += 1
        return Reservation(engine, need.tokens, self._released)

    def _released(self) -> None:
        for listener in list(self._on_release):
            listener()

    # ── what requests tell of engines ─────────────────────────────────────────────────────────────────────────────

    def succeeded(self, engine: Engine) -> None:
        if engine.health.succeeded():
            log.info("engine back", engine=engine.name, role=engine.role)

    def judge_decoder(self, endpoint: str, reason: str | None) -> None:
        """A request's end tells that the decoder at ``ip:port`` failed for a reason, or (None) that it worked."""
        if (engine := self.decoder_at(endpoint)) is None:
            return
        if reason is None:
            self.succeeded(engine)
        else:
            self.failed(engine, reason)

    def failed(self, engine: Engine, reason: str) -> None:
        if engine.health.failed(reason, self.settings.outlier, time.monotonic()):
            log.warning("engine ejected", engine=engine.name, role=engine.role, reason=reason)


def policies(settings: config.Config) -> dict[Role, Policy]:
    """The picking policy of each role."""
    return {"prefill": policy(settings.routing.prefill_policy), "decode": policy(settings.routing.decode_policy)}
