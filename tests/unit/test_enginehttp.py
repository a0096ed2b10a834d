"""Calls to engines, against real servers on loopback: what is sent, what is sent again, what a cancel leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import random
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from extproc import enginehttp
from extproc.enginehttp import Call, EngineAnswer, EngineClient, EngineUnavailable
from tests.support.engines import Answer, RecordedRequest, StubEngine

Headers = list[tuple[bytes, bytes]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def _client(**options: Any) -> AsyncIterator[EngineClient]:
    values = {"connect_timeout_s": 2.0, "max_connections": 100, "keepalive_s": 30.0}
    async with EngineClient(**(values | options)) as client:
        yield client


class Server:
    """A raw server: ``script(connection, reader, writer)`` runs for each connection, numbered from 1."""

    def __init__(self, script: Callable[[int, Requests, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self._script = script
        self.connections = 0
        self.requests: list[bytes] = []
        self.open = 0
        self.changed = asyncio.Condition()
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 25)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._script(self.connections, Requests(self, reader), writer)
        finally:
            writer.close()
            self.open -= 1
            async with self.changed:
                self.changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)


class Requests:
    """The requests of one connection, each as its bytes."""

    def __init__(self, server: Server, reader: asyncio.StreamReader) -> None:
        self._server = server
        self.reader = reader

    async def next(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        request = head + await self.reader.readexactly(length)
        async with self._server.changed:
            self._server.requests.append(request)
            self._server.changed.notify_all()
        return request


async def _always_ok(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
    while True:
        await requests.next()
        writer.write(OK)
        await writer.drain()


async def _unavailable(call: Awaitable[EngineAnswer]) -> str:
    with pytest.raises(EngineUnavailable) as error:
        await call
    assert str(error.value)
    return error.value.reason


# ── what is sent, what comes back ────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_is_sent_as_given_and_with_nothing_added() -> None:
    headers: Headers = [
        (b"x-request-id", b"r-1"),
        (b"content-type", b"application/json"),
        (b"cookie", b"a=1"),
        (b"cookie", b"b=2"),
        (b"x-list", b"1, 2"),
        (b"x-list", b"3"),
        (b"x-utf-8", "é☃".encode()),
        (b"x-empty", b""),
    ]
    async with Server(_always_ok) as server, _client() as client:
        answer = await client.post(
            f"{server.url}/v1/completions?x=%41&y=a+b%2F&q={{}}", b'{"a":1}', headers, timeout_s=10
        )

    assert answer == EngineAnswer(200, [("content-length", "2")], b"ok")
    [request] = server.requests
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert first == b"POST /v1/completions?x=%41&y=a+b%2F&q={} HTTP/1.1"
    host = b"Host: " + server.url.removeprefix("http://").encode()
    assert lines == [host, *(name + b": " + value for name, value in headers), b"Content-Length: 7"]
    assert body == b'{"a":1}'


async def test_a_header_value_that_is_no_text_is_sent_as_latin_1() -> None:
    async with Server(_always_ok) as server, _client() as client:
        await client.post(server.url, b"", [(b"x-name", b"J\xf6rg")], timeout_s=10)

    assert "x-name: Jörg".encode() in server.requests[0].split(b"\r\n")


async def test_raw_bytes_in_a_query_are_percent_encoded() -> None:
    async with Server(_always_ok) as server, _client() as client:
        await client.post(f"{server.url}/v1?q=" + "é".encode().decode("latin-1"), b"", [], timeout_s=10)

    assert server.requests[0].startswith(b"POST /v1?q=%C3%A9 HTTP/1.1\r\n")


@pytest.mark.parametrize("size", [0, 1, 100_000, 6 * 1024 * 1024])
async def test_bodies_of_any_size_arrive_whole(size: int) -> None:
    body = random.Random(size).randbytes(size)
    async with Server(_always_ok) as server, _client() as client:
        answer = await client.post(server.url, body, [(b"content-type", b"application/json")], timeout_s=30)

    assert answer.body == b"ok"
    head, _, received = server.requests[0].partition(b"\r\n\r\n")
    assert f"Content-Length: {size}".encode() in head.split(b"\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert received == body


@pytest.mark.parametrize("status", [200, 201, 400, 401, 404, 429, 500, 503])
async def test_the_answer_is_the_engines_whatever_its_status(status: int) -> None:
    def respond(request: RecordedRequest) -> Answer:
        return Answer(status, [("Content-Type", "application/json"), ("X-A", "1"), ("x-a", "2")], b'{"error":{}}')

    async with StubEngine(respond=respond) as engine, _client() as client:
        answer = await client.post(engine.url, b"{}", [], timeout_s=10)

    assert (answer.status, answer.body) == (status, b'{"error":{}}')
    assert [pair for pair in answer.headers if pair[0] != "content-length"] == [
        ("content-type", "application/json"),
        ("x-a", "1"),
        ("x-a", "2"),
    ]
    assert answer.header("x-a") == "1"
    assert answer.header("retry-after") is None


async def test_a_chunked_answer_is_put_together() -> None:
    async with StubEngine(respond=lambda request: Answer.stream("a", "b")) as engine, _client() as client:
        answer = await client.post(engine.url, b"{}", [], timeout_s=10)

    assert answer.body == b'data: "a"\n\ndata: "b"\n\ndata: [DONE]\n\n'


async def test_an_answer_without_length_ends_with_the_connection() -> None:
    async def script(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")

    async with Server(script) as server, _client() as client:
        assert (await client.post(server.url, b"{}", [], timeout_s=10)).body == b"until the end"


async def test_compression_is_not_asked_for_and_not_undone() -> None:
    packed = gzip.compress(b"{}")

    def respond(request: RecordedRequest) -> Answer:
        return Answer(headers=[("content-encoding", "gzip")], body=packed)

    async with StubEngine(respond=respond) as engine, _client() as client:
        answer = await client.post(engine.url, b"{}", [], timeout_s=10)

    assert engine.requests[0].header("accept-encoding") is None
    assert (answer.header("content-encoding"), answer.body) == ("gzip", packed)


async def test_redirects_are_not_followed() -> None:
    async with StubEngine() as other, _client() as client:
        moved = Answer(307, [("location", f"{other.url}/elsewhere")])
        async with StubEngine(respond=lambda request: moved) as engine:
            answer = await client.post(engine.url, b"{}", [], timeout_s=10)

        assert (answer.status, answer.header("location")) == (307, f"{other.url}/elsewhere")
        assert other.requests == []


async def test_cookies_are_not_kept() -> None:
    def respond(request: RecordedRequest) -> Answer:
        return Answer(headers=[("set-cookie", "session=1; Path=/"), ("set-cookie", "b=2")])

    async with StubEngine(respond=respond) as engine, _client() as client:
        first = await client.post(engine.url, b"{}", [], timeout_s=10)
        await client.post(engine.url, b"{}", [], timeout_s=10)

    assert [value for name, value in first.headers if name == "set-cookie"] == ["session=1; Path=/", "b=2"]
    assert [request.header("cookie") for request in engine.requests] == [None, None]


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with StubEngine() as engine, StubEngine() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with _client() as client:
            assert (await client.post(engine.url, b"{}", [], timeout_s=10)).status == 200

    assert (len(engine.requests), proxy.connections) == (1, 0)


async def test_netrc_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login u password p\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))

    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)

    assert engine.requests[0].header("authorization") is None


async def test_an_answer_beyond_all_measure_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enginehttp, "MAX_ANSWER_BYTES", 100_000)
    answers = [b"x" * 100_000, b"x" * 5_000_000]

    async with StubEngine(respond=lambda request: Answer(body=answers.pop(0))) as engine, _client() as client:
        assert len((await client.post(engine.url, b"{}", [], timeout_s=10)).body) == 100_000
        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10)) == "too_large"
        await engine.wait_until(lambda: engine.open_connections == 0)


@pytest.mark.parametrize("status", [400, 499])
async def test_of_a_large_refusal_only_the_head_is_kept(status: int) -> None:
    answers = [b"x" * enginehttp.MAX_REFUSAL_BYTES, b"x" * 5_000_000]

    async with StubEngine(respond=lambda _: Answer(status, body=answers.pop(0))) as engine, _client() as client:
        whole = await client.post(engine.url, b"{}", [], timeout_s=10)
        assert (whole.status, len(whole.body), whole.cut_off) == (status, enginehttp.MAX_REFUSAL_BYTES, False)
        head = await client.post(engine.url, b"{}", [], timeout_s=10)
        assert (head.status, head.body, head.cut_off) == (status, b"", True)
        assert head.header("content-length") == "5000000"
        await engine.wait_until(lambda: engine.open_connections == 0)


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_connections_are_used_again() -> None:
    async with StubEngine() as engine, _client() as client:
        for _ in range(5):
            await client.post(engine.url, b"{}", [], timeout_s=10)

        assert engine.connections == 1
        assert [request.nth for request in engine.requests] == [1, 2, 3, 4, 5]


async def test_idle_connections_are_dropped() -> None:
    async with StubEngine() as engine, _client(keepalive_s=0.05) as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)
        await engine.wait_until(lambda: engine.open_connections == 0)
        await client.post(engine.url, b"{}", [], timeout_s=10)

        assert engine.connections == 2


async def test_closing_the_client_closes_its_connections() -> None:
    async with StubEngine() as engine:
        async with _client() as client:
            await client.post(engine.url, b"{}", [], timeout_s=10)
            assert engine.open_connections == 1
        await engine.wait_until(lambda: engine.open_connections == 0)


async def test_a_call_tells_when_the_answer_began() -> None:
    begun = asyncio.Event()

    async def hold(number: int) -> None:
        if number == 1:
            await begun.wait()

    def respond(request: RecordedRequest) -> Answer:
        return Answer(events=[b"a", b"b"], between_events=hold)

    async with StubEngine(respond=respond) as engine, _client() as client:
        call = Call()
        assert (call.reused, call.answering_since) == (False, None)
        before = time.monotonic()
        task = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=10, call=call))
        async with asyncio.timeout(10):
            while call.answering_since is None:
                await asyncio.sleep(0)
        assert before <= call.answering_since <= time.monotonic()
        assert not task.done()
        begun.set()
        assert (await task).body == b"ab"
        assert not call.reused

        again = Call()
        await client.post(engine.url, b"{}", [], timeout_s=10, call=again)
        assert again.reused


async def test_a_call_tells_whether_the_engine_may_know_of_the_request() -> None:
    async with StubEngine(refusing=True) as engine, _client(max_connections=1) as client:
        refused, sent, waiting = Call(), Call(), Call()
        await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10, call=refused))
        assert not refused.sent

        await engine.listen()
        engine.hang = True
        first = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30, call=sent))
        await engine.wait_for(1)
        assert sent.sent

        second = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30, call=waiting))
        await asyncio.sleep(0)
        await _cancelled(second)
        assert not waiting.sent
        await _cancelled(first)


# ── connections that have gone stale ─────────────────────────────────────────────────────────────────────────────────


async def test_a_stale_connection_is_replaced_once_with_the_same_request() -> None:
    """The server closes on the second request of a connection, without an answer."""
    async with StubEngine() as engine, _client() as client:
        engine.close_on_nth = 2
        headers = [(b"x-request-id", b"first")]
        await client.post(f"{engine.url}/a?b=c", b"one", headers, timeout_s=10)
        call = Call()

        answer = await client.post(
            f"{engine.url}/a?b=c", b"two", [(b"x-request-id", b"second")], timeout_s=10, call=call
        )

        assert answer.status == 200
        assert call.reused
        assert [(request.connection, request.nth) for request in engine.requests] == [(1, 1), (1, 2), (2, 1)]
        stale, fresh = engine.requests[1:]
        assert (stale.target, stale.body) == (fresh.target, fresh.body) == ("/a?b=c", b"two")
        assert [*stale.headers, ("Connection", "close")] == fresh.headers
        await engine.wait_until(lambda: engine.answered == 2)  # it has run each of the two requests once


async def test_a_connection_that_was_closed_while_idle_costs_nothing() -> None:
    async def script(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(OK)

    async with Server(script) as server, _client() as client:
        for _ in range(20):
            assert (await client.post(server.url, b"{}", [], timeout_s=10)).status == 200
            await server.until(lambda: server.open == 0)

    assert len(server.requests) == 20


async def test_twenty_rounds_of_closing_at_any_moment() -> None:
    async def script(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(OK)
        await writer.drain()
        await requests.reader.read(1)  # close as the next request comes in

    async with Server(script) as server, _client() as client:
        for number in range(20):
            assert (await client.post(server.url, b"%d" % number, [], timeout_s=10)).body == b"ok"


async def test_a_large_body_on_a_stale_connection() -> None:
    body = random.Random(1).randbytes(3 * 1024 * 1024)
    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)
        engine.close_on_nth = 2

        assert (await client.post(engine.url, body, [], timeout_s=30)).status == 200

        assert [len(request.body) for request in engine.requests] == [2, len(body), len(body)]
        assert engine.requests[-1].body == body


async def test_a_new_connection_that_closes_is_not_replaced() -> None:
    async with StubEngine() as engine, _client() as client:
        engine.close_on_nth = 1

        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10)) == "disconnected"

        assert len(engine.requests) == 1


async def test_the_replacement_is_not_replaced() -> None:
    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)

        def close(request: RecordedRequest) -> Answer:
            raise ConnectionError

        engine.respond = close
        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10)) == "disconnected"

        assert [(request.connection, request.nth) for request in engine.requests] == [(1, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nwhole\r\n",
        b"HTTP/1.1 2OO OK\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
@pytest.mark.parametrize("nth", [1, 2])
async def test_nothing_is_sent_again_once_something_came_back(begun: bytes, nth: int) -> None:
    async def script(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        for _ in range(nth - 1):
            await requests.next()
            writer.write(OK)
        await requests.next()
        writer.write(begun)

    async with Server(script) as server, _client() as client:
        for _ in range(nth - 1):
            await client.post(server.url, b"{}", [], timeout_s=10)

        assert await _unavailable(client.post(server.url, b"{}", [], timeout_s=10)) == "disconnected"

        assert (server.connections, len(server.requests)) == (1, nth)


async def test_a_reset_connection_counts_as_stale() -> None:
    async def script(number: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.next()
        writer.write(OK)
        await requests.next()
        if number == 1:
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # close with a reset
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()

    async with Server(script) as server, _client() as client:
        await client.post(server.url, b"one", [], timeout_s=10)
        assert (await client.post(server.url, b"two", [], timeout_s=10)).body == b"ok"

        assert (server.connections, len(server.requests)) == (2, 3)


# ── no answer ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_refused_connection() -> None:
    async with StubEngine(refusing=True) as engine, _client() as client:
        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10)) == "connect"
        call = Call()
        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10, call=call)) == "connect"
        assert (call.reused, call.answering_since) == (False, None)


async def test_an_engine_that_went_away_with_its_connections() -> None:
    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)
        await engine.refuse()

        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=10)) == "connect"
        assert len(engine.requests) == 1


async def test_a_name_that_does_not_resolve() -> None:
    async with _client() as client:
        assert await _unavailable(client.post("http://no-such-host.invalid:1/", b"{}", [], timeout_s=20)) == "connect"


@contextlib.contextmanager
def _full_backlog() -> Any:
    """A listener that answers no handshake: its queue is full."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_connection_that_does_not_come_about_in_time() -> None:
    with _full_backlog() as url:
        async with _client(connect_timeout_s=0.2) as client:
            started = time.monotonic()
            assert await _unavailable(client.post(url, b"{}", [], timeout_s=30)) == "connect"
            assert 0.2 <= time.monotonic() - started < 5

            assert await _unavailable(client.post(url, b"{}", [], timeout_s=0.05)) == "timeout"


