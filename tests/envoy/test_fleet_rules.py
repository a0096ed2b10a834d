"""What a fleet's settings promise, behind a real Envoy: caps and their queue, groups, data-parallel ranks."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from extproc import cli
from extproc.fleet.engines import Engine
from extproc.processes import envoy_process
from tests.support.engines import Answer, RecordedRequest, StubEngine, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, Gateway, until, until_async

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(120)]

RANK: Final = "x-data-parallel-rank"
JSON: Final = {"content-type": "application/json"}


def redescribe(gateway: Gateway, **fields: Any) -> None:
    """The engines' descriptions, as another file would give them: ``prefill_1={"group": "a"}``."""
    assert gateway.server is not None
    fleet = gateway.server.service.fleet
    specs = [engine.spec for engine in fleet.engines()]
    fleet.update("configuration", [replace(spec, **fields.get(spec.name.replace("-", "_"), {})) for spec in specs])


def engines(gateway: Gateway) -> list[Engine]:
    assert gateway.server is not None
    return gateway.server.service.fleet.engines()


# ---- endpoint discovery for listed engines ----


async def test_the_bootstrap_that_asks_for_eds_follows_a_drain_through_the_admin_port(tmp_path: Path) -> None:
    """``extproc envoy --eds`` as printed, taken by a real Envoy; without it the cluster lists the decoders."""
    async with Gateway.started(prefill=1, decode=2) as gateway:
        values = {
            "fleet": {"prefill": [{"url": gateway.prefillers[0].url}], "decode": [{"url": "http://127.0.0.1:9"}]},
            "envoy": {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "extproc": gateway.grpc_address},
        }
        file = tmp_path / "extproc.yaml"
        file.write_text(yaml.safe_dump(values))
        printed = await asyncio.to_thread(CliRunner().invoke, cli.app, ["envoy", "--config", str(file), "--eds"])
        first, second = (decoder.endpoint for decoder in gateway.decoders)
        async with envoy_process(printed.stdout, directory=tmp_path / "envoy", concurrency=1) as envoy:

            async def hosts_are(expected: dict[str, str]) -> bool:
                answer = json.loads(await envoy.admin("/clusters?format=json"))
                (cluster,) = [one for one in answer["cluster_statuses"] if one["name"] == "decode"]
                found = {}
                for host in cluster.get("host_statuses", []):
                    address = host["address"]["socket_address"]
                    endpoint = f"{address['address']}:{address['port_value']}"
                    found[endpoint] = host["health_status"].get("eds_health_status")
                return found == expected

            await until_async(lambda: hosts_are({first: "HEALTHY", second: "HEALTHY"}))
            url = f"http://{(await envoy.listeners())['gateway']}"

            async def ask(count: int) -> list[int]:
                """How many requests each decoder got."""
                before = [len(decoder.requests) for decoder in gateway.decoders]
                for _ in range(count):
                    answer = await gateway.client.post(f"{url}{CHAT}", content=CHAT_BODY, headers=JSON)
                    assert answer.status_code == 200
                return [len(decoder.requests) - count for decoder, count in zip(gateway.decoders, before, strict=True)]

            assert await ask(4) == [2, 2]
            drained = await gateway.client.post(f"{gateway.admin_url}/fleet/decode-1/drain?wait_s=30")
            assert drained.text == "decode-1: drained\n"
            await until_async(lambda: hosts_are({first: "DRAINING", second: "HEALTHY"}))
            assert await ask(4) == [0, 4]
            await gateway.client.post(f"{gateway.admin_url}/fleet/decode-1/undrain")
            await until_async(lambda: hosts_are({first: "HEALTHY", second: "HEALTHY"}))
            assert await ask(4) == [2, 2]


# ---- caps, and the queue in front of them ----


