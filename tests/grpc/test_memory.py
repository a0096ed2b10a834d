"""What a request in flight costs the service in memory, while its prefill runs: the longest that a body is held."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.grpc.stand import JSON, MODES, Stand
from tests.support.gateway import CHAT
from tests.support.scripted_envoy import Mode, ScriptedEnvoy

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1024 * 1024
REQUESTS = 50
COPIES = 4


def resident(pid: int) -> int:
    """Bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


async def hold(stand: Stand, envoy: ScriptedEnvoy, count: int) -> int:
    """The service's memory with so many prefills of 1 MiB under way; then their clients leave."""
    (prefiller,), (instance,) = stand.prefillers, stand.instances
    prefiller.requests.clear()
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * MIB)
    calls: list[asyncio.Task[Any]] = []
    for number in range(1, count + 1):  # one after another: what many at once need on their way is not held
        calls.append(asyncio.create_task(envoy.request("POST", CHAT, JSON, body)))
        await prefiller.wait_for(number, within_s=60)
    held = resident(instance.process.pid)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await prefiller.wait_until(lambda: prefiller.open_connections <= 1, within_s=30)
    return held


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_of_a_mebibyte_is_held_in_no_more_than_four_copies(mode: Mode) -> None:
    """By a process of its own: an allocator keeps what was held before."""
    async with Stand.standing({"log": {"level": "warning"}}, prefill=1, decode=1, process=True) as stand:
        stand.prefillers[0].hang = True
        async with stand.envoy(mode, message_timeout_s=60) as envoy:
            few = await hold(stand, envoy, 10)
            many = await hold(stand, envoy, REQUESTS)
    copies = (many - few) / ((REQUESTS - 10) * MIB)
    assert 0.5 < copies <= COPIES
