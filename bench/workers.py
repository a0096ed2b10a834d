"""What a second worker is worth: throughput of ``workers: 2`` over 1, by CPU accounting.

``python -m bench.workers`` loads an Envoy with one worker behind it and one with two, in turn. A worker that needs
``c`` CPU seconds for its share of ``n`` requests could serve ``n / c`` a second on a core of its own; the slower one
limits both. Each worker gets the same concurrency, as it does where workers are added for more load.

Where one worker is busy all the time and two are not, as with a high concurrency on two cores, that is against the two:
a busy worker finds its next message waiting, an idle one has to be woken up for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from pathlib import Path

import psutil

from bench.contenders import Contender, contender, engines
from bench.run import Workload, measure


def workers_cpu(target: Contender) -> dict[int, float]:
    """CPU seconds of each worker process, by its id: a supervisor's children, or the one process itself."""
    root = psutil.Process(target.processes["extproc"].pid)
    found = {}
    for process in root.children() or [root]:
        times = process.cpu_times()
        found[process.pid] = times.user + times.system
    return found


async def _round(target: Contender, concurrency: int) -> tuple[float, float]:
    """Requests a second that the workers could serve together, each on a core of its own; the busiest one's share of
    their CPU."""
    before = workers_cpu(target)
    workload = Workload("unary 5 KB", 5 * 1024, concurrency * len(before), seconds=3.0)
    samples, _ = await measure(target, workload)
    after = workers_cpu(target)
    used = [after[pid] - before[pid] for pid in before]
    return len(samples["total"]) / max(used), max(used) / sum(used)


async def bench(rounds: int, concurrencies: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with contextlib.AsyncExitStack() as stack:
            ports = await stack.enter_async_context(engines(Path(folder), token_ms=0))
            targets = []
            for workers in (1, 2):
                directory = Path(folder) / str(workers)
                directory.mkdir()
                made = contender("Envoy + extproc", directory, *ports, workers=workers)
                targets.append(await stack.enter_async_context(made))
            for target in targets:
                await _round(target, max(concurrencies))  # warm-up
            for concurrency in concurrencies:
                rates = [[await _round(target, concurrency) for target in targets] for _ in range(rounds)]
                _tell(concurrency, rates)


def _tell(concurrency: int, rates: list[list[tuple[float, float]]]) -> None:
    one, two = (statistics.median(rate[index][0] for rate in rates) for index in (0, 1))
    ratios = [with_two / with_one for (with_one, _), (with_two, _) in rates]
    share = statistics.median(with_two[1] for _, with_two in rates)
    print(
        f"concurrency {concurrency} for each worker: {one:.0f} requests per CPU second of the busiest with one worker, "
        f"{two:.0f} with two; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}); "
        f"the busier of two has {share:.0%} of their CPU"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 16], help="for each worker")
    options = parser.parse_args()
    asyncio.run(bench(options.rounds, options.concurrency))


if __name__ == "__main__":
    main()
