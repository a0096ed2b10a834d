"""The service between a scripted Envoy, in both body modes, and recording engines (stand.py).

Modules that use the shared one run on the session's event loop: ``pytestmark = pytest.mark.asyncio(loop_scope=...)``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.grpc.stand import MODES, Stand
from tests.support.scripted_envoy import Mode, ScriptedEnvoy


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def default_stand() -> AsyncIterator[Stand]:
    """Two prefillers, two decoders, round robin, all else as configured by default."""
    async with Stand.standing() as stand:
        yield stand


@pytest_asyncio.fixture(loop_scope="session")
async def stand(default_stand: Stand) -> AsyncIterator[Stand]:
    """The shared stand with engines as new; afterwards nothing of the test's requests may be left in the service."""
    await default_stand.reset()
    yield default_stand
    await default_stand.settled()


@pytest_asyncio.fixture(loop_scope="session")
async def envoy(stand: Stand, mode: Mode) -> AsyncIterator[ScriptedEnvoy]:
    async with stand.envoy(mode) as envoy:
        yield envoy
