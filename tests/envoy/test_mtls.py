"""Envoy and the service over mTLS: the bootstrap has what both sides need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.certificates import Files, issued
from tests.support.gateway import Gateway, until_async

pytestmark = pytest.mark.envoy


@dataclass(frozen=True)
class Both:
    """The service's certificate and Envoy's, each of an authority of its own."""

    service: Files
    envoy: Files

    def settings(self) -> dict[str, Any]:
        tls = {
            "certificate": str(self.service.certificate),
            "key": str(self.service.key),
            "client_ca": str(self.envoy.ca),
        }
        return {
            "grpc": {"listen": "127.0.0.1:0", "tls": tls},
            "envoy": {
                "service_ca_file": str(self.service.ca),
                "service_certificate": str(self.envoy.certificate),
                "service_key": str(self.envoy.key),
            },
        }


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(issued(tmp_path / "service"), issued(tmp_path / "envoy", "envoy.internal"))


async def test_a_request_is_disaggregated_over_mtls(both: Both) -> None:
    async with Gateway.started(both.settings(), prefill=1, decode=1) as gateway:
        response = await gateway.post(headers={"x-request-id": "safe"})
        assert response.status_code == 200
        (prefill,), (decode,) = gateway.prefills, gateway.decodes
        assert decode.json()["kv_transfer_params"]["remote_request_id"].startswith(
            f"chatcmpl-{prefill.header('x-request-id')}-"
        )
        # The access log comes over it, too.
        record = await gateway.exchange("safe")
        assert (record["decision"], record["outcome"]) == ("disaggregated", "completed")
        stats = await gateway.envoy.stats(r"^cluster\.extproc\.ssl\.handshake$")
        assert stats["cluster.extproc.ssl.handshake"] >= 1

        # Nobody else gets in: neither without a certificate, nor without TLS.
        for channel in (
            grpc.aio.insecure_channel(gateway.grpc_address),
            grpc.aio.secure_channel(gateway.grpc_address, both.service.client(certificate=False)),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


class _Unheard(Gateway):
    """One whose Envoy gets no answer from the service."""

    async def envoy_sees(self, address: str, *, healthy: bool = False) -> None:
        async def tried() -> bool:
            stats = await self.envoy.stats(r"^cluster\.extproc\.health_check\.failure$")
            return stats["cluster.extproc.health_check.failure"] > 0

        await until_async(tried)


async def test_an_envoy_without_the_right_certificate_gets_nowhere(both: Both, tmp_path: Path) -> None:
    stranger = issued(tmp_path / "stranger", "envoy.internal")
    stranger.certificate.replace(both.envoy.certificate)
    stranger.key.replace(both.envoy.key)
    async with _Unheard.started(both.settings(), prefill=1, decode=1) as gateway:
        assert (await gateway.post()).status_code == 500
        assert gateway.prefills == gateway.decodes == []
        assert gateway.counts("extproc_exchanges_total") == {}
