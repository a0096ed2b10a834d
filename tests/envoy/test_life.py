"""The service starts, drains, dies and comes back while requests are under way."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.engines import Answer, RecordedRequest, answer_decode, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, Gateway, service_cluster, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

LIFE: dict[str, Any] = {"notice_s": 0.6, "drain_s": 4}


def brisk(bootstrap: dict[str, Any]) -> None:
    """Envoy asks five times a second how the service is; shipped is once."""
    for check in service_cluster(bootstrap)["health_checks"]:
        check["interval"] = check["no_traffic_interval"] = "0.2s"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def open_gateway() -> AsyncIterator[Gateway]:
    """One instance of the service, as a process; without it, requests go on."""
    settings = {"envoy": {"fail_open": True}, "life": LIFE}
    async with Gateway.started(settings, service="process", change=brisk) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def closed_gateway() -> AsyncIterator[Gateway]:
    """Two instances behind one Envoy; without any, requests fail."""
    async with Gateway.started({"life": LIFE}, service="process", instances=2, change=brisk) as gateway:
        yield gateway


async def up(gateway: Gateway) -> None:
    """All instances run, and Envoy knows: not from before, while a failed check or two may still count."""
    for instance in gateway.instances:
        if not instance.process.running:
            await gateway.envoy_sees(instance.grpc_address, healthy=False)
            await instance.process.start()
    for instance in gateway.instances:
        await gateway.envoy_sees(instance.grpc_address)


@pytest_asyncio.fixture(loop_scope="session")
async def fail_open(open_gateway: Gateway) -> Gateway:
    await up(open_gateway)
    await open_gateway.reset()
    return open_gateway


# ---- health and reflection ----


async def test_health_and_reflection_answer(gateway: Gateway) -> None:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", EXT_PROC):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="another"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services=""), _symbol(EXT_PROC)])
        )
        listed, described = [answer async for answer in call]
        names = {service.name for service in listed.list_services_response.service}
        assert names >= {EXT_PROC, "envoy.service.accesslog.v3.AccessLogService", "grpc.health.v1.Health"}
        files = b"".join(described.file_descriptor_response.file_descriptor_proto)
        assert b"ProcessingRequest" in files


def _symbol(name: str) -> reflection_pb2.ServerReflectionRequest:
    return reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)


# ---- SIGTERM ----

JSON = {"content-type": "application/json"}
SECOND = CHAT_BODY[:-1] + b', "user": "second"}'
WHOLE = b"".join(b'data: {"choices": [{"index": 0, "delta": {"content": "%d"}}]}\n\n' % n for n in range(3))


@dataclass
class Generation:
    """A stream of three events, of which the client has the first; the others come with :meth:`rest`."""

    chunks: AsyncIterator[bytes]
    first: bytes
    go_on: asyncio.Event

    async def rest(self) -> bytes:
        """The whole body, to its end."""
        self.go_on.set()
        return self.first + b"".join([chunk async for chunk in self.chunks])


@contextlib.asynccontextmanager
async def generation(gateway: Gateway) -> AsyncIterator[Generation]:
    go_on = asyncio.Event()

    async def between(number: int) -> None:
        if number:
            await go_on.wait()

    def streaming(request: RecordedRequest) -> Answer:
        if not request.json().get("stream"):
            return answer_decode(request)
        answer = Answer.stream(*({"choices": [{"index": 0, "delta": {"content": str(n)}}]} for n in range(3)))
        answer.between_events = between
        return answer

    for engine in gateway.decoders:
        engine.respond = streaming
    body = CHAT_BODY[:-1] + b', "stream": true}'
    try:
        async with gateway.client.stream("POST", CHAT, content=body, headers=JSON) as response:
            assert response.status_code == 200
            chunks = response.aiter_raw()
            yield Generation(chunks, await anext(chunks), go_on)
    finally:
        go_on.set()


async def end(gateway: Gateway, number: signal.Signals = signal.SIGTERM, timeout_s: float = 10.0) -> None:
    """All instances end, as they should, within that time."""
    for instance in gateway.instances:
        instance.process.signal(number)
    expected = 0 if number is signal.SIGTERM else -number
    for instance in gateway.instances:
        assert await instance.process.wait(timeout_s=timeout_s) == expected


async def test_sigterm_tells_first_then_finishes_prefills_and_leaves_streams_to_envoy(fail_open: Gateway) -> None:
    """One request is being generated, one being prefilled, one's prefill will never end."""
    gateway, go_on = fail_open, asyncio.Event()
    (instance,) = gateway.instances
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel, generation(gateway) as generating:
        watches = [
            health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))
            for name in ("", EXT_PROC)
        ]
        assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]

        async def held(request: RecordedRequest) -> Answer:
            await (asyncio.Event() if b'"endless"' in request.body else go_on).wait()
            return answer_prefill(request)

        for engine in gateway.prefillers:
            engine.respond = held
        prefilling = asyncio.create_task(gateway.post(SECOND))
        endless = asyncio.create_task(gateway.post(SECOND.replace(b"second", b"endless")))
        await until(lambda: len(gateway.prefills) == 3)

        instance.process.signal(signal.SIGTERM)
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING, NOT_SERVING]
        for watch in watches:
            watch.cancel()
        ready = await gateway.client.get(f"{gateway.admin_url}/readyz")
        assert (ready.status_code, ready.text) == (503, "draining\n")
        assert (await gateway.client.get(f"{gateway.admin_url}/healthz")).status_code == 200
        await gateway.envoy_sees(gateway.grpc_address, healthy=False)

        # New requests are Envoy's alone.
        assert (await gateway.post()).status_code == 200
        assert len(gateway.prefills) == 3

        go_on.set()
        assert (await prefilling).status_code == 200
        # What outlasts the drain does not hold up the exit: that request, too, is Envoy's then.
        assert await instance.process.wait(timeout_s=LIFE["drain_s"] + 10) == 0
        assert (await endless).status_code == 200
        (engine,) = [engine for engine in gateway.prefillers if any(b'"endless"' in r.body for r in engine.requests)]
        await engine.wait_for_disconnects(1)
        # The generation was not waited for, and nothing happens to it.
        assert await generating.rest() == WHOLE + b"data: [DONE]\n\n"

    with_params = [b"kv_transfer_params" in request.body for request in sorted(gateway.decodes, key=kind)]
    assert [kind(request) for request in sorted(gateway.decodes, key=kind)] == ["endless", "new", "second", "stream"]
    assert with_params == [False, False, True, True]


