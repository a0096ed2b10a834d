"""The manifests' Envoy parts at work: patched into what Istio and Envoy Gateway deliver, run by the real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import subprocess
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import trustme
import yaml

from extproc.check.findings import Findings
from extproc.check.gateway import check_envoy
from extproc.config import build
from extproc.processes import envoy_process, find_envoy
from tests.support import mesh
from tests.support.engines import Answer, CloseConnection, RecordedRequest, StubEngine, prefill_params
from tests.support.gateway import CHAT, CHAT_BODY, Change, Gateway, until, until_async
from tests.support.manifests import Object, render, service_configuration

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

DESTINATION = "x-gateway-destination-endpoint"
LIMIT = 32 * 1024 * 1024


@dataclass(frozen=True)
class Mesh:
    directory: str
    translate: Callable[[Sequence[Object], Iterable[str], str, Iterable[str]], mesh.Json]
    access_log: bool = True

    @property
    def objects(self) -> list[Object]:
        return render(self.directory)


MESHES = {
    "istio": Mesh("istio", mesh.istio),
    "istio-full-duplex": Mesh("istio/full-duplex", mesh.istio),
    "envoy-gateway": Mesh("gateway-api", mesh.envoy_gateway),
    "envoy-gateway-full-duplex": Mesh("gateway-api/full-duplex", mesh.envoy_gateway),
    "envoy-gateway-without-patches": Mesh("gateway-api", lambda *parts: mesh.envoy_gateway(*parts, patched=False)),
    "inference-pool": Mesh("gateway-api/inference-pool", mesh.inference_pool, access_log=False),
}


class MeshGateway(Gateway):
    """As :class:`Gateway`, behind an Envoy that a control plane has configured; ``other`` is another app's server."""

    mesh: Mesh
    other: StubEngine

    @classmethod
    @contextlib.asynccontextmanager
    async def behind(cls, mesh_: Mesh, directory: Path) -> AsyncIterator[MeshGateway]:
        shipped = service_configuration(mesh_.objects)
        settings: dict[str, Any] = {section: shipped[section] for section in ("prefill", "limits")}
        if not mesh_.access_log:  # as the Secret of the manifests is mounted
            certificate = trustme.CA().issue_cert("extproc.llm.svc")
            certificate.private_key_and_cert_chain_pem.write_to_path(directory / "tls.pem")
            files = {"certificate": str(directory / "tls.pem"), "key": str(directory / "tls.pem")}
            settings["grpc"] = {"listen": "127.0.0.1:0", "tls": files}
        async with type("Named", (cls,), {"mesh": mesh_}).started(settings) as gateway:
            yield gateway

    async def _start_envoy(
        self, stack: contextlib.AsyncExitStack, values: dict[str, Any], change: Change | None
    ) -> None:
        self.other = await stack.enter_async_context(StubEngine("decode"))
        decoders = [engine.endpoint for engine in self.decoders]
        translated = self.mesh.translate(self.mesh.objects, decoders, self.grpc_address, [self.other.endpoint])
        self.envoy = await stack.enter_async_context(
            envoy_process(yaml.safe_dump(translated), directory=self.directory / "envoy", concurrency=1)
        )
        (address,) = (await self.envoy.listeners()).values()
        self.url = f"http://{address}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MESHES)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MeshGateway]:
    async with MeshGateway.behind(MESHES[request.param], tmp_path_factory.mktemp("mesh")) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(running: MeshGateway) -> AsyncIterator[MeshGateway]:
    await running.reset()
    running.other.requests.clear()
    yield running
    await running.settled()


async def test_a_request_is_prefilled_and_decoded(gateway: MeshGateway) -> None:
    response = await gateway.post(headers={"x-request-id": "the-client's"})
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, "abc")
    (prefill,), (decode,) = gateway.prefills, gateway.decodes
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    assert prefill.json()["kv_transfer_params"].items() >= asked.items()
    assert (prefill.json()["max_tokens"], prefill.json()["stream"]) == (1, False)
    assert decode.header("x-request-id") == prefill.header("x-request-id")
    given = prefill_params(str(prefill.header("x-request-id")))
    assert decode.json() == {**json.loads(CHAT_BODY), "kv_transfer_params": given}
    (decoder,) = [engine for engine in gateway.decoders if engine.requests]
    assert str(decode.header(DESTINATION)).split(",")[0] == decoder.endpoint


