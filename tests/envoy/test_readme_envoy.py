"""What the README says to put into an Envoy that is there already: enough, as it stands, for the real one."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

from extproc.check.findings import Findings
from extproc.check.gateway import check_envoy
from extproc.config import build
from tests.support.gateway import Gateway, service_cluster

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

README = Path(__file__).parents[2] / "README.md"


def parts() -> dict[str, Any]:
    """The blocks of the section, merged; the filter under ``http_filters``."""
    section = README.read_text().partition("### Into an Envoy you already have")[2].partition("\n## ")[0]
    merged: dict[str, Any] = {}
    for block in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL):
        value = yaml.safe_load(block)
        merged |= {"http_filters": value} if isinstance(value, list) else value
    return merged


def as_the_readme_says(bootstrap: dict[str, Any]) -> None:
    """An Envoy of somebody's own, with two clusters, and the README's parts put in."""
    said = parts()
    for_decoders = ("circuit_breakers", "load_balancing_policy")
    assert said.keys() == {"clusters", "http_filters", "access_log", *for_decoders, "virtual_hosts"}
    clusters = bootstrap["static_resources"]["clusters"]
    (decode,) = [cluster for cluster in clusters if cluster["name"] == "decode"]
    hosts = decode["load_assignment"]
    (service,) = said["clusters"]
    service["load_assignment"] = service_cluster(bootstrap)["load_assignment"]  # its port is another
    bootstrap["static_resources"]["clusters"] = [
        service,
        {"name": "decode", "type": "STATIC", "connect_timeout": "1s", "load_assignment": hosts}
        | {key: said[key] for key in for_decoders},
    ]
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    chain["filters"][0]["typed_config"] = {
        "@type": chain["filters"][0]["typed_config"]["@type"],
        "stat_prefix": "gateway",
        "access_log": said["access_log"],
        "http_filters": [*said["http_filters"], chain["filters"][0]["typed_config"]["http_filters"][-1]],
        "route_config": {"virtual_hosts": said["virtual_hosts"]},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway.started(change=as_the_readme_says) as gateway:
        yield gateway


async def test_requests_are_disaggregated_and_their_end_is_told(gateway: Gateway) -> None:
    response = await gateway.post(headers={"x-request-id": "first"})
    assert response.status_code == 200
    assert len(gateway.prefills) == len(gateway.decodes) == 1
    assert gateway.decodes[0].json()["kv_transfer_params"]["do_remote_prefill"] is True
    record = await gateway.exchange("first")
    assert (record["decision"], record["outcome"]) == ("disaggregated", "completed")
    decoder = next(engine for engine in gateway.decoders if engine.requests)
    assert record["upstream"] == decoder.endpoint


async def test_check_finds_nothing_missing(gateway: Gateway) -> None:
    config = build(
        {"fleet": {"decode": [{"url": gateway.decoders[0].url}]}, "envoy": {"admin": gateway.envoy.admin_url[7:]}}
    )
    assert gateway.server is not None
    findings = Findings()
    async with httpx.AsyncClient(trust_env=False) as client:
        await check_envoy(config, gateway.server.service.fleet, client, findings)
    assert [(finding.level, finding.code) for finding in findings] == [("ok", "")]
