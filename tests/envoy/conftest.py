"""A gateway for this directory: service, real Envoy and recording engines (tests/support/gateway.py).

Modules that use the shared one run on the session's event loop::

    pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.gateway import Gateway


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def default_gateway() -> AsyncIterator[Gateway]:
    """Two prefillers, two decoders, round robin, all else as configured by default."""
    async with Gateway.started() as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(default_gateway: Gateway) -> AsyncIterator[Gateway]:
    """The shared gateway with engines as new; afterwards nothing of the test's requests may be left in the service."""
    await default_gateway.reset()
    yield default_gateway
    await default_gateway.settled()