async def test_check_finds_nothing_wrong(gateway: MeshGateway) -> None:
    """``extproc check`` behind the manifests as they are: what a mesh does in its own way is no mistake."""
    config = build({**service_configuration(gateway.mesh.objects), "envoy": {"admin": gateway.envoy.admin_url[7:]}})
    assert gateway.server is not None
    findings = Findings()
    async with httpx.AsyncClient(trust_env=False) as client:
        await check_envoy(config, gateway.server.service.fleet, client, findings)
    texts = [finding.text for finding in findings if finding.level == "ok"]
    assert texts == ["filter, access log, metadata, limits and decode cluster fit"]
    notes = [(finding.level, finding.code) for finding in findings if finding.level != "ok"]
    assert notes == ([] if gateway.mesh.access_log else [("note", "endpoint_picker")])


async def test_tokens_are_streamed(gateway: MeshGateway) -> None:
    body = {**json.loads(CHAT_BODY), "stream": True}
    arrived = [asyncio.Event() for _ in range(5)]

    async def after_the_one_before(number: int) -> None:
        if number:
            await asyncio.wait_for(arrived[number - 1].wait(), 10)

    def streaming(_: RecordedRequest) -> Answer:
        answer = Answer.stream(*({"n": number} for number in range(4)))
        answer.between_events = after_the_one_before
        return answer

    for engine in gateway.decoders:
        engine.respond = streaming
    received = b""
    async with gateway.client.stream("POST", CHAT, json=body) as response:
        async for chunk in response.aiter_raw():
            received += chunk
            for event in arrived[: received.count(b"\n\n")]:
                event.set()
    events = [b'data: {"n": %d}\n\n' % number for number in range(4)]
    assert received == b"".join([*events, b"data: [DONE]\n\n"])


async def test_B03_B05_long_prompts_pass_whole(gateway: MeshGateway) -> None:
    """32 KiB is the buffer limit that both control planes set by themselves; 300,000 bytes are several chunks."""
    for size in (32_768, 300_000, 2 * 1024 * 1024):
        response = await gateway.post({"model": "m", "prompt": "x" * size}, path="/v1/completions")
        assert response.status_code == 200, size
    for requests in (gateway.prefills, gateway.decodes):
        prompts = sorted((request.json()["prompt"] for request in requests), key=len)
        assert prompts == ["x" * 32_768, "x" * 300_000, "x" * (2 * 1024 * 1024)]


async def test_B03_a_body_beyond_the_limit_gets_413(gateway: MeshGateway) -> None:
    response = await gateway.client.post(CHAT, content=b'{"messages": "' + b"x" * LIMIT + b'"}')
    assert response.status_code == 413
    assert (gateway.prefills, gateway.decodes) == ([], [])


async def test_a_decoder_that_refuses_the_connection_is_replaced_with_the_same_kv(gateway: MeshGateway) -> None:
    refusing, other = gateway.decoders
    await refusing.refuse()
    for _ in range(2):  # in turn: one of them is meant for the decoder that refuses
        assert (await gateway.post()).status_code == 200
    assert (len(gateway.prefills), len(other.requests)) == (2, 2)
    prefilled = {str(request.header("x-request-id")) for request in gateway.prefills}
    decoded = {str(request.header("x-request-id")): request.json()["kv_transfer_params"] for request in other.requests}
    assert decoded == {request_id: prefill_params(request_id) for request_id in prefilled}


