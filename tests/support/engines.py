"""Recording engines: real HTTP/1.1 servers on free ports that answer, or misbehave, as a test wants.

::

    async with StubEngine("prefill") as engine:
        engine.respond = lambda request: Answer.json({"error": "…"}, status=400)
        ...
        request = await engine.request(1)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self

import h11

Role = Literal["prefill", "decode"]
Respond = Callable[["RecordedRequest"], "Answer | Awaitable[Answer]"]

ENGINE_ID: Final = "e1"
ID_SUFFIX: Final = "0a1b2c3d"


@dataclass(frozen=True)
class RecordedRequest:
    method: str
    target: str
    """The raw path with its query."""
    headers: list[tuple[str, str]]
    """Every line in order, names in the sender's casing, values as latin-1."""
    body: bytes
    connection: int
    """Number of the connection it came on, from 1."""
    nth: int
    """Its number on that connection, from 1."""

    def header(self, name: str) -> str | None:
        """The value of the only line of that name; None if there is none. Raises AssertionError if there are more."""
        values = [value for key, value in self.headers if key.lower() == name.lower()]
        assert len(values) <= 1, f"{len(values)} lines of {name}: {values}"
        return values[0] if values else None

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Answer:
    """``body`` goes out with a content-length; ``events`` instead of it as server-sent events, chunked, one by one."""

    status: int = 200
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    events: Sequence[bytes] | None = None
    delay_s: float = 0.0
    between_events: Callable[[int], Awaitable[None]] | None = None
    """Awaited before each event, with its number from 0: the way to hold a stream open at a chosen point."""

    @classmethod
    def json(cls, value: Any, status: int = 200, headers: Iterable[tuple[str, str]] = ()) -> Answer:
        return cls(status, [("content-type", "application/json"), *headers], json.dumps(value).encode())

    @classmethod
    def stream(cls, *values: Any) -> Answer:
        """An event stream of JSON values, ended by ``[DONE]``."""
        events = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in values]
        return cls(headers=[("content-type", "text/event-stream")], events=[*events, b"data: [DONE]\n\n"])


BROKEN_JSON: Final = Answer(headers=[("content-type", "application/json")], body=b'{"id": "cmpl-1", "kv_transfer_par')


class CloseConnection(Exception):
    """Raised by a ``respond``: the connection is closed without an answer."""