class Held:
    """A prefiller that answers when it is told to, one request at a time, and in which order it was asked."""

    def __init__(self, engine: StubEngine) -> None:
        self.asked: list[str] = []
        self._may_go = asyncio.Semaphore(0)
        engine.respond = self._respond

    async def _respond(self, request: RecordedRequest) -> Answer:
        self.asked.append(request.header("x-tenant") or "")
        await self._may_go.acquire()
        return answer_prefill(request)

    def answer(self, count: int = 1) -> None:
        for _ in range(count):
            self._may_go.release()


def depth(gateway: Gateway) -> int:
    return gateway.counts("extproc_queue_depth").get("", 0)


async def test_a_full_queue_is_429_and_a_long_wait_503_each_with_retry_after() -> None:
    admission = {"queue": 1, "max_wait_s": 1.5}
    settings = {"fleet": {"max_inflight": {"prefill": 1}}, "prefill": {"admission": admission}}
    async with Gateway.started(settings, prefill=1, decode=1) as gateway:
        held = Held(gateway.prefillers[0])
        first = asyncio.create_task(gateway.post())
        await until(lambda: len(held.asked) == 1)
        started = time.monotonic()
        second = asyncio.create_task(gateway.post())
        await until(lambda: depth(gateway) == 1)

        full = await gateway.post()
        waited = await second
        assert 1.0 < time.monotonic() - started < 10.0
        for answer, status, code in ((full, 429, "queue_full"), (waited, 503, "queue_timeout")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert gateway.counts("extproc_queue_rejections_total") == {"full": 1, "timeout": 1}
        assert len(held.asked) == 1  # neither cost a prefill

        held.answer()
        assert (await first).status_code == 200
        await gateway.settled()
        assert depth(gateway) == 0


async def test_tenants_take_turns_and_a_client_that_leaves_the_queue_costs_nothing() -> None:
    admission = {"queue": 100, "max_wait_s": 60, "fair_by": "x-tenant"}
    settings = {"fleet": {"max_inflight": {"prefill": 1}}, "prefill": {"admission": admission}}
    async with Gateway.started(settings, prefill=1, decode=1) as gateway:
        held = Held(gateway.prefillers[0])

        def ask(tenant: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(gateway.post(headers={"x-tenant": tenant}))

        requests = [ask("first")]
        await until(lambda: len(held.asked) == 1)
        for number in range(6):
            requests.append(ask("greedy"))
            await until(lambda number=number: depth(gateway) == number + 1)
        leaving = ask("leaves")
        await until(lambda: depth(gateway) == 7)
        requests += [ask("modest") for _ in range(2)]
        await until(lambda: depth(gateway) == 9)
        leaving.cancel()
        await until(lambda: depth(gateway) == 8)

        for number in range(1, 9):
            held.answer()
            await until(lambda number=number: len(held.asked) == number + 1)
        held.answer()
        assert [(await request).status_code for request in requests] == [200] * 9
        turns = ["greedy", "modest", "greedy", "modest"]
        assert held.asked == ["first", *turns, "greedy", "greedy", "greedy", "greedy"]
        await gateway.settled()
        assert {(engine.inflight, engine.reserved_tokens) for engine in engines(gateway)} == {(0, 0)}


# ---- a burst ----


@pytest.mark.parametrize("policy", ["round_robin", "least_inflight", "least_loaded", "power_of_two"])
async def test_O23_256_requests_at_once_are_spread_and_leave_nothing(policy: str) -> None:
    """All are under way at once; none sees the same load as another."""
    settings = {"routing": {"prefill_policy": policy, "decode_policy": policy}}
    async with Gateway.started(settings, prefill=4, decode=4) as gateway:
        held = [Held(engine) for engine in gateway.prefillers]
        requests = [asyncio.create_task(gateway.post()) for _ in range(256)]
        await until(lambda: sum(len(one.asked) for one in held) == 256)
        assert sum(engine.inflight for engine in engines(gateway)) == 512
        for one in held:
            one.answer(256)
        assert Counter([(await request).status_code for request in requests]) == {200: 256}
        for leg in (gateway.prefillers, gateway.decoders):
            counts = [len(engine.requests) for engine in leg]
            assert sum(counts) == 256
            assert 0.8 * 64 <= min(counts) <= max(counts) <= 1.2 * 64, counts
        await gateway.settled()
        assert {(engine.inflight, engine.reserved_tokens) for engine in engines(gateway)} == {(0, 0)}


# ---- groups ----


async def test_hand_over_never_crosses_groups_whatever_fails() -> None:
    """Decoders and prefillers fail in turn, under load: requests may be refused, but never get a stranger's params."""
    settings = {"routing": {"prefill_policy": "least_loaded", "decode_policy": "least_loaded"}}
    async with Gateway.started(settings, prefill=2, decode=2) as gateway:
        redescribe(
            gateway, **{f"{role}_{n}": {"group": f"group-{n}"} for role in ("prefill", "decode") for n in (1, 2)}
        )
        for number, prefiller in enumerate(gateway.prefillers, 1):
            prefiller.respond = lambda request, number=number: made_by(number, request)

        async def burst(count: int) -> Counter[int]:
            answers = await asyncio.gather(*(gateway.post() for _ in range(count)))
            return Counter(answer.status_code for answer in answers)

        assert await burst(40) == {200: 40}
        used = [len(engine.requests) for engine in gateway.decoders]
        assert min(used) > 0

        await gateway.decoders[0].refuse()
        assert (await burst(20))[200] >= 10  # Envoy's list stays within the group: those of group 1 are refused
        await gateway.decoders[0].listen()
        gateway.prefillers[1].respond = lambda _: Answer.json({"error": {}}, status=500)
        await burst(20)
        await gateway.settled()

        for number, decoder in enumerate(gateway.decoders, 1):
            makers = {params["remote_engine_id"] for request in decoder.requests if (params := handed_over(request))}
            assert makers == {f"prefill-{number}"}


def made_by(number: int, request: RecordedRequest) -> Answer:
    answer = answer_prefill(request)
    body = json.loads(answer.body)
    body["kv_transfer_params"]["remote_engine_id"] = f"prefill-{number}"
    return Answer.json(body)


def handed_over(request: RecordedRequest) -> dict[str, Any] | None:
    params: dict[str, Any] | None = request.json().get("kv_transfer_params")
    return params


# ---- data-parallel ranks ----


async def test_each_leg_names_a_rank_of_its_own_engine() -> None:
    async with Gateway.started(prefill=1, decode=1) as gateway:
        (prefiller,), (decoder,) = gateway.prefillers, gateway.decoders

        async def ranks(count: int) -> tuple[list[str | None], list[str | None]]:
            """As the engines got them; the client's own wish is nobody's."""
            for _ in range(count):
                assert (await gateway.post(CHAT_BODY, headers={RANK: "9"})).status_code == 200
            await gateway.settled()
            found = [[request.header(RANK) for request in engine.requests] for engine in (prefiller, decoder)]
            prefiller.requests.clear()
            decoder.requests.clear()
            return found[0], found[1]

        assert await ranks(2) == ([None] * 2, [None] * 2)
        redescribe(gateway, prefill_1={"data_parallel_size": 2})
        prefill, decode = await ranks(6)
        assert (Counter(prefill), decode) == ({"0": 3, "1": 3}, [None] * 6)
        redescribe(gateway, prefill_1={"data_parallel_size": 1}, decode_1={"data_parallel_size": 3})
        prefill, decode = await ranks(6)
        assert (prefill, Counter(decode)) == ([None] * 6, {"0": 2, "1": 2, "2": 2})
        redescribe(gateway, prefill_1={"data_parallel_size": 4})
        prefill, decode = await ranks(12)
        assert Counter(prefill) == dict.fromkeys("0123", 3)
        assert Counter(decode) == dict.fromkeys("012", 4)
