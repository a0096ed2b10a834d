"""All engines of a role are down, and the probes have found out: the service goes on to answer, as it is configured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway import Gateway

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


def probed(gateway: Gateway, role: Any, problem: str) -> None:
    """As a probe ends: here they are rare, so that none is under way while an engine goes down."""
    assert gateway.server is not None
    for engine in gateway.server.service.fleet.engines(role):
        engine.health.probed(problem, unhealthy_after=1)


async def assert_ready(gateway: Gateway) -> None:
    assert (await gateway.client.get(f"{gateway.admin_url}/readyz")).text == "ready\n"


@pytest.mark.parametrize(("on_failure", "status"), [("error", 503), ("decode", 200)])
async def test_all_prefillers(on_failure: str, status: int) -> None:
    async with Gateway.started({"prefill": {"on_failure": on_failure}}, prefill=1, decode=1) as gateway:
        await gateway.prefillers[0].refuse()
        probed(gateway, "prefill", "ConnectError")
        await assert_ready(gateway)
        response = await gateway.post()
        assert response.status_code == status
        if status == 503:
            assert response.json()["error"]["code"] == "prefill_unavailable"
        assert (await gateway.post(path="/v1/embeddings")).status_code == 200
        await gateway.settled()


async def test_all_decoders() -> None:
    async with Gateway.started(prefill=1, decode=1) as gateway:
        await gateway.decoders[0].refuse()
        probed(gateway, "decode", "ConnectError")
        await assert_ready(gateway)
        response = await gateway.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_decoder")
        assert gateway.prefills == []
        await gateway.decoders[0].listen()
        probed(gateway, "decode", "")
        assert (await gateway.post()).status_code == 200
        await gateway.settled()
