"""The last exchanges, pieced together from what exchanges, Envoy's access log and releases tell of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final

_KEPT: Final = 500


class Recent:
    """A bounded record of requests, newest last. Holds ids, engines, durations and reasons, never contents."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._aliases: dict[str, str] = {}
        self._handoffs: dict[tuple[str, str], str] = {}

    def note(self, request_id: str, /, **fields: Any) -> None:
        """Add what is now known of a request. The sources report in any order.

        A ``request_id`` among the fields is shown; the record stays known by its first one and its aliases.
        """
        request_id = self._aliases.get(request_id, request_id)
        record = self._records.get(request_id)
        if record is None:
            record = self._records[request_id] = {"request_id": request_id, "noted_at": round(time.time(), 3)}
            if len(self._records) > self._kept:
                self._forget(*self._records.popitem(last=False))
        record.update(fields)

    def presume(self, request_id: str, /, **fields: Any) -> None:
        """Add what follows from the rest, unless it is known better or will be."""
        known = self._records.get(self._aliases.get(request_id, request_id), {})
        self.note(request_id, **{key: value for key, value in fields.items() if key not in known})

    def outcome(self, request_id: str) -> str | None:
        """How a request ended, where that is known already."""
        outcome: str | None = self._records.get(self._aliases.get(request_id, request_id), {}).get("outcome")
        return outcome

    def alias(self, other_id: str, request_id: str) -> None:
        """Take reports under ``other_id`` for this request: the client's own id, or a later attempt's."""
        request_id = self._aliases.get(request_id, request_id)
        if other_id != request_id and request_id in self._records:
            self._aliases[other_id] = request_id
            self._records[request_id].setdefault("_aliases", []).append(other_id)

    def _forget(self, request_id: str, record: dict[str, Any]) -> None:
        for alias in record.get("_aliases", ()):
            if self._aliases.get(alias) == request_id:  # clients use an id again
                del self._aliases[alias]
        for handoff_id in record.get("_handoffs", ()):
            self._handoffs.pop(handoff_id, None)

    def handed_over(self, request_id: str, handoff_id: tuple[str, str], prefiller: str) -> None:
        """Tie a handoff to its request, so that its release can be told."""
        self.note(request_id, prefiller=prefiller)
        self._tie(request_id, handoff_id)

    def orphaned(self, request_id: str, handoff_id: tuple[str, str], prefiller: str) -> None:
        """The same for a handoff that no decoder gets: it came too late."""
        record = self._records.get(self._aliases.get(request_id, request_id))
        if record is not None:
            self._tie(request_id, handoff_id)
            record["prefiller"] = record.get("prefiller") or prefiller

    def _tie(self, request_id: str, handoff_id: tuple[str, str]) -> None:
        request_id = self._aliases.get(request_id, request_id)
        self._handoffs[handoff_id] = request_id
        self._records[request_id].setdefault("_handoffs", []).append(handoff_id)

    def released(self, handoff_id: tuple[str, str], result: str, seconds: float) -> None:
        """A release has ended. Handoffs of other replicas are not known here."""
        if (request_id := self._handoffs.get(handoff_id)) is not None:
            self.note(request_id, release=result, release_ms=round(seconds * 1000, 1))

    def list(self) -> list[dict[str, Any]]:
        """JSON-ready records, newest first."""
        return [
            {key: value for key, value in record.items() if not key.startswith("_")}
            for record in reversed(self._records.values())
        ]
