"""Fleets that change under load, behind a real Envoy: engines come, go, fail and return, and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest
import yaml

from extproc.bootstrap import render
from extproc.config import build
from extproc.fleet.engines import Engine
from extproc.processes import EnvoyProcess, envoy_process, free_port
from extproc.server import Server
from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine
from tests.support.dns_server import DnsServer
from tests.support.engines import Answer, RecordedRequest, answer_decode
from tests.support.gateway import COMPLETIONS, Gateway
from tests.support.simulated import Replica, Stalls
from tests.support.simulated import until as until_within

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(300)]

HOST: Final = "127.0.0.1"
RATE: Final = 10.0
"""Requests per second, where nothing else is said."""
_MOST_UNDER_WAY: Final = 24
_PATIENCE_S: Final = 60.0
"""For things that take a second or two."""


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    await until_within(condition, _PATIENCE_S)


# ---- load ----


@dataclass
class Sent:
    number: int
    started: float
    ended: float = 0.0
    status: int | None = None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.problem


class Load:
    """Requests at a steady rate, whatever becomes of those before; ``async with``: all have ended at its end.

    On a machine that cannot keep up the rate drops: only so many are under way at once.
    """

    def __init__(self, url: str, rate: float = RATE, *, words: int = 40, most: int | None = None) -> None:
        self.sent: list[Sent] = []
        self._url = url
        self._rate = rate
        self._words = words
        self._most = most
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(
            base_url=self._url, trust_env=False, timeout=_PATIENCE_S, limits=httpx.Limits()
        )
        self._run = asyncio.create_task(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._run
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def _send(self) -> None:
        started = time.monotonic()
        number = 0
        while not self._stop.is_set() and number != self._most:
            if sum(not sent.ended for sent in self.sent) < _MOST_UNDER_WAY:
                self._tasks.add(asyncio.create_task(self._request(number)))
                number += 1
            else:
                started += 1 / self._rate
            due = started + number / self._rate
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), max(0.0, due - time.monotonic()))

    async def _request(self, number: int) -> None:
        sent = Sent(number, time.monotonic())
        self.sent.append(sent)
        text = " ".join(f"{number * 7919 + word}" for word in range(self._words))
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        try:
            response = await self._client.post("/v1/chat/completions", json=body)
            sent.status = response.status_code
            if response.status_code != 200:
                sent.problem = response.text
            elif response.json()["choices"][0]["finish_reason"] not in ("stop", "length"):
                sent.problem = f"cut short: {response.text}"
        except httpx.HTTPError as error:
            sent.problem = repr(error)
        sent.ended = time.monotonic()

    @property
    def lost(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.ended and not sent.ok]

    async def further(self, count: int) -> None:
        """Wait until so many more requests have been answered."""
        before = self._answered
        await until(lambda: self._answered >= before + count)

    @property
    def _answered(self) -> int:
        return sum(sent.ok for sent in self.sent)


# ---- a site whose fleet changes ----


class Site:
    """Simulated engines, the service and a real Envoy; which engines there are says a file, unless ``fleet`` does.

    Everything but Envoy runs in the test's own event loop.
    """

    def __init__(self) -> None:
        self.engines: dict[str, SimEngine] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.server: Server
        self.envoy: EnvoyProcess
        self.url = ""
        self._stack = contextlib.AsyncExitStack()
        self._file: Path

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls,
        *names: str,
        fleet: Mapping[str, Any] | None = None,
        engines: Mapping[str, Any] | None = None,
        host: str = HOST,
        **sections: Mapping[str, Any],
    ) -> AsyncIterator[Self]:
        """``names``: engines to begin with, like ``prefill-1``; ``engines``: their options; ``host``: of the rest."""
        site = cls()
        async with site._stack as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
            site._file = directory / "fleet.yaml"
            for name in names:
                await site.add(name, write=False, **(engines or {}))
            site.write()
            values: dict[str, Any] = {
                "grpc": {"listen": f"{host}:0"},
                "admin": {"listen": f"{host}:0"},
                "fleet": {
                    "file": str(site._file),
                    "health": {"interval_s": 0.2, "timeout_s": 2.0},
                    "outlier": {"consecutive": 3, "base_s": 0.5},
                    "scrape_s": 0.5,
                    **(fleet or {}),
                },
                "prefill": {"attempts": 2, "timeout_s": 20, "connect_timeout_s": 10},
                "life": {"notice_s": 0.0, "drain_s": 5.0},
                "envoy": {"listen": f"{host}:0", "admin": f"{host}:0", "message_timeout_s": 30},
            }
            for section, keys in sections.items():
                values[section] = {**values.get(section, {}), **keys}
            site.server = await stack.enter_async_context(Server(build(values)))
            values["envoy"]["extproc"] = f"{host}:{site.server.grpc_port}"
            bootstrap = yaml.safe_load(render(build(values)))
            for cluster in bootstrap["static_resources"]["clusters"]:
                cluster["connect_timeout"] = "10s"  # engines and test share an event loop, which may stand still
                for check in cluster.get("health_checks", []):
                    check["timeout"] = "10s"
            site.envoy = await stack.enter_async_context(
                envoy_process(yaml.safe_dump(bootstrap), directory=directory / "envoy", concurrency=1)
            )
            site.url = f"http://{(await site.envoy.listeners())['gateway']}"

            async def ready() -> bool:
                clusters = await site.envoy.clusters()
                return set(clusters["extproc"].values()) == {True} and bool(clusters["decode"])

            await until(ready)
            yield site
            for engine in site.engines.values():
                assert engine.engine.death in (None, "stopped")

    # ---- engines ----

    async def add(self, name: str, *, write: bool = True, **options: Any) -> SimEngine:
        """Start an engine, and list it."""
        role: Any = name.partition("-")[0]
        engine = SimEngine(SimConfig(role=role, **options))
        await self._stack.enter_async_context(engine)
        self.engines[name] = engine
        self.entries[name] = {"url": engine.url, "name": name}
        if write:
            self.write()
        return engine

    def drain(self, name: str) -> None:
        self.entries[name]["drain"] = True
        self.write()

    def remove(self, name: str) -> None:
        """From the list; it goes on running."""
        del self.entries[name]
        self.write()

    def write(self) -> None:
        listed: dict[str, list[Any]] = {"prefill": [], "decode": []}
        for name, entry in self.entries.items():
            listed[name.partition("-")[0]].append(entry)
        temporary = self._file.with_suffix(".new")
        temporary.write_text(yaml.safe_dump(listed))
        temporary.replace(self._file)

    def known(self, name: str) -> Engine | None:
        """As the service sees it."""
        return next((engine for engine in self.server.service.fleet.engines() if engine.name == name), None)

    def state(self, name: str) -> str:
        known = self.known(name)
        return "absent" if known is None else known.state(time.monotonic())

    async def reaches(self, name: str, state: str) -> float:
        """Seconds until the service sees the engine in that state."""
        started = time.monotonic()
        await until(lambda: self.state(name) == state)
        return time.monotonic() - started

    def served(self, name: str) -> int:
        """Requests that the engine got, but for those that only free blocks."""
        return sum(record.model == "tiny" for record in self.engines[name].requests)

    def quiet(self, name: str) -> bool:
        """Whether nothing is left of any request there."""
        known = self.known(name)
        engine = self.engines[name].engine
        return (known is None or known.inflight == 0) and not engine.pool.used

    # ---- Envoy ----

    async def hosts(self) -> dict[str, str]:
        """Envoy's decoders by name, with the health that it was told."""
        answer = json.loads(await self.envoy.admin("/clusters?format=json"))
        (cluster,) = [one for one in answer["cluster_statuses"] if one["name"] == "decode"]
        names = {engine.url.removeprefix("http://"): name for name, engine in self.engines.items()}
        found = {}
        for host in cluster.get("host_statuses", []):
            address = host["address"]["socket_address"]
            text = f"[{address['address']}]" if ":" in address["address"] else address["address"]
            found[names[f"{text}:{address['port_value']}"]] = host["health_status"].get("eds_health_status", "?")
        return found

    async def envoy_has(self, expected: Mapping[str, str]) -> None:
        async def has() -> bool:
            return await self.hosts() == dict(expected)

        await until(has)

    async def nothing_is_left(self) -> None:
        """No stream, no reservation, no pinned block. Raises TimeoutError."""
        await until(
            lambda: (
                self.server.service.in_flight == 0
                and all(engine.inflight == 0 for engine in self.server.service.fleet.engines())
                and all(not engine.engine.pool.used for engine in self.engines.values())
            )
        )


