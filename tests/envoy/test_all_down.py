"""All engines of a role are down, and the probes have found out: the service goes on to answer, as it is configured."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.gateway import Gateway, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

PROBES: dict[str, Any] = {"interval_s": 0.1, "timeout_s": 20, "unhealthy_after": 2}


async def down(gateway: Gateway, role: Any) -> None:
    """Until the service knows."""
    assert gateway.server is not None
    engines = gateway.server.service.fleet.engines(role)
    await until(lambda: {engine.state(time.monotonic()) for engine in engines} == {"unhealthy"})


@pytest.mark.parametrize(("on_failure", "status"), [("error", 503), ("decode", 200)])
async def test_all_prefillers(on_failure: str, status: int) -> None:
    settings = {"fleet": {"health": PROBES}, "prefill": {"on_failure": on_failure}}
    async with Gateway.started(settings, prefill=1, decode=1) as gateway:
        await gateway.prefillers[0].refuse()
        await down(gateway, "prefill")
        assert (await gateway.client.get(f"{gateway.admin_url}/readyz")).text == "ready\n"
        response = await gateway.post()
        assert response.status_code == status
        if status == 503:
            assert response.json()["error"]["code"] == "prefill_unavailable"
        assert (await gateway.post(path="/v1/embeddings")).status_code == 200
        await gateway.settled()


async def test_all_decoders() -> None:
    async with Gateway.started({"fleet": {"health": PROBES}}, prefill=1, decode=1) as gateway:
        await gateway.decoders[0].refuse()
        await down(gateway, "decode")
        assert (await gateway.client.get(f"{gateway.admin_url}/readyz")).text == "ready\n"
        response = await gateway.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_decoder")
        assert gateway.prefills == []
        await gateway.decoders[0].listen()
        assert gateway.server is not None
        (decoder,) = gateway.server.service.fleet.engines("decode")
        await until(lambda: decoder.state(time.monotonic()) == "ready")
        assert (await gateway.post()).status_code == 200
        await gateway.settled()
