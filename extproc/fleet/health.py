"""How one engine is doing: what ``/health`` probes say, and how its requests went (passive ejection)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from extproc import configsections

_MAX_DOUBLINGS: Final = 30
_LONGEST_TRIAL_S: Final = 30.0


class Health:
    """Two views of one engine. Times are ``time.monotonic()``.

    An engine whose requests fail ``consecutive`` times in a row is ejected for ``base_s``, twice as long each time in a
    row up to ``max_s``. When the time is up one request goes there on trial: it decides. A trial that ends without a
    verdict (its client left), or that takes long (a decoder's stream), makes room for the next.
    """

    __slots__ = (
        "_ejections",
        "_failures",
        "_trial",
        "_trial_began",
        "ejected_until",
        "probe_failures",
        "probed_ok",
        "reason",
    )

    def __init__(self) -> None:
        self.probed_ok: bool | None = None
        """None before the first probe has settled."""
        self.probe_failures = 0
        self.ejected_until = 0.0
        """0 when the engine is not ejected."""
        self.reason = ""
        self._failures = 0
        self._ejections = 0
        self._trial: object | None = None
        self._trial_began = 0.0

    # ── probes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def probed(self, problem: str, unhealthy_after: int) -> bool:
        """A probe has ended; ``problem`` is empty where it went well. Returns whether ``probed_ok`` changed.

        An engine that comes back has most likely been restarted: how its requests went before counts no more.
        """
        before = self.probed_ok
        if not problem:
            self.probe_failures = 0
            self.probed_ok = True
            if before is False:
                self._forget()
        else:
            self.probe_failures += 1
            if self.probe_failures >= unhealthy_after:
                self.probed_ok = False
                self.reason = problem
        return self.probed_ok is not before

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────

    def ejected(self, now: float) -> bool:
        """Whether requests should go elsewhere: its time is not up, or another request is on trial there."""
        return self.ejected_until > 0 and (now < self.ejected_until or self._on_trial(now))

    def _on_trial(self, now: float) -> bool:
        return self._trial is not None and now - self._trial_began < _LONGEST_TRIAL_S

    def began(self, request: object, now: float) -> None:
        """A request goes there: on trial, if the engine's time is up."""
        if self.ejected_until and now >= self.ejected_until and not self._on_trial(now):
            self._trial, self._trial_began = request, now

    def ended(self, request: object) -> None:
        """That request is over, whatever was told of it."""
        if self._trial is request:
            self._trial = None

    def succeeded(self) -> bool:
        """A request went well. Returns whether that ended an ejection."""
        was_ejected = self.ejected_until > 0
        self._forget()
        return was_ejected

    def failed(self, reason: str, settings: configsections.Outlier, now: float) -> bool:
        """A request failed for a reason that is the engine's. Returns whether the engine is ejected by that.

        Failures while it is ejected change nothing: those requests were sent before, or for want of another engine.
        """
        if now < self.ejected_until:
            return False
        self._failures += 1
        on_trial, self._trial = self._trial is not None, None
        if self._failures < settings.consecutive and not on_trial:
            return False
        self._failures = 0
        self.reason = reason
        self.ejected_until = now + min(settings.max_s, settings.base_s * 2 ** min(self._ejections, _MAX_DOUBLINGS))
        self._ejections += 1
        return True

    def _forget(self) -> None:
        self._failures = self._ejections = 0
        self.ejected_until = 0.0
        self._trial = None