def told(text: str) -> None:
    """For whoever runs the tests with ``-s``, and in the report of one that fails."""
    print(f"\n{text}")


# ---- Envoy follows the fleet ----


async def test_envoy_follows_decoders_that_come_drain_and_go() -> None:
    async with Site.started("prefill-1", "decode-1", "decode-2") as site:
        await site.envoy_has({"decode-1": "HEALTHY", "decode-2": "HEALTHY"})
        async with Load(site.url) as load:
            await load.further(5)
            await site.add("decode-3")
            await site.envoy_has(dict.fromkeys(("decode-1", "decode-2", "decode-3"), "HEALTHY"))
            await until(lambda: site.served("decode-3") >= 3)

            site.drain("decode-1")
            await site.envoy_has({"decode-1": "DRAINING", "decode-2": "HEALTHY", "decode-3": "HEALTHY"})
            await until(lambda: site.quiet("decode-1"))
            before = site.served("decode-1")
            await load.further(10)
            assert site.served("decode-1") == before

            site.remove("decode-1")
            await site.envoy_has({"decode-2": "HEALTHY", "decode-3": "HEALTHY"})

            await load.further(5)
        assert load.lost == []
        await site.nothing_is_left()

        await site.engines["decode-2"].fail("refuse")
        await site.envoy_has({"decode-2": "UNHEALTHY", "decode-3": "HEALTHY"})
        async with Load(site.url) as load:
            await load.further(5)
        assert load.lost == []
        await site.engines["decode-2"].heal()
        await site.envoy_has({"decode-2": "HEALTHY", "decode-3": "HEALTHY"})


