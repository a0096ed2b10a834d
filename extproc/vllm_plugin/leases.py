"""Ending the lease of a finished prefill, on the terms of vLLM's NIXL worker.

The worker keeps two tables, both changed by the engine's own thread only: ``_reqs_to_process`` (ids that are or were in
a batch and are not done yet) and ``_reqs_to_send`` (the finished ones among them: id → end of the lease on
``time.perf_counter``). Each engine step frees what is past its end. So a release is: set that end to the past, from the
engine's thread, and let the engine do the rest. Nothing else of the worker is touched.
"""

from __future__ import annotations

import threading
from enum import Enum
from typing import Protocol

EXPIRED = 0.0
"""``perf_counter`` never returns less, so a lease that ends here is over."""


class NixlWorker(Protocol):
    """What is used of ``NixlPullConnectorWorker``."""

    _reqs_to_send: dict[str, float]
    _reqs_to_process: set[str]


class State(Enum):
    LEASED = "finished, its blocks are pinned"
    RUNNING = "queued in a batch or being computed"
    UNKNOWN = "never seen here, or its blocks are free already"


class Leases:
    """The leases of one worker. ``state`` and ``end`` are for any thread, ``apply`` is for the engine's."""

    def __init__(self, worker: NixlWorker) -> None:
        self._worker = worker
        self._ending: set[str] = set()
        self._lock = threading.Lock()

    def state(self, request_id: str) -> State:
        """Where the request is now. Membership tests are atomic, so reading beside the engine's thread is safe."""
        if request_id in self._worker._reqs_to_send:
            return State.LEASED
        if request_id in self._worker._reqs_to_process:
            return State.RUNNING
        return State.UNKNOWN

    def end(self, request_id: str) -> State:
        """Have the lease ended at the next step. Returns the state that decided: only LEASED is acted on."""
        state = self.state(request_id)
        if state is State.LEASED:
            with self._lock:
                self._ending.add(request_id)
        return state

    def apply(self) -> int:
        """Set the ends that are due. Called once a step, before the worker looks for leases that are over.

        An id is kept until the worker has dropped it: a decoder's heartbeat that is read later in the same step extends
        the lease again. Returns how many ends were set.
        """
        if not self._ending:  # the usual step pays for one look
            return 0
        with self._lock:
            leases = self._worker._reqs_to_send
            self._ending.intersection_update(leases)
            for request_id in self._ending:
                leases[request_id] = EXPIRED
            return len(self._ending)
