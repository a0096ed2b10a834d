"""A whole gateway on this machine: engines, the service and a real Envoy, each a process, on free ports."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import yaml

from extproc.config import Config, build
from extproc.processes import EnvoyProcess, Process, ProcessError, envoy_process, free_port, plain_http_client

HOST = "127.0.0.1"
EngineKind = Literal["sim", "vllm"]
Role = Literal["prefill", "decode"]
Progress = Callable[[str], None]

_START_S = 90.0  # two seconds of CPU, on a machine that may have other things to do


@dataclass
class DemoEngine:
    """One engine of the stack."""

    name: str
    role: Role
    process: Process
    url: str
    control_url: str | None = None
    """Simulated engines only: ``/sim/state`` and ``/sim/fail`` answer here even when the engine refuses connections."""
    abort_port: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def entry(self) -> dict[str, Any]:
        """The engine as the configuration lists it."""
        entry: dict[str, Any] = {"url": self.url, "name": self.name, **self.extra}
        return entry | ({"abort_port": self.abort_port} if self.abort_port else {})


class Stack:
    """An async context manager; inside it, ``url`` is where a client finds Envoy.

    ``settings`` is merged over the configuration that fits the started engines (sections as in the file);
    ``engine_arguments`` are given to every simulated engine, and Envoy gets what ``change_bootstrap`` makes of its
    bootstrap.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        kind: EngineKind = "sim",
        settings: Mapping[str, Any] | None = None,
        engine_arguments: Sequence[str] = (),
        change_bootstrap: Callable[[str], str] = lambda text: text,
        progress: Progress = lambda _: None,
    ) -> None:
        self.directory = directory
        self.kind: EngineKind = kind
        self.engines: list[DemoEngine] = []
        self._counts: dict[Role, int] = {"prefill": prefill, "decode": decode}
        self._settings = settings or {}
        self._arguments = list(engine_arguments)
        self._change_bootstrap = change_bootstrap
        self._progress = progress
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        build(self._values({"decode": [{"url": f"http://{HOST}:1"}]}))  # what is wrong is said before anything starts
        async with AsyncExitStack() as stack:
            await self._start_engines(stack)
            await self._start_service(stack)
            await self._start_envoy(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def named(self, name: str) -> DemoEngine:
        """The engine of that name (``prefill-1``, ``decode-2`` …)."""
        return next(engine for engine in self.engines if engine.name == name)

    async def _start_engines(self, stack: AsyncExitStack) -> None:
        self._progress(f"starting {sum(self._counts.values())} engines ({self.kind})")
        for role, count in self._counts.items():
            for number in range(1, count + 1):
                make = self._simulated if self.kind == "sim" else self._real
                self.engines.append(make(f"{role}-{number}", role))
        for engine in self.engines:
            stack.push_async_callback(engine.process.stop)
        await asyncio.gather(*(engine.process.start() for engine in self.engines))
        for engine in self.engines:
            if engine.process.ready_line is not None:  # a simulated one says which ports it has taken
                ports = json.loads(engine.process.ready_line)
                engine.url, engine.control_url = (f"http://{HOST}:{ports[key]}" for key in ("port", "control_port"))

    def _simulated(self, name: str, role: Role) -> DemoEngine:
        command = [sys.executable, "-m", "extproc", "sim", "--role", role, "--host", HOST, "--port", "0"]
        process = Process(
            [*command, *self._arguments],
            log=self.directory / f"{name}.log",
            name=name,
            ready=re.compile('"ready"'),
            ready_timeout_s=_START_S,
        )
        return DemoEngine(name, role, process, "")

    def _real(self, name: str, role: Role) -> DemoEngine:
        from extproc.demo.vllm.launch import VllmEngine

        # In small steps, so that a prefill takes long enough to be seen.
        engine = VllmEngine(role, directory=self.directory, name=name, arguments=("--max-num-batched-tokens", "64"))
        return DemoEngine(name, role, engine, engine.url)

    def _values(self, fleet: Mapping[str, Any], admin: int = 0, grpc: int = 0) -> dict[str, Any]:
        """The configuration, by section."""
        values: dict[str, Any] = {
            "grpc": {"listen": f"{HOST}:{grpc}"},
            "admin": {"listen": f"{HOST}:{admin}"},
            "fleet": fleet,
            "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "extproc": f"{HOST}:{grpc}"},
        }
        for section, keys in self._settings.items():
            values[section] = {**values.get(section, {}), **keys}
        return values

    async def _start_service(self, stack: AsyncExitStack) -> None:
        self._progress("starting the service")
        admin, grpc = free_port(HOST), free_port(HOST)
        self.admin_url = f"http://{HOST}:{admin}"
        fleet = {role: [e.entry() for e in self.engines if e.role == role] for role in ("prefill", "decode")}
        values = self._values(fleet, admin, grpc)
        self.config: Config = build(values)
        self.config_file = self.directory / "extproc.yaml"
        self.config_file.write_text(yaml.safe_dump(values), encoding="utf-8")
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(self.config_file)]
        self.service = Process(
            command,
            log=self.directory / "extproc.log",
            name="extproc",
            ready=f"{self.admin_url}/readyz",
            ready_timeout_s=_START_S,
        )
        await stack.enter_async_context(self.service)

    async def _start_envoy(self, stack: AsyncExitStack) -> None:
        from extproc.bootstrap import render

        self._progress("starting Envoy")
        bootstrap = self._change_bootstrap(render(self.config))
        self.envoy: EnvoyProcess = envoy_process(bootstrap, directory=self.directory / "envoy")
        await stack.enter_async_context(self.envoy)
        try:
            await self.service_seen_by_envoy()
        except TimeoutError:
            raise ProcessError(f"Envoy finds no healthy service at {self.config.envoy.extproc}") from None
        listeners = await self.envoy.listeners()
        self.url = f"http://{next(iter(listeners.values()))}"

    async def service_seen_by_envoy(self, *, healthy: bool = True, timeout_s: float = 10.0) -> None:
        """Wait until Envoy's health check has found the service as it is. Raises TimeoutError."""
        address = self.config.envoy.extproc
        async with asyncio.timeout(timeout_s):
            while (await self._service_health()).get(address) is not healthy:
                await asyncio.sleep(0.02)

    async def _service_health(self) -> dict[str, bool]:
        clusters = await self.envoy.clusters()
        return {host: state for hosts in clusters.values() for host, state in hosts.items()}

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────

    async def exchanges(self) -> list[dict[str, Any]]:
        """The service's record of recent requests, newest first."""
        async with plain_http_client(timeout_s=5.0) as client:
            answer = (await client.get(f"{self.admin_url}/exchanges")).raise_for_status().json()
        return list(answer["exchanges"])

    async def exchange(
        self, request_id: str, until: Callable[[dict[str, Any]], bool] = lambda _: True, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """The record of the request that a client sent with this X-Request-Id, once ``until`` holds for it."""
        async with asyncio.timeout(timeout_s):
            while True:
                for record in await self.exchanges():
                    if record.get("client_request_id") == request_id and until(record):
                        return record
                await asyncio.sleep(0.02)

    async def kv_usage(self, engine: DemoEngine) -> float:
        """``vllm:kv_cache_usage_perc`` of an engine: 0 when no block is in use."""
        async with plain_http_client(timeout_s=5.0) as client:
            text = (await client.get(f"{engine.url}/metrics")).raise_for_status().text
        lines = (line for line in text.splitlines() if line.startswith("vllm:kv_cache_usage_perc"))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def fail(self, engine: DemoEngine, mode: str, **options: Any) -> None:
        """Tell a simulated engine to fail in one of its ways (``extproc sim --help``)."""
        async with plain_http_client(timeout_s=5.0) as client:
            answer = await client.post(f"{engine.control_url}/sim/fail", content=json.dumps({"mode": mode, **options}))
            answer.raise_for_status()
