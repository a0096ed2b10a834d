"""What is compared: each contender as processes on free ports, with the CPU time that each of them has used."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from extproc.bootstrap import render
from extproc.config import build
from extproc.processes import Process, envoy_process, free_port

HOST = "127.0.0.1"


@dataclass
class Contender:
    """``port`` takes the client's requests; ``processes`` are what stands between client and engines."""

    name: str
    port: int
    prefill_port: int | None = None
    processes: dict[str, Process] = field(default_factory=dict)

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time of each process and its children so far."""
        return {name: _cpu(process.pid) for name, process in self.processes.items()}


def _cpu(pid: int) -> float:
    root = psutil.Process(pid)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(OSError):  # it has ended
            total += time.clock_gettime(_cpu_clock(process.pid))
    return total


def _cpu_clock(pid: int) -> int:
    """Linux' clock of another process's CPU time (clock_getcpuclockid(3)): psutil's figures come in ticks of 10 ms."""
    return (~pid << 3) | 2


@contextlib.asynccontextmanager
async def engines(
    directory: Path, *, token_ms: float, prefill_us_per_byte: float = 0.0
) -> AsyncIterator[tuple[int, int]]:
    """One mock prefiller and one mock decoder, in processes of their own; yields their ports."""
    ports = free_port(HOST), free_port(HOST)
    async with contextlib.AsyncExitStack() as stack:
        for name, port in zip(("prefill", "decode"), ports, strict=True):
            command = [sys.executable, "-m", "bench.mock_engine", str(port), "--token-ms", str(token_ms)]
            command += ["--prefill-us-per-byte", str(prefill_us_per_byte)]
            log = directory / f"mock-{name}.log"
            await stack.enter_async_context(Process(command, log=log, name=name, ready=re.compile("ready")))
        yield ports


@contextlib.asynccontextmanager
async def simulated_engines(directory: Path, options: Sequence[str]) -> AsyncIterator[tuple[int, int]]:
    """A simulated prefiller and decoder, with these options of ``extproc sim``; yields their ports."""
    ports = free_port(HOST), free_port(HOST)
    async with contextlib.AsyncExitStack() as stack:
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            command = [sys.executable, "-m", "extproc", "sim", "--role", role, "--port", str(port), *options]
            log, ready = directory / f"sim-{role}.log", f"http://{HOST}:{port}/health"
            await stack.enter_async_context(Process(command, log=log, name=f"sim-{role}", ready=ready))
        yield ports


@contextlib.asynccontextmanager
async def contender(
    name: str, directory: Path, prefill: int, decode: int, *, workers: int = 1, concurrency: int = 2
) -> AsyncIterator[Contender]:
    """Start one contender in front of a prefiller and a decoder. Raises LookupError where it is not installed."""
    async with contextlib.AsyncExitStack() as stack:
        if name == "engine alone":
            yield Contender(name, decode)
        elif name == "two-step client":
            yield Contender(name, decode, prefill_port=prefill)
        elif name == "vllm-router":
            router, port = await _router(stack, directory, prefill, decode)
            yield Contender(name, port, processes={"router": router})
        elif name == "Envoy + vllm-router":
            router, port = await _router(stack, directory, prefill, decode)
            made = await _envoy(stack, directory, name, prefill, port, extproc=False, concurrency=concurrency)
            made.processes["router"] = router
            yield made
        else:
            yield await _envoy(
                stack,
                directory,
                name,
                prefill,
                decode,
                extproc=name != "Envoy alone",
                bare="bare" in name,
                streamed="streamed" in name,
                workers=workers,
                concurrency=concurrency,
            )


async def _router(stack: contextlib.AsyncExitStack, directory: Path, prefill: int, decode: int) -> tuple[Process, int]:
    program = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if program is None:
        raise LookupError("vllm-router is not installed: pip install vllm-router")
    port = free_port(HOST)
    command = [program, "--host", HOST, "--port", str(port), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--prefill", f"http://{HOST}:{prefill}", "--decode", f"http://{HOST}:{decode}"]
    command += ["--prometheus-port", str(free_port(HOST)), "--log-level", "error"]
    command += ["--max-payload-size", str(64 * 1024 * 1024)]
    router = Process(
        command, log=directory / "router.log", name="router", ready=f"http://{HOST}:{port}/health", ready_timeout_s=60
    )
    await stack.enter_async_context(router)
    return router, port


async def _envoy(
    stack: contextlib.AsyncExitStack,
    directory: Path,
    name: str,
    prefill: int,
    decode: int,
    *,
    extproc: bool,
    bare: bool = False,
    streamed: bool = False,
    workers: int = 1,
    concurrency: int = 2,
) -> Contender:
    grpc, admin = free_port(HOST), free_port(HOST)
    values = {
        "grpc": {"listen": f"{HOST}:{grpc}", "workers": workers},
        "admin": {"listen": f"{HOST}:{admin}"},
        "fleet": {
            "prefill": [{"url": f"http://{HOST}:{prefill}"}],
            "decode": [{"url": f"http://{HOST}:{decode}"}],
        },
        "log": {"level": "warning"},
        "envoy": {"listen": f"{HOST}:0", "admin": f"{HOST}:0", "extproc": f"{HOST}:{grpc}"},
    }
    bootstrap = yaml.safe_load(render(build(values)))
    _adapt(bootstrap, extproc=extproc, streamed=streamed)
    processes: dict[str, Process] = {}
    folder = directory / re.sub(r"\W+", "-", name)
    folder.mkdir(exist_ok=True)
    if bare:
        _without_health_checks(bootstrap)  # the yardstick serves none
        command = [sys.executable, "-m", "bench.bare", str(grpc), f"{HOST}:{decode}"]
        processes["bare"] = Process(command, log=folder / "bare.log", name="bare", ready=re.compile("ready"))
        await stack.enter_async_context(processes["bare"])
    elif extproc:
        file = folder / "extproc.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        processes["extproc"] = Process(
            [sys.executable, "-m", "extproc", "serve", "--config", str(file)],
            log=folder / "extproc.log",
            name="extproc",
            ready=f"http://{HOST}:{admin + workers - 1}/readyz",
        )
        await stack.enter_async_context(processes["extproc"])
    envoy = envoy_process(yaml.safe_dump(bootstrap), directory=folder / "envoy", concurrency=concurrency)
    processes["envoy"] = envoy
    await stack.enter_async_context(envoy)
    listener = next(iter((await envoy.listeners()).values()))
    return Contender(name, int(listener.rpartition(":")[2]), processes=processes)


def _adapt(bootstrap: dict[str, object], *, extproc: bool, streamed: bool) -> None:
    """Take the processor and its access log out, or stream response bodies through it."""
    for manager in _managers(bootstrap):
        if not extproc:
            manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in str(f["typed_config"])]
            manager["access_log"] = []
        elif streamed:
            for entry in manager["http_filters"]:
                if "processing_mode" in entry["typed_config"]:
                    entry["typed_config"]["processing_mode"]["response_body_mode"] = "STREAMED"


def _without_health_checks(bootstrap: dict[str, Any]) -> None:
    for cluster in bootstrap["static_resources"]["clusters"]:
        cluster.pop("health_checks", None)


def _managers(node: object) -> list[dict[str, list[dict[str, dict[str, dict[str, str]]]]]]:
    found = []
    if isinstance(node, dict):
        if "http_filters" in node:
            found.append(node)
        for value in node.values():
            found += _managers(value)
    elif isinstance(node, list):
        for value in node:
            found += _managers(value)
    return found