@pytest.mark.parametrize("how", ["drained first", "at once"])
async def test_a_stream_on_a_decoder_that_leaves_goes_on_to_its_end(how: str) -> None:
    async with Site.started("prefill-1", "decode-1", engines={"decode_ms_per_token": 10}) as site:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "a long story"}],
            "max_tokens": 150,
            "stream": True,
            "ignore_eos": True,
        }
        async with (
            httpx.AsyncClient(base_url=site.url, trust_env=False, timeout=20) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            chunks = response.aiter_raw()
            received = await anext(chunks)
            await site.add("decode-2")
            await site.reaches("decode-2", "ready")
            if how == "drained first":
                site.drain("decode-1")
                await site.envoy_has({"decode-1": "DRAINING", "decode-2": "HEALTHY"})
            site.remove("decode-1")
            await site.envoy_has({"decode-2": "HEALTHY"})
            assert b"[DONE]" not in received
            async for chunk in chunks:
                received += chunk
        events = [line for line in received.split(b"\n") if line.startswith(b"data: {")]
        tokens = sum(bool(json.loads(event[6:])["choices"][0]["delta"].get("content")) for event in events)
        assert (tokens, received.endswith(b"data: [DONE]\n\n")) == (150, True)
        assert site.served("decode-2") == 0
        await site.nothing_is_left()


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
async def test_O16_ipv6_all_the_way(connector: str) -> None:
    """Clients, Envoy's admin port, the service and its admin port, engines and their side channels: all at ::1."""
    options = {"host": "::1", "connector": connector}
    async with Site.started(
        "prefill-1", "decode-1", engines=options, fleet={"connector": connector}, host="[::1]"
    ) as site:
        assert site.url.startswith("http://[::1]:")
        await site.envoy_has({"decode-1": "HEALTHY"})
        async with Load(site.url) as load:
            await load.further(5)
        assert load.lost == []
        assert site.served("prefill-1") == site.served("decode-1") == len(load.sent)
        metrics = site.engines["decode-1"].metrics
        assert metrics.value("vllm:nixl_num_failed_transfers_total") == 0
        await site.nothing_is_left()

        # The access log comes back over IPv6, and so does the release: by HTTP, or by ZMQ to the side channel.
        await site.engines["decode-1"].fail("hang")
        async with httpx.AsyncClient(base_url=site.url, trust_env=False, timeout=1.0) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(
                    "/v1/chat/completions", json={"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
                )
        await site.engines["decode-1"].heal()
        await until(lambda: site.server.releases.accounts.ended["released"] == 1)
        await site.nothing_is_left()
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://[::1]:{site.server.admin_port}/fleet")
        assert [engine["endpoint"] for engine in answer.json()["engines"]] == [
            site.engines[name].url.removeprefix("http://") for name in ("prefill-1", "decode-1")
        ]


# ---- replaced under load ----


async def test_every_engine_is_replaced_one_by_one_and_no_request_is_lost() -> None:
    old = ["prefill-1", "prefill-2", "decode-1", "decode-2"]
    started = time.monotonic()
    async with Site.started(*old) as site, Load(site.url, rate=20) as load:
        await load.further(10)
        for name in old:
            new = f"{name}-new"
            await site.add(new)
            await site.reaches(new, "ready")
            await until(lambda new=new: site.served(new) > 0)
            site.drain(name)
            await site.reaches(name, "draining")
            await until(lambda name=name: site.quiet(name))
            site.remove(name)
            await site.reaches(name, "absent")
            await site.engines[name].stop()
        await load.further(20)
    assert load.lost == []
    assert [site.served(f"{name}-new") > 0 for name in old] == [True] * 4
    assert {engine.name for engine in site.server.service.fleet.engines()} == {f"{name}-new" for name in old}
    told(f"rolling replacement: {len(load.sent)} requests in {time.monotonic() - started:.1f} s, 0 lost")


# ---- prefillers that fail ----


async def fails_and_returns(site: Site, load: Load, fail: Callable[[SimEngine], Any]) -> tuple[float, float]:
    """prefill-1 fails, is left alone, and is taken back: seconds for either, but for stalls of the event loop."""
    engine = site.engines["prefill-1"]
    await load.further(10)
    assert site.served("prefill-1") > 0
    await fail(engine)
    async with Stalls() as stalls:
        out = await site.reaches("prefill-1", "ejected") - stalls.seconds
    await load.further(10)
    await engine.heal()
    healed, before = time.monotonic(), site.served("prefill-1")
    async with Stalls() as stalls:
        await until(lambda: site.state("prefill-1") == "ready" and site.served("prefill-1") > before)
        back = time.monotonic() - healed - stalls.seconds
    await load.further(10)
    return out, back


async def test_a_prefiller_that_accepts_and_never_answers() -> None:
    async with (
        Site.started("prefill-1", "prefill-2", "decode-1", prefill={"timeout_s": 2.0}) as site,
        Load(site.url) as load,
    ):
        out, back = await fails_and_returns(site, load, lambda engine: engine.fail("hang"))
    assert load.lost == []
    told(f"hanging prefiller: {len(load.sent)} requests, 0 lost; ejected after {out:.2f} s, back after {back:.2f} s")
    # Three requests hang, one after the other: the load that a hanging one is goes elsewhere. Each takes 2 s, and some
    # more until its call is closed. Trials come 0.5 s, 1 s, 2 s … after the failure before.
    assert out < 12.0
    assert back < 8.0


async def test_a_prefiller_that_answers_500() -> None:
    async with Site.started("prefill-1", "prefill-2", "decode-1") as site, Load(site.url) as load:
        out, back = await fails_and_returns(site, load, lambda engine: engine.fail("500"))
    assert load.lost == []
    told(f"prefiller with 500: {len(load.sent)} requests, 0 lost; ejected after {out:.2f} s, back after {back:.2f} s")
    assert out < 2.0
    assert back < 4.5


async def test_a_prefiller_whose_process_dies_and_comes_back() -> None:
    """Found by probes as well: whichever is first."""
    async with Site.started("prefill-1", "prefill-2", "decode-1") as site, Load(site.url) as load:
        await load.further(10)
        await site.engines["prefill-1"].fail("refuse")
        started = time.monotonic()
        async with Stalls() as stalls:
            await until(lambda: site.state("prefill-1") in ("ejected", "unhealthy"))
            out = time.monotonic() - started - stalls.seconds
        await site.reaches("prefill-1", "unhealthy")
        await site.engines["prefill-1"].heal()
        async with Stalls() as stalls:
            back = await site.reaches("prefill-1", "ready") - stalls.seconds
        before = site.served("prefill-1")
        await until(lambda: site.served("prefill-1") > before)
    assert load.lost == []
    told(f"dead prefiller: {len(load.sent)} requests, 0 lost; left alone after {out:.2f} s, back after {back:.2f} s")
    assert out < 2.0
    assert back < 2.0


async def test_a_prefiller_that_flaps() -> None:
    async with Site.started("prefill-1", "prefill-2", "decode-1") as site, Load(site.url) as load:
        await load.further(10)
        engine = site.engines["prefill-1"]
        outs: list[float] = []
        for _ in range(3):  # up for shorter than its ejections last, and down again
            await engine.fail("500")
            before, failed = len(load.sent), time.monotonic()
            async with Stalls() as stalls:
                await until(lambda before=before: site.state("prefill-1") == "ejected" or len(load.sent) >= before + 16)
                if site.state("prefill-1") == "ejected":
                    outs.append(time.monotonic() - failed - stalls.seconds)
            await engine.heal()
            before = len(load.sent)
            await until(lambda before=before: len(load.sent) >= before + 4)
        await engine.fail("500")
        await site.reaches("prefill-1", "ejected")
        await engine.heal()
        async with Stalls() as stalls:
            back = await site.reaches("prefill-1", "ready") - stalls.seconds
        before = site.served("prefill-1")
        await until(lambda: site.served("prefill-1") > before)
    assert load.lost == []
    assert outs
    told(
        f"flapping prefiller: {len(load.sent)} requests, 0 lost; ejected after {max(outs):.2f} s at most, "
        f"back {back:.2f} s after its last failure"
    )
    assert max(outs) < 3.0
    assert back < 8.0  # it had failed up to four times in a row: 0.5 s, doubled each time


async def test_an_ejected_prefiller_is_better_than_none() -> None:
    """It is tried when the other one has failed: it may be well again."""
    outlier = {"consecutive": 3, "base_s": 30.0}
    async with Site.started("prefill-1", "prefill-2", "decode-1", fleet={"outlier": outlier}) as site:
        await site.engines["prefill-1"].fail("500")
        async with Load(site.url) as load:
            await site.reaches("prefill-1", "ejected")
        await site.engines["prefill-1"].heal()
        await site.engines["prefill-2"].fail("500")
        async with Load(site.url) as more:
            await more.further(10)
        assert load.lost == more.lost == []
        assert site.state("prefill-1") == "ready"


# ---- a DNS name that changes ----


async def test_a_dns_name_that_changes() -> None:
    """Engines of both roles move to another address; the old ones stop a moment later."""
    port = free_ports_at("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
    async with DnsServer() as dns, contextlib.AsyncExitStack() as stack:
        dns.set("prefill.test", "A", "127.0.0.2", ttl=1)
        dns.set("decode.test", "A", "127.0.0.3", ttl=1)
        fleet = {
            "file": None,
            "dns": [
                {"role": "prefill", "name": "prefill.test", "port": port},
                {"role": "decode", "name": "decode.test", "port": port},
            ],
            "dns_servers": [dns.address],
        }
        site = Site()
        for name, host in (("prefill-1", "127.0.0.2"), ("decode-1", "127.0.0.3")):
            site.engines[name] = await stack.enter_async_context(engine_at(name, host, port))
        async with Site.started(fleet=fleet) as started:
            started.engines.update(site.engines)
            await started.envoy_has({"decode-1": "HEALTHY"})
            async with Load(started.url) as load:
                await load.further(10)
                for name, host in (("prefill-2", "127.0.0.4"), ("decode-2", "127.0.0.5")):
                    started.engines[name] = await stack.enter_async_context(engine_at(name, host, port))
                changed, stalls = time.monotonic(), await stack.enter_async_context(Stalls())
                dns.set("prefill.test", "A", "127.0.0.4", ttl=1)
                dns.set("decode.test", "A", "127.0.0.5", ttl=1)
                await started.envoy_has({"decode-2": "HEALTHY"})
                await until(lambda: started.served("prefill-2") > 0 and started.served("decode-2") > 0)
                taken = time.monotonic() - changed - stalls.seconds
                await until(
                    lambda: not any(started.engines[name].engine.pool.used for name in ("prefill-1", "decode-1"))
                )
                for name in ("prefill-1", "decode-1"):
                    await started.engines[name].stop()
                await load.further(10)
            assert load.lost == []
            told(f"DNS change: {len(load.sent)} requests, 0 lost; new engines at work after {taken:.2f} s (TTL 1 s)")
            assert taken < 4.0


def engine_at(name: str, host: str, port: int) -> SimEngine:
    role: Any = name.partition("-")[0]
    return SimEngine(SimConfig(role=role, host=host, port=port))


def free_ports_at(*hosts: str) -> int:
    """One port that is free at all of these addresses."""
    while True:
        port = free_port(hosts[0])
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for host in hosts:
                stack.enter_context(socket.socket()).bind((host, port))
            return port


# ---- two replicas of the service ----


async def test_two_replicas_share_the_load_and_one_is_killed() -> None:
    """Nothing is lost but what the killed one was prefilling, and that is freed at once."""
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="extproc-test-")))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        engines = {}
        for name in ("prefill-1", "prefill-2", "decode-1", "decode-2"):
            role: Any = name.partition("-")[0]
            engines[name] = await stack.enter_async_context(SimEngine(SimConfig(role=role, prefill_us_per_token=300)))
        values: dict[str, Any] = {
            "fleet": {
                role: [{"url": e.url, "name": name} for name, e in engines.items() if name.startswith(role)]
                for role in ("prefill", "decode")
            },
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "message_timeout_s": 30},
        }
        replicas = [Replica(f"extproc-{number}", values, directory, client) for number in (1, 2)]
        for replica in replicas:
            stack.push_async_callback(replica.process.stop)
        await asyncio.gather(*(replica.process.start() for replica in replicas))
        addresses = [f"{HOST}:{replica.grpc_port}" for replica in replicas]
        values["envoy"]["extproc"] = addresses[0]
        bootstrap = yaml.safe_load(render(build(values)))
        (service,) = [one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "extproc"]
        socket_address = {"address": HOST, "port_value": replicas[1].grpc_port}
        service["load_assignment"]["endpoints"][0]["lb_endpoints"].append(
            {"endpoint": {"address": {"socket_address": socket_address}}}
        )
        envoy = await stack.enter_async_context(
            envoy_process(yaml.safe_dump(bootstrap), directory=directory / "envoy", concurrency=1)
        )

        async def both_seen() -> bool:
            return (await envoy.clusters())["extproc"] == dict.fromkeys(addresses, True)

        await until(both_seen)
        url = f"http://{(await envoy.listeners())['gateway']}"

        async with Load(url, words=5) as load:  # some 40 tokens: a prefill of 12 ms
            await load.further(30)
        handled = [sum((await replica.counts("extproc_exchanges_total")).values()) for replica in replicas]
        assert min(handled) >= 0.4 * sum(handled)

        # Prompts of 4000 tokens, more than a second each: two on each prefiller, two from each replica.
        async with Load(url, rate=1000, words=600, most=4) as long:
            await until(lambda: sum(len(engines[f"prefill-{n}"].requests) for n in (1, 2)) >= len(load.sent) + 4)
            in_flight = [await replica.in_flight() for replica in replicas]
            assert in_flight == [2, 2]
            replicas[0].process.signal(signal.SIGKILL)
            killed_at = time.monotonic()
            async with Load(url, words=5) as after:
                await after.further(20)
        await until(lambda: not any(engine.engine.pool.used for engine in engines.values()))
        freed = time.monotonic() - killed_at

        records = [record for name in ("prefill-1", "prefill-2") for record in engines[name].requests]
        outcomes = Counter(record.outcome for record in records if record.prompt_tokens > 1000)
        told(
            f"two replicas: {handled[0]} : {handled[1]} requests; one killed with 4 prefills under way, 2 of them its: "
            f"{dict(outcomes)}; {len(long.lost)} of those requests and {len(after.lost)} later ones lost; "
            f"all blocks free after {freed:.1f} s"
        )
        assert len(long.lost) <= 2
        assert after.lost == []
        assert freed < 20  # the lease of 30 s has no part in it

        async def nothing_is_left() -> bool:  # the last stream ends a moment after its response
            fleet = await replicas[1].fleet()
            return (fleet["in_flight"], {engine["inflight"] for engine in fleet["engines"]}) == (0, {0})

        await until(nothing_is_left)