def kind(request: RecordedRequest) -> str:
    return next((name for name in ("endless", "second", "stream") if f'"{name}"'.encode() in request.body), "new")


# ---- SIGKILL ----


async def test_killed_and_fail_open_everything_goes_on_with_the_decode_pool(fail_open: Gateway) -> None:
    gateway = fail_open
    async with generation(gateway) as generating:
        for engine in gateway.prefillers:
            engine.hang = True
        prefilling = asyncio.create_task(gateway.post())
        await until(lambda: len(gateway.prefills) == 2)
        await end(gateway, signal.SIGKILL)
        # What was being prefilled goes on as the client sent it.
        assert (await prefilling).status_code == 200
        assert [request.body for request in gateway.decodes if not request.json().get("stream")] == [CHAT_BODY]
        # What is being generated goes on.
        assert await generating.rest() == WHOLE + b"data: [DONE]\n\n"

    await gateway.reset()
    responses = [await gateway.post() for _ in range(6)]
    assert [response.status_code for response in responses] == [200] * 6
    assert gateway.prefills == []
    assert [request.body for request in gateway.decodes] == [CHAT_BODY] * 6
    assert [len(engine.requests) for engine in gateway.decoders] == [3, 3]

    # And when it is back, prefillers prefill again.
    await up(gateway)
    assert (await gateway.post()).status_code == 200
    assert len(gateway.prefills) == 1


# ---- updates ----


class Load:
    """Requests from several clients, with hardly a pause, until :meth:`stop`."""

    def __init__(self, gateway: Gateway, clients: int = 4) -> None:
        self.gateway = gateway
        self.statuses: Counter[object] = Counter()
        self._stopping = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(clients)]

    @property
    def count(self) -> int:
        return self.statuses.total()

    async def _run(self) -> None:
        while not self._stopping:
            try:
                response = await self.gateway.post()
                self.statuses[response.status_code] += 1
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
            await asyncio.sleep(0.05)  # leaves the processes that start meanwhile some of the machine

    async def more(self, count: int = 20) -> None:
        """Wait for so many further answers."""
        wanted = self.count + count
        await until(lambda: self.count >= wanted, timeout_s=30)

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)


@pytest.mark.timeout(300)
async def test_a_restart_of_one_instance_that_fails_open_loses_no_request(fail_open: Gateway) -> None:
    gateway = fail_open
    load = Load(gateway)
    await load.more()
    await end(gateway)
    await load.more()
    await up(gateway)
    await load.more()
    await load.stop()
    assert load.statuses == {200: load.count}
    assert len(gateway.decodes) == load.count
    with_params = [request for request in gateway.decodes if b"kv_transfer_params" in request.body]
    assert len(with_params) == len(gateway.prefills)
    assert 40 <= len(with_params) < load.count


@pytest.mark.timeout(300)
async def test_a_rolling_update_of_two_instances_loses_no_request(closed_gateway: Gateway) -> None:
    """Fail closed, so that no request passes for served that was only let through."""
    gateway = closed_gateway
    load = Load(gateway)
    for instance in gateway.instances:
        await load.more()
        instance.process.signal(signal.SIGTERM)
        assert await instance.process.wait(timeout_s=10) == 0
        await load.more()
        await up(gateway)
    await load.more()
    await load.stop()
    assert load.statuses == {200: load.count}
    assert len(gateway.decodes) == len(gateway.prefills) == load.count
    assert all(b"kv_transfer_params" in request.body for request in gateway.decodes)


async def test_gone_and_fail_closed_streams_go_on_and_new_requests_get_500(closed_gateway: Gateway) -> None:
    gateway = closed_gateway
    await up(gateway)
    await gateway.reset()
    async with generation(gateway) as generating:
        await end(gateway)
        for _ in range(3):
            response = await gateway.post()
            assert (response.status_code, response.headers["content-type"]) == (500, "application/json")
            error = response.json()["error"]
            assert (error["message"], error["type"]) == ("The gateway's service failed.", "gateway_error")
            assert error["code"].startswith("ext_proc_error")
        assert await generating.rest() == WHOLE + b"data: [DONE]\n\n"
    assert len(gateway.prefills) == len(gateway.decodes) == 1
    assert "kv_transfer_params" in gateway.decodes[0].json()