def prefill_params(request_id: str) -> dict[str, Any]:
    """The ``kv_transfer_params`` of a NIXL prefiller."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": ENGINE_ID,
        "remote_block_ids": [[1, 2]],
        "remote_request_id": f"chatcmpl-{request_id}-{ID_SUFFIX}",
        "remote_host": "10.0.0.9",
        "remote_port": 5600,
        "tp_size": 1,
    }


def answer_prefill(request: RecordedRequest) -> Answer:
    request_id = request.header("x-request-id") or ""
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
    return Answer.json(
        {"id": f"chatcmpl-{request_id}", "choices": [choice], "kv_transfer_params": prefill_params(request_id)}
    )


def answer_decode(request: RecordedRequest) -> Answer:
    """A completion, streamed if the request asks for it; 400 for a body that is no JSON."""
    completion_id = f"chatcmpl-{request.header('x-request-id') or ''}"
    try:
        stream = request.json().get("stream")
    except ValueError as problem:
        return Answer.json({"error": {"message": str(problem), "code": 400}}, status=400)
    if stream:
        return Answer.stream(
            *({"id": completion_id, "choices": [{"index": 0, "delta": {"content": text}}]} for text in ("a", "b", "c"))
        )
    choice = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "finish_reason": "stop"}
    return Answer.json({"id": completion_id, "choices": [choice], "kv_transfer_params": None})


class StubEngine:
    """``async with StubEngine("prefill") as engine``; ``engine.url`` is where it listens.

    Switches, which may be set at any time: ``respond``, ``hang`` (take requests and answer none), ``close_on_nth``
    (close without an answer on the n-th request of each connection); :meth:`refuse` and :meth:`listen`.
    Probes (GET) are answered, once ``probes_pass`` is set, and recorded apart.
    """

    def __init__(
        self,
        role: Role = "prefill",
        *,
        respond: Respond | None = None,
        refusing: bool = False,
        models: Iterable[str] = ("m",),
    ) -> None:
        self.role = role
        self.models = list(models)
        """What /v1/models lists."""
        self.respond: Respond = respond or (answer_prefill if role == "prefill" else answer_decode)
        self.hang = False
        self.probes_pass = asyncio.Event()
        self.probes_pass.set()
        self.close_on_nth: int | None = None
        self.requests: list[RecordedRequest] = []
        self.probes: list[RecordedRequest] = []
        self.connections = 0
        """Accepted in all."""
        self.open_connections = 0
        self.answered = 0
        """Answers sent to their end."""
        self.disconnects = 0
        """Requests whose client left before the end of the answer."""
        self.host, self.port = "127.0.0.1", 0
        self._faults: list[BaseException] = []
        self._refusing = refusing
        self._changed = asyncio.Condition()
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.endpoint}"

    async def __aenter__(self) -> Self:
        self._socket = self._bound()
        self.port = self._socket.getsockname()[1]
        if not self._refusing:
            await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()
        if self._socket is not None:
            self._socket.close()
        if self._faults and error is None:
            raise self._faults[0]  # of a `respond`, say: it must not get lost in a task of ours

    # ---- waiting ----

    async def wait_until(self, condition: Callable[[], bool], within_s: float = 10.0) -> None:
        """Raises TimeoutError, with the counters as they are."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            raise TimeoutError(
                f"{self.role}: {len(self.requests)} requests, {self.answered} answered, "
                f"{self.disconnects} disconnects, {self.open_connections} of {self.connections} connections open"
            ) from None

    async def wait_for(self, count: int, within_s: float = 10.0) -> None:
        """Wait until so many requests have come, body and all."""
        await self.wait_until(lambda: len(self.requests) >= count, within_s)

    async def request(self, number: int = 1, within_s: float = 10.0) -> RecordedRequest:
        """The request of that number, from 1, once it is here."""
        await self.wait_for(number, within_s)
        return self.requests[number - 1]

    async def wait_for_disconnects(self, count: int, within_s: float = 10.0) -> None:
        await self.wait_until(lambda: self.disconnects >= count, within_s)

    async def _count(self, **changes: int) -> None:
        async with self._changed:
            for name, change in changes.items():
                setattr(self, name, getattr(self, name) + change)
            self._changed.notify_all()

    # ---- listening ----

    async def listen(self) -> None:
        """Accept connections (again), on the same port."""
        assert self._socket is not None, "use `async with`"
        self._server = await asyncio.start_server(self._connected, sock=self._socket)

    async def refuse(self) -> None:
        """Drop all connections and refuse new ones, as a dead process does. The port stays ours."""
        await self._stop()
        self._socket = self._bound(self.port)

    def _bound(self, port: int = 0) -> socket.socket:
        # Bound and not listening: the kernel refuses connections, and gives the port to nobody else.
        # asyncio sets TCP_NODELAY where the protocol is named, and with it alone answers of two packets come at once.
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((self.host, port))
        return made

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- serving ----

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # a task cancelled before it began has no finally

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._count(connections=1, open_connections=1)
            await _Connection(self, self.connections, reader, writer).serve()
        except (CloseConnection, ConnectionError, h11.RemoteProtocolError):
            pass
        except Exception as fault:  # noqa: BLE001
            self._faults.append(fault)
        finally:
            writer.close()
            # Stopping cancels us, maybe right here.
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()
            await self._count(open_connections=-1)

    async def record(self, request: RecordedRequest) -> None:
        async with self._changed:
            (self.probes if request.method == "GET" else self.requests).append(request)
            self._changed.notify_all()

    async def answer(self, request: RecordedRequest) -> Answer:
        if request.method == "GET":
            await self.probes_pass.wait()
            return self._answer_probe(request)
        if request.nth == self.close_on_nth:
            raise CloseConnection
        if self.hang:
            await asyncio.Event().wait()
        answer = self.respond(request)
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        return answer

    def _answer_probe(self, request: RecordedRequest) -> Answer:
        match request.target.partition("?")[0]:
            case "/health":
                return Answer()
            case "/v1/models":
                return Answer.json(
                    {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
                )
            case "/version":
                return Answer.json({"version": "0.32.0"})
            case "/metrics":
                return Answer(headers=[("content-type", "text/plain; version=0.0.4")], body=b"")
        return Answer.json({"detail": "Not Found"}, status=404)

    async def count_answer(self, *, complete: bool) -> None:
        await self._count(**{"answered" if complete else "disconnects": 1})


class _Connection:
    """One HTTP/1.1 connection; its reader runs all the time, so a client that leaves is noticed at once."""

    def __init__(
        self, engine: StubEngine, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine = engine
        self._number = number
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)
        self._left = False

    async def serve(self) -> None:
        nth = 0
        while (request := await self._read_request(nth + 1)) is not None:
            nth += 1
            await self._engine.record(request)
            answering = asyncio.create_task(self._answer(request))
            leaving = asyncio.create_task(self._watch())
            try:
                await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
                # A client may leave right after it has read the end: the answer is complete then all the same.
                complete = answering.done()
            finally:
                for task in (answering, leaving):
                    task.cancel()
                outcomes = await asyncio.gather(answering, leaving, return_exceptions=True)
            problem = outcomes[0]
            if isinstance(problem, ConnectionError) or not complete:
                await self._engine.count_answer(complete=False)
                return
            if isinstance(problem, BaseException):
                raise problem
            await self._engine.count_answer(complete=True)
            if self._http.our_state is h11.MUST_CLOSE or self._left:
                return
            self._http.start_next_cycle()

    async def _watch(self) -> None:
        """Return once the client has closed; what it pipelines meanwhile is kept for later."""
        while data := await self._reader.read(65536):
            self._http.receive_data(data)
        self._left = True

    async def _read_request(self, nth: int) -> RecordedRequest | None:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._write(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self._reader.read(65536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = [(name.decode(), value.decode("latin-1")) for name, value in head.headers.raw_items()]
                return RecordedRequest(
                    head.method.decode(), head.target.decode("latin-1"), headers, bytes(body), self._number, nth
                )
            else:  # ConnectionClosed
                return None

    async def _answer(self, request: RecordedRequest) -> None:
        answer = await self._engine.answer(request)
        headers = list(answer.headers)
        if answer.events is None:
            headers.append(("content-length", str(len(answer.body))))
        else:
            headers.append(("transfer-encoding", "chunked"))
        await self._write(h11.Response(status_code=answer.status, headers=headers))
        if answer.events is None:
            await self._write(h11.Data(data=answer.body))
        for number, event in enumerate(answer.events or ()):
            if answer.between_events is not None:
                await answer.between_events(number)
            await self._write(h11.Data(data=event))
        await self._write(h11.EndOfMessage())

    async def _write(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()
