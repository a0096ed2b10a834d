"""What a request in flight costs the service in memory, while its prefill runs: the longest that a body is held."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.grpc.stand import JSON, MODES, Stand
from tests.support.gateway import CHAT, until
from tests.support.scripted_envoy import ScriptedEnvoy

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
    calls = [asyncio.create_task(envoy.request("POST", CHAT, JSON, body)) for _ in range(count)]
    await until(lambda: len(prefiller.requests) == count, timeout_s=60)
    held = resident(instance.process.pid)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await prefiller.wait_until(lambda: prefiller.open_connections <= 1, within_s=30)
    return held


async def test_a_request_of_a_mebibyte_is_held_in_no_more_than_four_copies() -> None:
    async with Stand.standing({"log": {"level": "warning"}}, prefill=1, decode=1, process=True) as stand:
        stand.prefillers[0].hang = True
        for mode in MODES:
            async with stand.envoy(mode, message_timeout_s=60) as envoy:
                # What the allocator keeps after the first round is not a request's.
                few = await hold(stand, envoy, 10)
                many = await hold(stand, envoy, REQUESTS)
            copies = (many - few) / ((REQUESTS - 10) * MIB)
            assert 0.5 < copies <= COPIES, mode