async def test_an_engine_that_does_not_answer_in_time() -> None:
    async with StubEngine() as engine, _client() as client:
        engine.hang = True
        started = time.monotonic()

        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=0.2)) == "timeout"

        assert 0.2 <= time.monotonic() - started < 5
        await engine.wait_for_disconnects(1)
        await engine.wait_until(lambda: engine.open_connections == 0)


async def test_the_time_is_for_the_whole_answer() -> None:
    forever = asyncio.Event()

    async def hold(number: int) -> None:
        if number == 1:
            await forever.wait()

    answer = Answer(events=[b"a", b"b"], between_events=hold)
    async with StubEngine(respond=lambda request: answer) as engine, _client() as client:
        call = Call()
        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=0.2, call=call)) == "timeout"

        assert call.answering_since is not None
        await engine.wait_until(lambda: engine.open_connections == 0)


async def test_the_time_is_for_both_tries_together() -> None:
    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)
        engine.close_on_nth = 2
        engine.hang = True
        started = time.monotonic()

        assert await _unavailable(client.post(engine.url, b"{}", [], timeout_s=0.3)) == "timeout"

        assert 0.3 <= time.monotonic() - started < 5
        assert len(engine.requests) == 3


async def test_without_a_limit_the_answer_may_take_its_time() -> None:
    async with StubEngine(respond=lambda request: Answer(body=b"late", delay_s=0.2)) as engine, _client() as client:
        assert (await client.post(engine.url, b"{}", [], timeout_s=None)).body == b"late"


