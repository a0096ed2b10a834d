"""The simulated engine's failure switches, its control endpoint and its command line."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from extproc.sim.config import SimConfig
from extproc.sim.failures import Failure
from extproc.sim.server import SimEngine

PATH = "/v1/completions"
BODY = {"prompt": [1, 2, 3], "max_tokens": 4}
PREFILL = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with SimEngine(SimConfig(prefill_us_per_token=0, decode_ms_per_token=0, eos_after=500)) as engine:
        yield engine


@pytest.fixture
async def client(engine: SimEngine) -> AsyncIterator[httpx.AsyncClient]:
    # A fresh connection for each request: an idle one would meet the closing of the port in its own way.
    headers = {"Connection": "close"}
    async with httpx.AsyncClient(
        base_url=engine.url, trust_env=False, verify=False, timeout=10, headers=headers
    ) as client:
        yield client


async def test_a_status_is_given_count_times(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("429", count=2, retry_after=3)
    for _ in range(2):
        response = await client.post(PATH, json=BODY)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert response.json()["error"]["code"] == 429
    assert (await client.post(PATH, json=BODY)).status_code == 200
    assert [record.outcome for record in engine.requests] == ["failed", "failed", "completed"]


async def test_a_failure_can_be_for_one_leg_only(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("503", leg="prefill")
    assert (await client.post(PATH, json=BODY)).status_code == 200
    response = await client.post(PATH, json=PREFILL)
    assert (response.status_code, "retry-after" in response.headers) == (503, False)
    await engine.heal()
    assert (await client.post(PATH, json=PREFILL)).status_code == 200


async def test_refusing_closes_the_port_and_resuming_opens_it(engine: SimEngine, client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json=BODY)).status_code == 200
    await engine.fail("refuse")
    for _ in range(2):
        with pytest.raises(httpx.ConnectError):
            await client.post(PATH, json=BODY)
    await engine.heal()
    assert (await client.post(PATH, json=BODY)).status_code == 200


async def test_a_request_in_progress_survives_refusing() -> None:
    config = SimConfig(decode_ms_per_token=5, eos_after=500)
    async with SimEngine(config) as engine, httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        running = asyncio.create_task(client.post(PATH, json={**BODY, "max_tokens": 20}))
        await engine.until(lambda: engine.engine.running == 1)
        await engine.fail("refuse")
        assert (await running).status_code == 200


async def test_a_reset_connection(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("reset", count=1)
    with pytest.raises((httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)):
        await client.post(PATH, json=BODY)
    assert engine.requests == []
    assert (await client.post(PATH, json=BODY)).status_code == 200


async def test_hanging_ends_when_the_client_gives_up(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("hang", count=1)
    with pytest.raises(httpx.ReadTimeout):
        await client.post(PATH, json=BODY, timeout=0.05)
    assert [record.outcome for record in engine.requests] == ["failed"]
    assert (await client.post(PATH, json=BODY)).status_code == 200


async def test_a_slow_answer_is_right(engine: SimEngine, client: httpx.AsyncClient) -> None:
    right = (await client.post(PATH, json=BODY)).json()["choices"]
    await engine.fail("slow", delay_s=0.1)
    started = asyncio.get_running_loop().time()
    assert (await client.post(PATH, json=BODY)).json()["choices"] == right
    assert asyncio.get_running_loop().time() - started >= 0.1


async def test_prefills_without_usable_params(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("null_params", count=1)
    await engine.fail("no_params_key", count=1)
    await engine.fail("broken_json", count=1)
    without, missing, broken = [await client.post(PATH, json=PREFILL) for _ in range(3)]
    assert [response.status_code for response in (without, missing, broken)] == [200, 200, 200]
    assert without.json()["kv_transfer_params"] is None
    assert "kv_transfer_params" not in missing.json()
    assert broken.headers["content-type"] == "application/json"
    with pytest.raises(json.JSONDecodeError):
        broken.json()
    assert len(engine.pinned) == 1  # the broken one's: it was a real prefill


async def test_a_connection_closed_without_an_answer(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("close_without_answer", count=1)
    with pytest.raises(httpx.RemoteProtocolError, match="without sending a response"):
        await client.post(PATH, json=BODY)
    assert len(engine.requests) == 1
    assert (await client.post(PATH, json=BODY)).status_code == 200


async def stream(client: httpx.AsyncClient) -> tuple[int, list[str]]:
    """The status and the events that came before the stream broke."""
    events: list[str] = []
    async with client.stream("POST", PATH, json={**BODY, "stream": True}) as response:
        try:
            async for line in response.aiter_lines():
                events += [line] if line else []
        except (httpx.ReadError, httpx.RemoteProtocolError):
            return response.status_code, events
    raise AssertionError("the stream ended well")


async def test_a_stream_dies_before_its_first_token(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("die_before_first_token", count=1)
    assert await stream(client) == (200, [])
    assert engine.state()["blocks"]["used"] == 0


async def test_a_stream_dies_after_some_tokens(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("die_mid_stream", tokens=2, count=1)
    status, events = await stream(client)
    assert (status, len(events)) == (200, 2)
    await engine.until(lambda: engine.state()["blocks"]["used"] == 0)
    assert [record.outcome for record in engine.requests] == ["failed"]


async def test_an_unstreamed_answer_can_die_too(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("die_mid_stream", count=1)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await client.post(PATH, json=BODY)


async def test_the_core_can_be_killed(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await engine.fail("engine_death")
    assert (await client.post(PATH, json=BODY)).status_code == 500
    assert engine.died.is_set()


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("refuse", Failure("refuse")),
        ("503:count=2,leg=prefill", Failure("status", count=2, leg="prefill", status=503)),
        ("slow:delay_s=0.5", Failure("slow", delay_s=0.5)),
        ("die_mid_stream:tokens=3", Failure("die_mid_stream", tokens=3)),
    ],
)
def test_failures_on_the_command_line(text: str, failure: Failure) -> None:
    assert Failure.parse(text) == failure


@pytest.mark.parametrize("text", ["nonsense", "slow:delay=1", "503:leg=middle", "hang:count=x"])
def test_a_failure_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown mode|unknown keys|leg is one of|invalid literal"):
        Failure.parse(text)


# -- the control endpoint


async def test_failures_are_switched_over_http(engine: SimEngine, client: httpx.AsyncClient) -> None:
    response = await client.post("/sim/fail", json={"mode": "status", "status": 500, "count": 1})
    assert response.status_code == 200
    assert response.json()["failures"][0]["status"] == 500
    assert (await client.post(PATH, json=BODY)).status_code == 500
    assert (await client.post("/sim/fail", json={"mode": "hang", "for": 3})).status_code == 400
    await client.post("/sim/fail", json={"mode": "refuse"})
    with pytest.raises(httpx.ConnectError):
        await client.get("/health")
    control = f"http://127.0.0.1:{engine.control_port}"
    assert (await client.get(f"{control}/sim/state")).json()["failures"][0]["mode"] == "refuse"
    assert (await client.delete(f"{control}/sim/fail")).json() == {"failures": []}
    assert (await client.get("/health")).status_code == 200


async def test_the_state_tells_pins_and_requests(engine: SimEngine, client: httpx.AsyncClient) -> None:
    await client.post(PATH, json=PREFILL, headers={"X-Request-Id": "abc", "Authorization": "Bearer secret"})
    response = await client.get("/sim/state")
    state = response.json()
    assert "secret" not in response.text
    (pin,) = state["pinned"]
    assert (pin["id"], pin["blocks"]) == (engine.pinned[0], [1])
    assert 29 < pin["expires_in_s"] <= 30
    assert state["blocks"] == {"total": 1023, "used": 1, "pinned": 1, "usage": pytest.approx(1 / 1023)}
    (request,) = state["requests"]
    assert {key: request[key] for key in ("path", "leg", "request_id", "internal_ids", "outcome", "status")} == {
        "path": PATH,
        "leg": "prefill",
        "request_id": "abc",
        "internal_ids": [pin["id"]],
        "outcome": "completed",
        "status": 200,
    }
    assert state["alive"] is True
    assert state["side_channel"] == {
        "host": "127.0.0.1",
        "port": engine.side_channel_port,
        "alive": True,
        "messages": 0,
    }


# -- the command


class Command:
    """``extproc sim`` as a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments

    async def __aenter__(self) -> Command:
        code = "import typer; from extproc.sim.command import sim; typer.run(sim)"
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", code, "--port", "0", *self._arguments, stdout=asyncio.subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(await self.process.stdout.readline() or "{}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def test_the_command_says_where_it_serves_and_ends_on_sigterm() -> None:
    async with Command("--role", "prefill", "--fail", "503:count=1") as command:
        assert command.ready["ready"] is True
        assert command.ready["role"] == "prefill"
        url = f"http://127.0.0.1:{command.ready['port']}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
            assert (await client.post(PATH, json=BODY)).status_code == 503
            params = (await client.post(PATH, json=PREFILL)).json()["kv_transfer_params"]
            assert params["remote_port"] == command.ready["side_channel_port"]
            assert params["remote_engine_id"] == command.ready["engine_id"]
            hanging = asyncio.create_task(client.post(PATH, json={**BODY, "max_tokens": 8000, "ignore_eos": True}))
            state = f"http://127.0.0.1:{command.ready['control_port']}/sim/state"
            while (await client.get(state)).json()["running"] != 1:
                pass
            command.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                assert await command.process.wait() == 0
            assert (await hanging).status_code == 500


async def test_the_command_ends_with_its_core() -> None:
    async with Command() as command, httpx.AsyncClient(trust_env=False, verify=False) as client:
        url = f"http://127.0.0.1:{command.ready['port']}{PATH}"
        response = await client.post(url, json={**BODY, "kv_transfer_params": {"do_remote_prefill": True}})
        assert response.status_code == 500
        async with asyncio.timeout(30):
            assert await command.process.wait() == 1


@pytest.mark.parametrize(
    "arguments", [("--blocks", "4"), ("--fail", "nonsense"), ("--host", "203.0.113.1")], ids=["size", "fail", "host"]
)
async def test_the_command_refuses_what_makes_no_engine(arguments: tuple[str, ...]) -> None:
    async with Command(*arguments) as command:
        assert command.ready == {}
        assert await command.process.wait() != 0
