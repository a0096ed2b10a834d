"""CPU of the service for one unary exchange, without Envoy, side by side with the least that grpc.aio can do.

``python -m bench.hotpath`` plays Envoy to a running service (with a prefill call to a mock engine in a process of its
own, and an access log entry) and to :mod:`bench.bare` in turn, and prints what the operating system accounted to each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
import yaml

from bench.contenders import HOST, engines
from bench.load import body_of
from bench.messages import Client, Script
from extproc.processes import Process, free_port


@dataclass
class Service:
    """A running service; ``cpu_ms`` gets a value for each round, milliseconds a request."""

    pid: int
    client: Client
    logged: bool
    admin_url: str
    cpu_ms: list[float] = field(default_factory=list)
    messages: int = 0

    def cpu_s(self) -> float:
        """As the scheduler accounts it to the threads, in nanoseconds: cpu_times() counts in ticks of 10 ms."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    async def load(self, script: Script, requests: int, concurrency: int) -> None:
        """One round."""
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                self.messages = await self.client.exchange(script, logged=self.logged)

        before = self.cpu_s()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        self.cpu_ms.append((self.cpu_s() - before) * 1000 / requests)


@contextlib.asynccontextmanager
async def services(directory: Path) -> AsyncIterator[tuple[Service, Service]]:
    """extproc and the bare service, each in a process."""
    async with contextlib.AsyncExitStack() as stack:
        prefill, decode = await stack.enter_async_context(engines(directory, token_ms=0))
        ports, admin = (free_port(HOST), free_port(HOST)), free_port(HOST)
        values = {
            "grpc": {"listen": f"{HOST}:{ports[0]}"},
            "admin": {"listen": f"{HOST}:{admin}"},
            "fleet": {
                "prefill": [{"url": f"http://{HOST}:{prefill}"}],
                "decode": [{"url": f"http://{HOST}:{decode}"}],
            },
            "log": {"level": "warning"},
        }
        file = directory / "extproc.yaml"
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        extproc = Process(
            [sys.executable, "-m", "extproc", "serve", "--config", str(file)],
            log=directory / "extproc.log",
            name="extproc",
            ready=f"http://{HOST}:{admin}/readyz",
        )
        command = [sys.executable, "-m", "bench.bare", str(ports[1]), f"{HOST}:{decode}"]
        bare = Process(command, log=directory / "bare.log", name="bare", ready=re.compile("ready"))
        made = []
        for process, port in ((extproc, ports[0]), (bare, ports[1])):
            await stack.enter_async_context(process)
            client = await stack.enter_async_context(Client.to(f"{HOST}:{port}"))
            made.append(Service(process.pid, client, process is extproc, f"http://{HOST}:{admin}"))
        yield made[0], made[1]


async def bench(sizes: list[int], rounds: int, requests: int, concurrency: int) -> str:
    """Markdown."""
    lines = ["| body | extproc ms | bare ms | ratio | messages |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        async with services(Path(folder)) as (extproc, bare):
            for size in sizes:
                script = Script.of(body_of(size, stream=False, tokens=16))
                for service in (extproc, bare):
                    await service.load(script, requests, concurrency)  # warm-up
                    service.cpu_ms.clear()
                for _ in range(rounds):
                    for service in (extproc, bare):
                        await service.load(script, requests, concurrency)
                ratios = [ours / least for ours, least in zip(extproc.cpu_ms, bare.cpu_ms, strict=True)]
                cells = (
                    shown(extproc.cpu_ms),
                    shown(bare.cpu_ms),
                    shown(ratios),
                    f"{extproc.messages}/{bare.messages}",
                )
                lines.append(f"| {size / 1024:g} KB | {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(values: list[float]) -> str:
    """The median, with (min–max); on a busy machine the least is the truest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, nargs="+", default=[5 * 1024], help="bytes of the request body")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=100, help="in each round")
    parser.add_argument("--concurrency", type=int, default=16)
    options = parser.parse_args()
    print(uvloop.run(bench(options.size, options.rounds, options.requests, options.concurrency)))


if __name__ == "__main__":
    main()