async def test_no_place_in_the_pool() -> None:
    async with StubEngine() as engine, _client(connect_timeout_s=0.1, max_connections=1) as client:
        engine.hang = True
        first = asyncio.create_task(client.post(engine.url, b"1", [], timeout_s=30))
        await engine.wait_for(1)

        assert await _unavailable(client.post(engine.url, b"2", [], timeout_s=30)) == "connect"

        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        engine.hang = False
        assert (await client.post(engine.url, b"3", [], timeout_s=10)).status == 200
        assert [request.body for request in engine.requests] == [b"1", b"3"]


# ── cancelled calls ──────────────────────────────────────────────────────────────────────────────────────────────────


async def _cancelled(task: asyncio.Task[EngineAnswer]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with StubEngine() as engine, _client() as client:
        engine.hang = True
        task = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30))
        await engine.wait_for(1)

        await _cancelled(task)

        await engine.wait_for_disconnects(1, within_s=1)


async def test_a_call_that_is_cancelled_while_it_sends_closes_its_connection() -> None:
    async def script(_: int, requests: Requests, writer: asyncio.StreamWriter) -> None:
        await requests.reader.readuntil(b"\r\n\r\n")
        started.set()
        await may_read.wait()
        while await requests.reader.read(65536):
            pass

    started, may_read = asyncio.Event(), asyncio.Event()
    async with Server(script) as server, _client() as client:
        task = asyncio.create_task(client.post(server.url, b"x" * (1 << 26), [], timeout_s=30))
        await asyncio.wait_for(started.wait(), 10)

        await _cancelled(task)

        may_read.set()
        await server.until(lambda: server.open == 0)


