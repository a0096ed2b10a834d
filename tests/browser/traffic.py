"""Requests of every kind through a whole gateway, each under an id that says what it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import httpx

from extproc.demo.stack import DemoEngine, Stack

# Slow enough for each phase to have a width that can be seen.
ENGINE_ARGUMENTS: Final = ("--prefill-us-per-token", "400", "--decode-ms-per-token", "4", "--blocks", "512")

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    # What engines do here is asked of them: nothing may keep the next request from them.
    "fleet": {"health": {"interval_s": 0.5, "unhealthy_after": 1_000_000}, "outlier": {"consecutive": 1_000_000}},
    "routing": {"prefill_policy": "round_robin", "decode_policy": "round_robin"},
    "prefill": {"on_failure": "decode"},
    "limits": {"json_depth": 64},
    "life": {"notice_s": 0.0, "drain_s": 5.0},
    # A service that is slow, on a busy machine, must not pass for one that decided to bypass.
    "envoy": {"fail_open": False, "message_timeout_s": 30},
}


def patient(bootstrap: str) -> str:
    """Nor for a dead one."""
    assert "timeout: 1s" in bootstrap
    return bootstrap.replace("timeout: 1s", "timeout: 20s")


CHAT: Final = "/v1/chat/completions"


class Traffic:
    """What a client does. Methods return once their request is over; where it took several, the id of the one."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self._stack = stack
        self._client = client

    async def post(self, name: str, path: str = CHAT, *, words: int = 120, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": f"{name} " + "what is prefill? " * (words // 3)}]
        full = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | body
        return await self._client.post(f"{self._stack.url}{path}", json=full, headers={"x-request-id": name})

    @contextlib.asynccontextmanager
    async def failing(self, role: str, mode: str, **options: Any) -> AsyncIterator[None]:
        """All engines of a role fail in one of the simulated engines' ways."""
        engines = [engine for engine in self._stack.engines if engine.role == role]
        try:
            for engine in engines:
                await self._stack.fail(engine, mode, **options)
            yield
        finally:
            for engine in engines:
                await self.heal(engine)

    async def heal(self, engine: DemoEngine) -> None:
        (await self._client.delete(f"{engine.control_url}/sim/fail")).raise_for_status()

    # ── what goes well ────────────────────────────────────────────────────────────────────────────────────────────

    async def plain(self, name: str) -> None:
        assert (await self.post(name)).status_code == 200

    async def streamed(self, name: str) -> None:
        assert (await self.post(name, stream=True)).text.endswith("data: [DONE]\n\n")

    async def long_prompt(self, name: str) -> None:
        assert (await self.post(name, words=900, stream=True)).status_code == 200

    async def bypassed(self, name: str) -> None:
        answer = await self._client.get(f"{self._stack.url}/v1/models", headers={"x-request-id": name})
        assert answer.status_code == 200

    async def several_choices(self, name: str) -> None:
        assert (await self.post(name, n=2, temperature=1)).status_code == 200

    # ── what goes well all the same ───────────────────────────────────────────────────────────────────────────────

    async def moved_to_another_prefiller(self, name: str) -> str:
        broken = self._stack.named("prefill-1")
        await self._stack.fail(broken, "status", status=500, leg="prefill")
        try:
            for attempt in range(1, 5):  # in turn: one of them meets it first
                tried = f"{name}-{attempt}"
                assert (await self.post(tried, stream=True)).status_code == 200
                if (await self._stack.exchange(tried, over))["failed_attempts"]:
                    return tried
        finally:
            await self.heal(broken)
        raise AssertionError("no request met the failing prefiller")

    async def fallback(self, name: str) -> None:
        async with self.failing("prefill", "null_params"):
            assert (await self.post(name, stream=True)).status_code == 200

    async def moved_to_another_decoder(self, name: str) -> str:
        gone = self._stack.named("decode-1")
        await self._stack.fail(gone, "refuse")
        try:
            for attempt in range(1, 5):
                tried = f"{name}-{attempt}"
                assert (await self.post(tried, stream=True)).status_code == 200
                if (await self._stack.exchange(tried, over))["upstream_attempts"] == 2:
                    return tried
        finally:
            await self.heal(gone)
        raise AssertionError("no request met the refusing decoder")

    # ── what does not ─────────────────────────────────────────────────────────────────────────────────────────────

    async def refused_by_us(self, name: str) -> None:
        content = b'{"messages": ' + b"[" * 100 + b"]" * 100 + b"}"
        headers = {"x-request-id": name, "content-type": "application/json"}
        answer = await self._client.post(f"{self._stack.url}{CHAT}", content=content, headers=headers)
        assert answer.status_code == 400

    async def refused_by_the_prefiller(self, name: str) -> None:
        assert (await self.post(name, temperature=-1)).status_code == 400

    async def failed_by_the_decoder(self, name: str) -> None:
        """It never read the blocks: they are released."""
        async with self.failing("decode", "status", status=500, leg="decode", count=1):
            assert (await self.post(name)).status_code == 500

    async def died_mid_stream(self, name: str) -> None:
        async with self.failing("decode", "die_mid_stream", tokens=12):
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                await self.post(name, stream=True)

    async def left_during_the_prefill(self, name: str) -> None:
        call = asyncio.create_task(self.post(name, words=1500))
        await _until(self._prefilling)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async def left_mid_stream(self, name: str) -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": name}], "stream": True, "max_tokens": 2000}
        body["ignore_eos"] = True
        async with self._client.stream(
            "POST", f"{self._stack.url}{CHAT}", json=body, headers={"x-request-id": name}
        ) as response:
            received = ""
            async for text in response.aiter_text():
                received += text
                if received.count("data: ") > 20:
                    break

    @contextlib.asynccontextmanager
    async def open(self, name: str, **body: Any) -> AsyncIterator[None]:
        """A request that runs meanwhile; its client leaves at the end."""
        call = asyncio.create_task(self.post(name, **body))
        try:
            yield
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _prefilling(self) -> bool:
        states = [
            (await self._client.get(f"{engine.control_url}/sim/state")).json()
            for engine in self._stack.engines
            if engine.role == "prefill"
        ]
        return any(state["running"] for state in states)


def over(record: dict[str, Any]) -> bool:
    """Whether all is known of a request: what we did, and how Envoy saw it end."""
    return "outcome" in record and "decision" in record


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


async def raw(stack: Stack, name: bytes, path: bytes) -> None:
    """A request that no well-behaved client sends: bytes as they are."""
    host, _, port = stack.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nX-Request-Id: %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (path, name, len(body), body)
    )
    async with asyncio.timeout(20):
        assert (await reader.read()).startswith(b"HTTP/1.1 ")
    writer.close()
    await writer.wait_closed()
