"""The ZMQ socket that takes aborts, in a thread of its own.

One ROUTER; a REQ socket, or a DEALER that sends the empty delimiter, talks to it. Messages are msgpack arrays, one
frame each, in the form that vLLM Ascend's Mooncake connector takes (vllm-project/vllm-ascend#14716):

=============================================  ======================================================================
``(b"abort_request_msg", remote_request_id)``  ``ACK``: its blocks are free at the next engine step.
                                               ``UNKNOWN``: no such lease; never existed, was read, released or ran
                                               out. ``RUNNING``: still computed after the grace time, nothing done.
``(b"ping_msg",)``                             msgpack ``(b"PONG", {"protocol": 1, …})``, see :class:`AbortListener`
anything else                                  ``ERROR`` and the reason
=============================================  ======================================================================

Replies are one frame after an empty delimiter. Ids may be str or bytes. Further elements of an array are ignored. With
several ranks one of them may say ``UNKNOWN`` where others say ``ACK``: not every rank need hold a lease.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import zmq

from .leases import Leases, State

PROTOCOL = 1
ABORT, PING = b"abort_request_msg", b"ping_msg"
ACK, UNKNOWN, RUNNING, ERROR, PONG = b"ACK", b"UNKNOWN", b"RUNNING", b"ERROR", b"PONG"

MAX_FRAME_BYTES = 16 * 1024
"""A connection that sends a longer frame is closed by ZMQ. Ids are some dozen bytes."""

MAX_HELD = 1024
"""How many aborts may wait for a running request. Further ones are answered at once."""

_HELD_POLL_MS = 5  # how soon the end of a running request is noticed

logger = logging.getLogger(__name__)


class BadMessageError(ValueError):
    """The frame is no message of this protocol. The text goes back to the sender."""


@dataclass(slots=True)
class _Held:
    client: bytes
    request_id: str
    deadline: float


class AbortListener:
    """Binds in the constructor, answers between :meth:`start` and :meth:`stop`.

    ``endpoint`` is a ZMQ address such as ``tcp://10.0.0.7:5700`` (port 0: any; see :attr:`port`). ``about`` is added to
    the answer to a ping. ``grace_s`` exists because a prefill's HTTP answer can overtake the table that says so: an
    abort for a request that is still computed waits that long for its end. Raises ``zmq.ZMQError`` if the address is
    taken.
    """

    def __init__(
        self,
        leases: Leases,
        endpoint: str,
        *,
        about: Mapping[str, str | int] | None = None,
        grace_s: float = 0.5,
    ) -> None:
        self._leases = leases
        self._pong = msgspec.msgpack.encode((PONG, {"protocol": PROTOCOL, **(about or {})}))
        self._grace_s = grace_s
        self._held: list[_Held] = []
        self._thread = threading.Thread(target=self._serve, name="extproc-abort-listener", daemon=True)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        # Both ends of what tells the thread to stop.
        self._stop, self._stopping = (self._context.socket(zmq.PAIR) for _ in range(2))
        try:
            self._stop.bind("inproc://stop")
            self._stopping.connect("inproc://stop")
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            self._socket.setsockopt(zmq.IPV6, "[" in endpoint)
            self._socket.bind(endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(bound.rpartition(":")[2])
        """The TCP port it listens on."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and end the thread. May be called more than once."""
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join()
        self._context.destroy(linger=0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopping, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(_HELD_POLL_MS if self._held else None))
            if self._stopping in ready:
                return
            # Nothing that arrives may end this thread: an engine must not lose its listener to a stranger's frame.
            try:
                if self._socket in ready:
                    self._receive()
                self._settle_held()
            except Exception:
                logger.exception("abort listener: a message could not be handled")

    def _receive(self) -> None:
        client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        payload = [frame for frame in frames if frame]
        if len(payload) != 1:
            self._reply(client, ERROR + b" expected one frame")
            return
        try:
            request_id = _abort_id(payload[0])
        except BadMessageError as error:
            self._reply(client, ERROR + b" " + str(error).encode())
            return
        if request_id is None:
            self._reply(client, self._pong)
            return
        state = self._leases.end(request_id)
        if state is State.RUNNING and len(self._held) < MAX_HELD:
            self._held.append(_Held(client, request_id, time.monotonic() + self._grace_s))
        else:
            self._answer(client, state, request_id)

    def _settle_held(self) -> None:
        """Answer the aborts whose request has finished, or has not within the grace time."""
        now = time.monotonic()
        waiting: list[_Held] = []
        for held in self._held:
            state = self._leases.end(held.request_id)
            if state is State.RUNNING and now < held.deadline:
                waiting.append(held)
            else:
                self._answer(held.client, state, held.request_id)
        self._held = waiting

    def _answer(self, client: bytes, state: State, request_id: str) -> None:
        logger.debug("abort of %s: %s", request_id, state.name)
        self._reply(client, {State.LEASED: ACK, State.RUNNING: RUNNING, State.UNKNOWN: UNKNOWN}[state])

    def _reply(self, client: bytes, body: bytes) -> None:
        # A client that has gone away, or reads nothing, loses its answer.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([client, b"", body], zmq.NOBLOCK)


def _abort_id(frame: bytes) -> str | None:
    """The id that an abort names, None for a ping. Raises BadMessageError."""
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise BadMessageError("not msgpack") from error
    if not isinstance(message, list) or not message:
        raise BadMessageError("expected an array")
    kind = _bytes(message[0])
    if kind == PING:
        return None
    if kind != ABORT:
        raise BadMessageError("unknown message")
    request_id = _bytes(message[1]) if len(message) > 1 else None
    if not request_id:
        raise BadMessageError("expected a request id")
    try:
        return request_id.decode()
    except UnicodeDecodeError as error:
        raise BadMessageError("the request id is not UTF-8") from error


def _bytes(value: object) -> bytes | None:
    if isinstance(value, str):
        return value.encode(errors="replace")
    return value if isinstance(value, bytes) else None
