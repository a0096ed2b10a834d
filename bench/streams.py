"""Thousands of open streams on one worker: what each costs in memory, and whether churn leaves anything behind.

::

    python -m bench.streams [--streams 5000] [--churn 60]

Plays Envoy to a running service, without one: each stream is dispatched to its decoder and stays open, as it does while
tokens flow. With all of them open, requests come and go for ``--churn`` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import uvloop

from bench.hotpath import Service, services
from bench.load import body_of
from bench.messages import Script, Stream

_AT_ONCE: Final = 64
_SAMPLES: Final = 12


def rss(pid: int) -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _open(service: Service, script: Script, count: int) -> list[Stream]:
    streams: list[Stream] = []
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            stream = service.client.stream()
            await stream.dispatch(script)
            await stream.ask(script.answer)
            streams.append(stream)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
    return streams


async def _churn(service: Service, script: Script, seconds: float) -> tuple[int, list[float]]:
    """Requests that came and went meanwhile, and the service's memory at equal intervals."""
    until, count = time.monotonic() + seconds, 0
    sizes = []

    async def worker() -> None:
        nonlocal count
        while time.monotonic() < until:
            await service.client.exchange(script, logged=True)
            count += 1

    workers = [asyncio.create_task(worker()) for _ in range(_AT_ONCE)]
    for _ in range(_SAMPLES):
        await asyncio.sleep(seconds / _SAMPLES)
        sizes.append(rss(service.pid))
    await asyncio.gather(*workers)
    return count, sizes


async def bench(count: int, churn_s: float, size: int) -> None:
    script = Script.of(body_of(size, stream=True, tokens=200))
    with tempfile.TemporaryDirectory() as folder:
        async with services(Path(folder)) as (service, _):
            await service.load(script, 500, 16)
            before = rss(service.pid)
            streams = await _open(service, script, count)
            opened = rss(service.pid)
            each = (opened - before) * 1000 / count
            print(f"{count} open streams: {before:.0f} -> {opened:.0f} MB, {each:.1f} KB a stream")
            if churn_s:
                requests, sizes = await _churn(service, script, churn_s)
                shown = " ".join(f"{megabytes:.0f}" for megabytes in sizes)
                print(f"{requests} requests came and went in {churn_s:g} s with them open; MB meanwhile: {shown}")
            left = iter(streams)

            async def closer() -> None:
                for stream in left:
                    with contextlib.suppress(ConnectionError):
                        await stream.end()

            await asyncio.gather(*(closer() for _ in range(_AT_ONCE)))
            await service.load(script, 100, 16)
            print(f"all closed: {rss(service.pid):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--churn", type=float, default=60.0, help="seconds")
    parser.add_argument("--size", type=int, default=5 * 1024, help="bytes of each request's body")
    options = parser.parse_args()
    uvloop.run(bench(options.streams, options.churn, options.size))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
