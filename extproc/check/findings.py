"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about one subject (an engine's name, ``envoy``, ``service`` …)."""

    level: Level
    subject: str
    text: str
    todo: str = ""
    """What to do about it; empty for ``ok``."""
    code: str = ""
    """A stable word for scripts and tests."""


class Findings(list[Finding]):
    """In the order found."""

    def ok(self, subject: str, text: str) -> None:
        self.append(Finding("ok", subject, text))

    def note(self, code: str, subject: str, text: str, todo: str = "") -> None:
        self.append(Finding("note", subject, text, todo, code))

    def warning(self, code: str, subject: str, text: str, todo: str) -> None:
        self.append(Finding("warning", subject, text, todo, code))

    def error(self, code: str, subject: str, text: str, todo: str) -> None:
        self.append(Finding("error", subject, text, todo, code))

    @property
    def failed(self) -> bool:
        return any(finding.level == "error" for finding in self)