@pytest.mark.parametrize("fault", ["503", "closed"])
async def test_what_a_decoder_may_have_read_is_not_sent_again(gateway: MeshGateway, fault: str) -> None:
    def failing(_: RecordedRequest) -> Answer:
        if fault == "closed":
            raise CloseConnection
        return Answer.json({"error": {"message": "busy"}}, status=503)

    for engine in gateway.decoders:
        engine.respond = failing
    response = await gateway.post(headers={"x-envoy-retry-on": "5xx,reset", "x-envoy-max-retries": "3"})
    assert response.status_code == 503
    assert (len(gateway.prefills), len(gateway.decodes)) == (1, 1)


async def test_clients_cannot_steer(gateway: MeshGateway) -> None:
    one, other = gateway.decoders
    for _ in range(2):
        assert (await gateway.post(headers={DESTINATION: one.endpoint})).status_code == 200
        assert (await gateway.post(path="/v1/embeddings", headers={DESTINATION: one.endpoint})).status_code == 200
    assert (len(one.requests), len(other.requests)) == (2, 2)


async def test_the_access_log_tells_how_requests_end(gateway: MeshGateway) -> None:
    if not gateway.mesh.access_log:  # an endpoint picker gets none
        assert gateway.counts("extproc_access_log_streams") == {}
        return
    gateway.other.respond = lambda _: Answer()
    await gateway.client.post(mesh.OTHER_PATH, headers={"x-request-id": "another app's"})
    assert (await gateway.post()).status_code == 200
    records: dict[str, dict[str, Any]] = {}

    async def ended() -> bool:
        answer = await gateway.client.get(f"{gateway.admin_url}/exchanges")
        records.update({record["request_id"]: record for record in answer.json()["exchanges"]})
        return "outcome" in records.get(str(gateway.decodes[0].header("x-request-id")), {})

    await until_async(ended)
    record = records[str(gateway.decodes[0].header("x-request-id"))]
    (decoder,) = [engine for engine in gateway.decoders if engine.requests]
    assert (record["outcome"], record["upstream"]) == ("completed", decoder.endpoint)
    # The other app's entry would have come before.
    assert str(gateway.other.requests[0].header("x-request-id")) not in records


async def test_another_apps_requests_do_not_come_by(gateway: MeshGateway) -> None:
    gateway.other.respond = lambda _: Answer(status=201, body=b"other")
    before = gateway.counts("extproc_exchanges_total")
    response = await gateway.client.post(f"{mesh.OTHER_PATH}/x", content=CHAT_BODY)
    assert (response.status_code, response.content) == (201, b"other")
    (request,) = gateway.other.requests
    assert request.body == CHAT_BODY
    assert gateway.counts("extproc_exchanges_total") == before
    assert (gateway.prefills, gateway.decodes) == ([], [])


async def test_a_stream_that_dies_before_its_first_token_is_released(gateway: MeshGateway) -> None:
    for engine in gateway.decoders:
        engine.hang = True
    call = asyncio.create_task(gateway.post())
    await until(lambda: bool(gateway.decodes))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for engine in gateway.decoders:
        engine.hang = False
    handoff = prefill_params(str(gateway.prefills[0].header("x-request-id")))["remote_request_id"]

    def released() -> list[str]:
        """Others' entries of the access log may come late, and so their releases."""
        releases = [release.json() for engine in gateway.decoders for release in engine.releases]
        return [release["kv_transfer_params"]["remote_request_id"] for release in releases]

    await until(lambda: handoff in released())
    await gateway.settled()
    assert released().count(handoff) == 1


# ── what happens without ──────────────────────────────────────────────────────────────────────────────────────────────


