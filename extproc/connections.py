"""Which of Envoy's connections still stand, told by the gRPC streams on them.

A stream that ends looks the same whether Envoy reset it or its connection broke. But Envoy resets one stream, and a
connection that breaks takes all its streams along at once, while the requests behind them may go on.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

_AT_ONCE_S: Final = 0.1
_KEPT: Final = 1000


@dataclass(slots=True)
class _Ends:
    """Streams of one connection that ended one after the other, with none opened in between."""

    first: float
    last: float
    count: int = 1


class Connections:
    """Counts streams by connection (gRPC's name for the peer, ``ipv4:10.0.0.1:1234``)."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._ends: dict[str, _Ends] = {}

    def opened(self, connection: str) -> None:
        self._open[connection] += 1
        self._ends.pop(connection, None)

    def closed(self, connection: str) -> None:
        now = time.monotonic()
        if self._open[connection] > 1:
            self._open[connection] -= 1
        else:
            del self._open[connection]
        ends = self._ends.get(connection)
        if ends is not None and now - ends.last <= _AT_ONCE_S:
            ends.last, ends.count = now, ends.count + 1
        else:
            self._ends.pop(connection, None)  # so that the oldest come first
            self._ends[connection] = _Ends(now, now)
        while len(self._ends) > _KEPT:
            del self._ends[next(iter(self._ends))]

    def broke(self, connection: str, ended_at: float) -> bool:
        """Whether a stream of it that ended at ``ended_at`` (``time.monotonic()``) seems to have ended with it.

        Ask a little later: other streams, open or new ones, prove that the connection stands.
        """
        if self._open[connection]:
            return False
        ends = self._ends.get(connection)
        return ends is not None and ends.count > 1 and ends.first - _AT_ONCE_S <= ended_at <= ends.last + _AT_ONCE_S
