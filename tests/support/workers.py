"""``grpc.workers``: a supervisor with its workers, behind a real Envoy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import EnvoyProcess, Process, envoy_process
from tests.support.engines import StubEngine
from tests.support.gateway import CHAT, CHAT_BODY, Decoder, until_async

HOST: Final = "127.0.0.1"
WORKERS: Final = 2
JSON: Final = {"content-type": "application/json"}


def _consecutive_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            first = 0
            for number in range(count):
                probe = stack.enter_context(socket.socket())
                probe.bind((HOST, first + number if first else 0))
                first = first or int(probe.getsockname()[1])
            return first


class Workers:
    """A supervisor with its workers, engines, and an Envoy that was told of them by its bootstrap alone."""

    def __init__(self, folder: Path, **fleet: Any) -> None:
        """``fleet`` goes into that section of the configuration, beside the two engines."""
        self._folder = folder
        self._fleet = fleet
        self.grpc = _consecutive_ports(2 * WORKERS)
        self.admin = self.grpc + WORKERS
        self.prefiller = StubEngine("prefill")
        self.decoder = Decoder()
        self.supervisor: Process
        self.envoy: EnvoyProcess
        self.client: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for engine in (self.prefiller, self.decoder):
                await stack.enter_async_context(engine)
            values = self._values()
            file = self._folder / "extproc.yaml"
            file.write_text(yaml.safe_dump(values))
            command = [sys.executable, "-m", "extproc", "serve", "--config", str(file)]
            self.client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=30))
            self.supervisor = await stack.enter_async_context(
                Process(
                    command,
                    log=self._folder / "extproc.log",
                    name="extproc",
                    ready=self._all_ready,
                    ready_timeout_s=90,
                )
            )
            bootstrap = await asyncio.to_thread(render, build(values))
            bootstrap = bootstrap.replace("timeout: 1s", "timeout: 20s")  # a slow worker is no dead one
            self.envoy = await stack.enter_async_context(envoy_process(bootstrap, directory=self._folder / "envoy"))
            await until_async(self.all_seen_by_envoy)
            self.client.base_url = httpx.URL(f"http://{(await self.envoy.listeners())['gateway']}")
            yield

    def _values(self) -> dict[str, Any]:
        return {
            "grpc": {"listen": f"{HOST}:{self.grpc}", "workers": WORKERS},
            "admin": {"listen": f"{HOST}:{self.admin}"},
            "fleet": {
                "prefill": [{"url": self.prefiller.url}],
                "decode": [{"url": self.decoder.url}],
                **self._fleet,
            },
            "life": {"notice_s": 0.0, "drain_s": 20.0},
            "log": {"format": "json"},
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "extproc": f"{HOST}:{self.grpc}"},
        }

    # ---- requests ----

    async def post(self, name: str = "") -> int:
        headers = JSON | ({"x-request-id": name} if name else {})
        return (await self.client.post(CHAT, content=CHAT_BODY, headers=headers)).status_code

    # ---- what is known ----

    async def _all_ready(self) -> bool:
        return all([await self.ready(worker) for worker in range(WORKERS)])

    async def ready(self, worker: int) -> bool:
        try:
            return (await self.client.get(f"http://{HOST}:{self.admin + worker}/readyz")).is_success
        except httpx.TransportError:
            return False

    async def all_seen_by_envoy(self) -> bool:
        hosts = (await self.envoy.clusters())["extproc"]
        return hosts == {f"{HOST}:{self.grpc + worker}": True for worker in range(WORKERS)}

    async def disaggregated(self) -> list[int]:
        """Requests, by worker."""
        counts = []
        for worker in range(WORKERS):
            text = (await self.client.get(f"http://{HOST}:{self.admin + worker}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            (count,) = [
                sample.value
                for sample in samples
                if sample.name == "extproc_exchanges_total" and sample.labels["decision"] == "disaggregated"
            ]
            counts.append(int(count))
        return counts

    async def fleet(self, worker: int) -> dict[str, Any]:
        """As the worker tells it."""
        answer = await self.client.get(f"http://{HOST}:{self.admin + worker}/fleet")
        told: dict[str, Any] = answer.raise_for_status().json()
        return told

    def events(self, event: str) -> list[dict[str, Any]]:
        """What supervisor and workers have logged under that name."""
        lines = [json.loads(line) for line in self.supervisor.output().splitlines()]
        return [line for line in lines if line["event"] == event]

    def pid(self, worker: int) -> int:
        """Of its present life."""
        return int([line["pid"] for line in self.events("worker started") if line["worker"] == worker][-1])