def validated(configuration: mesh.Json, directory: Path) -> subprocess.CompletedProcess[str]:
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump(configuration))
    command = [find_envoy(), "--mode", "validate", "-c", str(file), "--log-level", "error"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def istio_with(change: Callable[[Object], None]) -> mesh.Json:
    objects = copy.deepcopy(render("istio/full-duplex"))
    (envoy_filter,) = [item for item in objects if item["kind"] == "EnvoyFilter"]
    change(envoy_filter)
    return mesh.istio(objects, ["127.0.0.1:8001"], "127.0.0.1:9002", ["127.0.0.1:8002"])


def processing_mode(envoy_filter: Object) -> dict[str, str]:
    mode: dict[str, str] = envoy_filter["spec"]["configPatches"][0]["patch"]["value"]["typed_config"]["processing_mode"]
    return mode


async def test_B17_envoy_refuses_full_duplex_bodies_without_trailers(tmp_path: Path) -> None:
    def skip(envoy_filter: Object) -> None:
        processing_mode(envoy_filter)["request_trailer_mode"] = "SKIP"

    assert validated(istio_with(lambda _: None), tmp_path).returncode == 0
    refused = validated(istio_with(skip), tmp_path)
    assert refused.returncode == 1
    assert "request_trailer_mode" in refused.stderr


async def test_envoy_refuses_localities_beside_the_decode_clusters_policy(tmp_path: Path) -> None:
    """Why gateway.yaml warns of outlierDetection: Istio answers it with locality weights."""
    configuration = istio_with(lambda _: None)
    configuration["static_resources"]["clusters"][0]["common_lb_config"] = {"locality_weighted_lb_config": {}}
    refused = validated(configuration, tmp_path)
    assert refused.returncode == 1
    assert "locality_weighted_lb_config" in refused.stderr


async def test_a_patch_that_matches_nothing_is_an_error() -> None:
    def rename(envoy_filter: Object) -> None:
        envoy_filter["spec"]["configPatches"][1]["match"]["routeConfiguration"]["vhost"]["route"]["name"] = (
            "llm.other.0"
        )

    with pytest.raises(mesh.PatchError, match="patch 1: HTTP_ROUTE matches nothing"):
        istio_with(rename)
    objects = copy.deepcopy(render("gateway-api"))
    (policy,) = [item for item in objects if item["kind"] == "EnvoyPatchPolicy"]
    policy["spec"]["jsonPatches"][0]["operation"]["jsonPath"] = "..http_filters[?(@.name=='other')].typed_config"
    with pytest.raises(mesh.PatchError, match=r"patch 0: .* finds nothing"):
        mesh.envoy_gateway(objects, ["127.0.0.1:8001"], "127.0.0.1:9002", ["127.0.0.1:8002"])


async def test_without_the_envoyfilter_istio_would_neither_prefill_nor_take_long_prompts() -> None:
    def bare(objects: Sequence[Object], *addresses: Any) -> mesh.Json:
        return mesh.istio([item for item in objects if item["kind"] != "EnvoyFilter"], *addresses)

    class Bare(MeshGateway):
        mesh = Mesh("istio", bare)

    async with Bare.started() as gateway:
        assert (await gateway.post()).status_code == 200
        assert (gateway.prefills, len(gateway.decodes)) == ([], 1)
        for engine in gateway.decoders:
            engine.respond = lambda _: Answer.json({}, status=503)
        assert (await gateway.post()).status_code == 503
        assert len(gateway.decodes) == 1 + 3  # what patch 2 is for


@pytest.mark.parametrize(("listener_limit", "status"), [(False, 413), (True, 200)])
async def test_the_limit_for_older_proxies_that_the_docs_give(
    tmp_path: Path, listener_limit: bool, status: int
) -> None:
    page = (Path(__file__).parents[2] / "docs/mesh.md").read_text()
    (block,) = re.findall(r"^```yaml\n(- applyTo: LISTENER\n.*?)^```", page, re.MULTILINE | re.DOTALL)

    def older(objects: Sequence[Object], *addresses: Any) -> mesh.Json:
        (envoy_filter,) = [item for item in objects if item["kind"] == "EnvoyFilter"]
        patches = envoy_filter["spec"]["configPatches"]
        del patches[1]["patch"]["value"]["request_body_buffer_limit"]
        if listener_limit:
            patches += yaml.safe_load(block)
        return mesh.istio(objects, *addresses)

    async with MeshGateway.behind(Mesh("istio", older), tmp_path) as gateway:
        response = await gateway.post({"model": "m", "prompt": "x" * 2_000_000}, path="/v1/completions")
        assert response.status_code == status
        assert len(gateway.prefills) == (status == 200)
