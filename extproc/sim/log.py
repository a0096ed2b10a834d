"""The log of requests that an engine got, for tests and for the demo."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from extproc.sim.serving import Generation


@dataclass
class Record:
    """One HTTP request to a generation endpoint. Times are seconds since the epoch."""

    number: int
    path: str
    started: float
    request_id: str | None
    """The first X-Request-Id header line, which is the one that counts."""
    request_id_lines: int
    leg: str = "plain"
    """prefill, decode or plain, by the request's kv_transfer_params"""
    model: str | None = None
    stream: bool = False
    response_id: str | None = None
    internal_ids: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    pulled: bool = False
    """The prompt's KV came from a prefiller."""
    status: int | None = None
    outcome: str = "running"
    """completed, rejected, aborted, failed (injected), error"""
    ended: float | None = None
    headers: list[tuple[bytes, bytes]] | None = None
    """Kept with SimConfig.record only."""
    body: bytes | None = None

    def summary(self) -> dict[str, Any]:
        """JSON-ready; headers and body are left out, ``/sim/state?full=1`` adds them."""
        return {name: value for name, value in vars(self).items() if name not in ("headers", "body")}

    def full(self) -> dict[str, Any]:
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers or []]
        return {**self.summary(), "headers": headers, "body": (self.body or b"").decode("utf-8", "replace")}

    def close(self, generation: Generation) -> None:
        """Take over what a generation did, complete or not."""
        self.completion_tokens = generation.completion_tokens
        self.pulled = any(request.pulled for request in generation.requests)

    def end(self, outcome: str, status: int | None = None) -> None:
        """The first end counts."""
        if self.ended is None:
            self.outcome, self.ended = outcome, time.time()
            self.status = status if status is not None else self.status


class RequestLog:
    def __init__(self, size: int, *, record: bool) -> None:
        self.records: deque[Record] = deque(maxlen=size)
        self._numbers = count(1)
        self._record = record

    def open(self, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Record:
        ids = [value.decode("latin-1") for name, value in headers if name == b"x-request-id"]
        record = Record(
            number=next(self._numbers),
            path=path,
            started=time.time(),
            request_id=ids[0] if ids else None,
            request_id_lines=len(ids),
        )
        if self._record:
            record.headers, record.body = list(headers), body
        self.records.append(record)
        return record
