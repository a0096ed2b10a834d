"""What engines say of themselves: ``/health`` probes, load from ``/metrics``, models from ``/v1/models``."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec

from extproc.enginehttp import read_at_most
from extproc.fleet.engines import Engine, Report
from extproc.fleet.fleet import Fleet
from extproc.fleet.names import FleetNames
from extproc.telemetry.logs import log

_WAITING, _RUNNING, _KV = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
_OLD_KV = "vllm:gpu_cache_usage_perc"  # its name before vLLM 0.10
_MODELS_EVERY_S = 15.0
_MAX_BYTES = 8 * 1024 * 1024


class Monitor:
    """Watches each engine for as long as it belongs to the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._settings = fleet.settings
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        fleet.on_change(self._changed.set)

    async def run(self) -> None:
        """Follow the fleet for ever."""
        # A connection of its own for each: a kept one says nothing of whether an engine still accepts any.
        connector = aiohttp.TCPConnector(limit=0, force_close=True, resolver=FleetNames(self._fleet))
        timeout = aiohttp.ClientTimeout(total=self._settings.health.timeout_s)
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=jar) as client:
            try:
                while True:
                    self._changed.clear()
                    self._follow(client)
                    await self._changed.wait()
            finally:
                await self._stop(list(self._tasks))

    def _follow(self, client: aiohttp.ClientSession) -> None:
        engines = self._fleet.engines()
        for engine in engines:
            if engine not in self._tasks:
                self._tasks[engine] = asyncio.create_task(self._watch(client, engine), name=f"monitor {engine.name}")
        for engine in [engine for engine in self._tasks if engine not in engines]:
            self._tasks.pop(engine).cancel()

    async def _stop(self, engines: list[Engine]) -> None:
        tasks = [self._tasks.pop(engine) for engine in engines]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, client: aiohttp.ClientSession, engine: Engine) -> None:
        """Probes, load and models, each at its own pace: a slow page holds up nothing but itself."""
        settings = self._settings

        async def probe() -> float:
            await self._probe(client, engine)
            return settings.health.interval_s

        async def scrape() -> float:
            if engine.health.probed_ok is not False:
                await self._scrape(client, engine)
            return settings.scrape_s

        async def read_models() -> float:
            if engine.spec.models is not None:
                return _MODELS_EVERY_S
            known = engine.health.probed_ok is not False and await self._read_models(client, engine)
            return _MODELS_EVERY_S if known else settings.health.interval_s

        async with asyncio.TaskGroup() as group:
            group.create_task(_again_and_again(probe, engine))
            if settings.scrape_s:
                group.create_task(_again_and_again(scrape, engine))
            group.create_task(_again_and_again(read_models, engine))

    async def _probe(self, client: aiohttp.ClientSession, engine: Engine) -> None:
        """Only an engine that does not answer, or answers 5xx, is unhealthy: not every server has a /health."""
        problem = ""
        try:
            async with client.get(engine.url + self._settings.health.path, allow_redirects=False) as response:
                await read_at_most(response, _MAX_BYTES)
            if response.status >= 500:
                problem = f"health {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = _in_a_word(error)
        health = engine.health
        before = health.probed_ok
        if health.probed(problem, self._settings.health.unhealthy_after):
            if before is not None or problem:
                event = "engine healthy" if health.probed_ok else "engine unhealthy"
                log.warning(event, engine=engine.name, role=engine.role, reason=problem or None)
            self._fleet.changed()

    async def _scrape(self, client: aiohttp.ClientSession, engine: Engine) -> None:
        ours_before = engine.inflight
        text = await self._get(client, engine, "/metrics")
        if text is None:
            return
        values = samples(text)
        if _RUNNING not in values:
            return
        waiting, running = round(values.get(_WAITING, 0)), round(values[_RUNNING])
        ours = max(ours_before, engine.inflight)
        engine.report = Report(
            waiting=waiting,
            running=running,
            kv_usage=values.get(_KV, values.get(_OLD_KV, 0.0)),
            foreign=max(0, waiting + running - ours),
            at=time.monotonic(),
        )

    async def _read_models(self, client: aiohttp.ClientSession, engine: Engine) -> bool:
        text = await self._get(client, engine, "/v1/models")
        if text is None:
            return False
        try:
            names = frozenset(str(entry["id"]) for entry in msgspec.json.decode(text)["data"])
        except (msgspec.MsgspecError, KeyError, TypeError):
            return False
        if names and names != engine.known_models:
            engine.known_models = names
            self._fleet.changed()
        return bool(names)

    async def _get(self, client: aiohttp.ClientSession, engine: Engine, path: str) -> str | None:
        headers = {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with client.get(engine.url + path, headers=headers, allow_redirects=False) as response:
                content = await read_at_most(response, _MAX_BYTES)
            if response.status == 200 and content is not None:
                return content.decode("utf-8", "replace")
        return None


def _in_a_word(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "TimeoutError"
    return "ConnectError" if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__


async def _again_and_again(work: Callable[[], Awaitable[float]], engine: Engine) -> None:
    """``work`` returns the seconds from its start to the next time."""
    interval_s = 1.0
    while True:
        started = time.monotonic()
        try:
            interval_s = await work()
        except Exception:  # noqa: BLE001 (whatever an engine says must not end its probes)
            log.exception("monitoring failed", engine=engine.name, role=engine.role)
        await asyncio.sleep(max(0.01, started + interval_s - time.monotonic()))


def samples(text: str) -> dict[str, float]:
    """The samples of a ``/metrics`` page that tell load, summed over their labels.

    An engine with several data-parallel ranks has one sample for each; KV usage is then their mean.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line[: line.find("{")] if "{" in line else line.partition(" ")[0]
        if name not in (_WAITING, _RUNNING, _KV, _OLD_KV):
            continue
        with contextlib.suppress(ValueError, IndexError):
            value = float(line.rpartition("}")[2].split()[0] if "}" in line else line.split()[1])
            if not math.isfinite(value):
                continue
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0) + 1
    return {name: total / counts[name] if name in (_KV, _OLD_KV) else total for name, total in sums.items()}
