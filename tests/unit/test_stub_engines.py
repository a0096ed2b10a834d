"""The recording engines, from the outside: over real connections."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.engines import BROKEN_JSON, Answer, CloseConnection, RecordedRequest, StubEngine

CHAT = "/v1/chat/completions"


async def post(engine: StubEngine, body: bytes = b"{}", request_id: str = "u-1") -> httpx.Response:
    async with httpx.AsyncClient(headers={"X-Request-Id": request_id}, verify=False) as client:
        return await client.post(engine.url + CHAT, content=body)


async def exchange(engine: StubEngine, raw: bytes) -> bytes:
    """Send bytes, read until the engine closes."""
    reader, writer = await asyncio.open_connection(engine.host, engine.port)
    writer.write(raw)
    try:
        return await reader.read()
    finally:
        writer.close()


class TestRecording:
    async def test_everything_as_sent(self) -> None:
        async with StubEngine() as engine:
            answer = await exchange(
                engine,
                b"POST /v1/x%20y?q=%E9&q=2 HTTP/1.1\r\nHost: a\r\nX-Dup: 1\r\nx-dup: \xe9\r\nConnection: close\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n3\r\n\x00{}\r\n0\r\n\r\n",
            )
            assert answer.startswith(b"HTTP/1.1 200 \r\n")
            assert engine.requests == [
                RecordedRequest(
                    "POST",
                    "/v1/x%20y?q=%E9&q=2",
                    [
                        ("Host", "a"),
                        ("X-Dup", "1"),
                        ("x-dup", "é"),
                        ("Connection", "close"),
                        ("Transfer-Encoding", "chunked"),
                    ],
                    b"\x00{}",
                    connection=1,
                    nth=1,
                )
            ]
            with pytest.raises(AssertionError, match="2 lines of X-Dup"):
                engine.requests[0].header("X-Dup")

    async def test_connections_and_their_requests_are_numbered(self) -> None:
        async with StubEngine() as engine:
            async with httpx.AsyncClient() as client:
                for _ in range(2):
                    await client.post(engine.url + CHAT)
            await post(engine)
            assert [(request.connection, request.nth) for request in engine.requests] == [(1, 1), (1, 2), (2, 1)]
            await engine.wait_until(lambda: engine.open_connections == 0)
            assert (engine.connections, engine.answered, engine.disconnects) == (2, 3, 0)

    async def test_pipelined(self) -> None:
        async with StubEngine("decode") as engine:
            one = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
            answers = await exchange(
                engine, one + one.replace(b"/a", b"/b").replace(b"Host", b"Connection: close\r\nHost")
            )
            assert answers.count(b"HTTP/1.1 200") == 2
            assert [request.target for request in engine.requests] == ["/a", "/b"]

    async def test_probes_are_apart(self) -> None:
        async with StubEngine() as engine, httpx.AsyncClient(base_url=engine.url) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"] == [{"id": "m", "object": "model"}]
            assert (await client.get("/metrics")).text == ""
            assert (await client.get("/nowhere")).status_code == 404
            assert [probe.target for probe in engine.probes] == ["/health", "/v1/models", "/metrics", "/nowhere"]
            assert engine.requests == []

    async def test_waiting(self) -> None:
        async with StubEngine() as engine:
            waiting = asyncio.create_task(engine.request(2))
            await post(engine)
            assert not waiting.done()
            await post(engine, b'{"n":2}')
            assert (await waiting).json() == {"n": 2}
            with pytest.raises(TimeoutError, match=r"prefill: 2 requests, 2 answered, 0 disconnects"):
                await engine.wait_for(3, within_s=0.01)


class TestAnswers:
    async def test_prefill(self) -> None:
        async with StubEngine() as engine:
            response = await post(engine, request_id="u-1")
            assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
            assert response.json()["kv_transfer_params"] == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": "e1",
                "remote_block_ids": [[1, 2]],
                "remote_request_id": "chatcmpl-u-1-0a1b2c3d",
                "remote_host": "10.0.0.9",
                "remote_port": 5600,
                "tp_size": 1,
            }

    async def test_decode(self) -> None:
        async with StubEngine("decode") as engine:
            assert (await post(engine)).json()["choices"][0]["message"]["content"] == "abc"
            streamed = await post(engine, b'{"stream": true}')
            assert streamed.headers["content-type"] == "text/event-stream"
            assert streamed.text.count("data: ") == 4
            assert streamed.text.endswith("data: [DONE]\n\n")

    async def test_configured(self) -> None:
        async with StubEngine(respond=lambda request: Answer(422, [("X-A", "1")], request.body * 2)) as engine:
            response = await post(engine, b"ab")
            assert (response.status_code, response.headers["x-a"], response.content) == (422, "1", b"abab")
            engine.respond = lambda _: BROKEN_JSON
            with pytest.raises(ValueError, match="Unterminated string"):
                (await post(engine)).json()

    async def test_awaited(self) -> None:
        gate = asyncio.Event()

        async def respond(_: RecordedRequest) -> Answer:
            await gate.wait()
            return Answer(204)

        async with StubEngine(respond=respond) as engine:
            posting = asyncio.create_task(post(engine))
            await engine.wait_for(1)
            assert not posting.done()
            gate.set()
            assert (await posting).status_code == 204

    async def test_delay(self) -> None:
        async with StubEngine(respond=lambda _: Answer(delay_s=0.05)) as engine:
            started = asyncio.get_running_loop().time()
            await post(engine)
            assert asyncio.get_running_loop().time() - started >= 0.05

    async def test_events_one_by_one(self) -> None:
        gates = [asyncio.Event() for _ in range(3)]
        answer = Answer.stream({"n": 0}, {"n": 1})
        answer.between_events = lambda number: gates[number].wait()  # type: ignore[assignment, return-value]
        async with (
            StubEngine("decode", respond=lambda _: answer) as engine,
            httpx.AsyncClient() as client,
            client.stream("POST", engine.url + CHAT) as response,
        ):
            chunks = response.aiter_raw()
            for gate, expected in zip(gates, (b'{"n": 0}', b'{"n": 1}', b"[DONE]"), strict=True):
                gate.set()
                assert await anext(chunks) == b"data: " + expected + b"\n\n"

    async def test_fault_of_a_respond_fails_the_test(self) -> None:
        def respond(_: RecordedRequest) -> Answer:
            raise LookupError("my mistake")

        async def play() -> None:
            async with StubEngine(respond=respond) as engine:
                with pytest.raises(httpx.RemoteProtocolError):
                    await post(engine)

        with pytest.raises(LookupError, match="my mistake"):
            await play()


class TestMisbehaviour:
    async def test_refusing(self) -> None:
        async with StubEngine(refusing=True) as engine:
            with pytest.raises(httpx.ConnectError):
                await post(engine)
            await engine.listen()
            assert (await post(engine)).status_code == 200
            port = engine.port
            async with httpx.AsyncClient() as client:
                await client.post(engine.url + CHAT)
                await engine.refuse()
                with pytest.raises(httpx.ConnectError):
                    await client.post(engine.url + CHAT)
            await engine.listen()
            assert (await post(engine)).status_code == 200
            assert engine.port == port

    async def test_hanging_and_the_client_leaving(self) -> None:
        async with StubEngine() as engine:
            engine.hang = True
            posting = asyncio.create_task(post(engine))
            await engine.wait_for(1)
            assert not posting.done()
            posting.cancel()
            await engine.wait_for_disconnects(1)
            assert (engine.answered, engine.disconnects) == (0, 1)

    async def test_client_leaving_in_mid_stream(self) -> None:
        forever = asyncio.Event()

        async def hold(number: int) -> None:
            if number == 1:
                await forever.wait()

        answer = Answer.stream(1, 2)
        answer.between_events = hold
        async with StubEngine("decode", respond=lambda _: answer) as engine, httpx.AsyncClient() as client:
            async with client.stream("POST", engine.url + CHAT) as response:
                assert await anext(response.aiter_raw()) == b"data: 1\n\n"
            await engine.wait_for_disconnects(1)

    async def test_closing_on_the_second_request(self) -> None:
        async with StubEngine() as engine, httpx.AsyncClient() as client:
            engine.close_on_nth = 2
            assert (await client.post(engine.url + CHAT)).status_code == 200
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(engine.url + CHAT)
            assert (await client.post(engine.url + CHAT)).status_code == 200
            assert [(request.connection, request.nth) for request in engine.requests] == [(1, 1), (1, 2), (2, 1)]

    async def test_dying_in_mid_stream(self) -> None:
        async def die(number: int) -> None:
            if number == 1:
                raise CloseConnection

        answer = Answer.stream(1, 2)
        answer.between_events = die
        async with StubEngine("decode", respond=lambda _: answer) as engine:
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                await post(engine)

    async def test_leaving_ends_what_hangs(self) -> None:
        async with StubEngine() as engine:
            engine.hang = True
            posting = asyncio.create_task(post(engine))
            await engine.wait_for(1)
        with pytest.raises(httpx.RemoteProtocolError):
            await posting
        assert engine.open_connections == 0
