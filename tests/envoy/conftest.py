"""A gateway for this directory: service, real Envoy and recording engines (tests/support/gateway.py).

Modules that use the shared one run on the session's event loop::

    pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateway import ENGINE_KEY, FALLBACK_BYTES, Gateway, full_duplex
from tests.support.scripted_envoy import Mode


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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def full_duplex_gateway() -> AsyncIterator[Gateway]:
    async with Gateway.started(change=full_duplex) as gateway:
        yield gateway


@pytest.fixture(params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest_asyncio.fixture(loop_scope="session")
async def either(default_gateway: Gateway, full_duplex_gateway: Gateway, mode: Mode) -> AsyncIterator[Gateway]:
    """A gateway of each body mode, engines as new; afterwards nothing of the test's requests may be left."""
    gateway = default_gateway if mode == "BUFFERED" else full_duplex_gateway
    await gateway.reset()
    yield gateway
    await gateway.settled()


@pytest_asyncio.fixture(loop_scope="session")
async def streaming(full_duplex_gateway: Gateway) -> AsyncIterator[Gateway]:
    """For what other tests show of the BUFFERED mode."""
    await full_duplex_gateway.reset()
    yield full_duplex_gateway
    await full_duplex_gateway.settled()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fallback_gateway() -> AsyncIterator[Gateway]:
    """Decoders prefill where no prefiller can; engines have a key; few connections to them."""
    settings: dict[str, Any] = {
        "fleet": {"api_key": ENGINE_KEY},
        "prefill": {
            "timeout_s": 1.5,
            "on_failure": "decode",
            "fallback": {"max_body_bytes": FALLBACK_BYTES, "max_concurrent": 1},
            "max_connections": 4,
        },
    }
    async with Gateway.started(settings) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="session")
async def falling_back(fallback_gateway: Gateway) -> AsyncIterator[Gateway]:
    await fallback_gateway.reset()
    yield fallback_gateway
    await fallback_gateway.settled()