async def test_a_call_that_is_cancelled_while_it_reads_closes_its_connection() -> None:
    forever = asyncio.Event()

    async def hold(number: int) -> None:
        if number == 1:
            await forever.wait()

    answer = Answer(events=[b"a", b"b"], between_events=hold)
    async with StubEngine(respond=lambda request: answer) as engine, _client() as client:
        call = Call()
        task = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30, call=call))
        async with asyncio.timeout(10):
            while call.answering_since is None:
                await asyncio.sleep(0)

        await _cancelled(task)

        await engine.wait_for_disconnects(1, within_s=1)


async def test_calls_cancelled_before_they_have_a_connection_leave_the_pool_whole() -> None:
    async with StubEngine() as engine, _client(max_connections=1) as client:
        tasks = [asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in tasks:
            await _cancelled(task)

        async with asyncio.timeout(1):
            assert (await client.post(engine.url, b"{}", [], timeout_s=10)).status == 200


async def test_after_hundreds_of_cancels_at_random_points_the_next_call_is_served_at_once() -> None:
    chance = random.Random(37)

    async def slowly(request: RecordedRequest) -> Answer:
        for _ in range(chance.randrange(5)):
            await asyncio.sleep(0)
        return Answer(body=b"x" * chance.randrange(30_000))

    async with StubEngine(respond=slowly) as engine, _client(max_connections=4) as client:
        done = 0
        for _ in range(50):
            tasks = [
                asyncio.create_task(client.post(engine.url, b"y" * chance.randrange(30_000), [], timeout_s=30))
                for _ in range(10)
            ]
            for task in tasks:
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                task.cancel()
            done += sum(not isinstance(r, BaseException) for r in await asyncio.gather(*tasks, return_exceptions=True))
        assert done < 500  # most were cancelled

        async with asyncio.timeout(1):
            assert (await client.post(engine.url, b"{}", [], timeout_s=10)).status == 200
        pool = client._pooled.connector
        assert pool is not None
        assert len(pool._acquired) == 0


async def test_file_descriptors_stay_constant() -> None:
    async with StubEngine() as engine, _client() as client:
        await client.post(engine.url, b"{}", [], timeout_s=10)
        files = len(os.listdir("/proc/self/fd"))

        for number in range(100):
            engine.hang = number % 2 == 0
            task = asyncio.create_task(client.post(engine.url, b"{}", [], timeout_s=30))
            await engine.wait_for(number + 2)
            if engine.hang:
                await _cancelled(task)
            else:
                await task

        await engine.wait_until(lambda: engine.open_connections <= 1)
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) > files:
                await asyncio.sleep(0.01)


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_engine_with_a_certificate_that_nobody_vouches_for_is_not_spoken_to(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    requests: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            requests.append(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    async with server, _client() as client:
        port = server.sockets[0].getsockname()[1]
        assert await _unavailable(client.post(f"https://localhost:{port}/", b"secret", [], timeout_s=10)) == "connect"
    assert requests in ([], [b""])