# ---- when P/D does not pay ----


async def test_a_prompt_that_a_decoder_has_most_of_goes_there_without_a_prefill() -> None:
    settings = {"routing": {"bypass_cached_ratio": 0.6, "decode_policy": "round_robin"}}
    async with Gateway.started(settings, prefill=1, decode=3) as gateway:

        async def ask(prompt: str) -> Any:
            assert (await gateway.post({"model": "m", "prompt": prompt}, COMPLETIONS)).status_code == 200
            await gateway.settled()
            counts = [len(engine.requests) for engine in (*gateway.prefillers, *gateway.decoders)]
            for engine in (*gateway.prefillers, *gateway.decoders):
                engine.requests.clear()
            return counts

        story = "Once upon a time " * 500  # eight blocks
        prefills, *first = await ask(story)
        assert (prefills, sum(first)) == (1, 1)
        for _ in range(3):  # always the decoder that has it, though it is others' turn
            story += "and then " * 200
            assert await ask(story) == [0, *first]
        assert gateway.counts("extproc_bypass_total") == {"cached_prefix": 3}

        assert (await ask("Something else " * 500))[0] == 1
        assert (await ask(story + "a long addition " * 2000))[0] == 1  # too little of it is known

        tale = "In a hole in the ground " * 300
        (home,) = [number for number, count in enumerate((await ask(tale))[1:]) if count]
        assert await ask(tale) == [0, *(int(number == home) for number in range(3))]
        server = gateway.server
        assert server is not None
        (dead,) = [e for e in server.service.fleet.engines("decode") if e.name == f"decode-{home + 1}"]
        dead.health.probed("ConnectError", 1)  # its process has died, and its cache with it
        server.service.fleet.changed()
        dead.health.probed("", 1)
        assert (await ask(tale))[0] == 1


async def test_a_refused_request_leaves_nothing_in_a_decoders_cache() -> None:
    settings = {"routing": {"bypass_cached_ratio": 0.5}}
    async with Gateway.started(settings, prefill=1, decode=1) as gateway:
        (decoder,) = gateway.decoders

        def refusing(_: RecordedRequest) -> Answer:
            return Answer.json({"error": {"message": "no", "code": 400}}, status=400)

        body = {"model": "m", "prompt": "Once upon a time " * 500}
        decoder.respond = refusing
        assert (await gateway.post(body, COMPLETIONS)).status_code == 400
        decoder.respond = answer_decode
        for prefills in (2, 2):
            assert (await gateway.post(body, COMPLETIONS)).status_code == 200
            await gateway.settled()
            assert len(gateway.prefills) == prefills
