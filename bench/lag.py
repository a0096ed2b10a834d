"""How late the event loop is at half its load: the service's own measure, while requests come in at an even pace.

``python -m bench.lag`` first finds how many requests a second the service can take, then offers half of that and reads
``extproc_loop_lag_seconds`` from its admin port.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from bench.hotpath import Service, services
from bench.load import body_of
from bench.messages import Script

_LAG = "extproc_loop_lag_seconds_bucket"


async def _buckets(service: Service) -> dict[float, float]:
    """Observations up to each bound, in seconds."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{service.admin_url}/metrics")).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {float(sample.labels["le"]): sample.value for sample in samples if sample.name == _LAG}


async def _at_rate(service: Service, script: Script, rate: float, seconds: float) -> int:
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[int]]()
    started, sent = loop.time(), 0
    while (now := loop.time()) < started + seconds:
        while sent < (now - started) * rate:
            task = loop.create_task(service.client.exchange(script, logged=True))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            sent += 1
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    return sent


def _bound(counts: dict[float, float], share: float) -> float:
    """The least bound, in seconds, that this share of the observations keeps."""
    total = counts[float("inf")]
    return min(bound for bound, count in counts.items() if count >= share * total)


async def bench(seconds: float) -> None:
    script = Script.of(body_of(5 * 1024, stream=False, tokens=16))
    with tempfile.TemporaryDirectory() as folder:
        async with services(Path(folder)) as (service, _):
            await service.load(script, 300, 32)
            started = time.monotonic()
            await service.load(script, 1000, 32)
            most = 1000 / (time.monotonic() - started)
            before = await _buckets(service)
            sent = await _at_rate(service, script, most / 2, seconds)
            after = await _buckets(service)
    counts = {bound: after[bound] - before[bound] for bound in after}
    shown = ", ".join(f"p{share * 100:g} ≤ {_bound(counts, share) * 1000:g} ms" for share in (0.5, 0.9, 0.99, 1.0))
    print(f"at most {most:.0f} requests/s; {sent} requests at {sent / seconds:.0f}/s; loop lag: {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="four observations a second")
    uvloop.run(bench(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
