"""From a client's reset to free KV blocks, through the real Envoy, on simulated engines: median and 99th percentile.

::

    python -m bench.release [--rounds 100]

The decoder has answered nothing yet when the client leaves, so nothing but a release frees the prefiller's blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import statistics

import structlog
from rich.console import Console
from rich.table import Table

from tests.support.simulated import Pair, Pairing, SimGateway, until

_ENGINES = {"prefill_us_per_token": 10}
_ASCEND = _ENGINES | {"connector": "mooncake-ascend", "tp": 2}
PAIRINGS = {
    "nixl": Pairing(_ENGINES | {"connector": "nixl"}),
    "mooncake-ascend (stock)": Pairing(_ASCEND),
    "mooncake-ascend (abort)": Pairing(_ASCEND | {"ascend_abort": True}),
}


async def one_round(pair: Pair) -> float:
    """Seconds from the reset to the last block's release."""
    await pair.gateway.mark()
    await pair.decoder.fail("hang", leg="decode", count=1)
    request = await pair.open(words=20)
    await until(lambda: bool(pair.decodes()))
    assert pair.prefiller.pinned
    seconds = await pair.freed(request.cut(reset=True))
    await pair.gateway.settled()
    assert pair.gateway.releases == {"released": 1}
    assert pair.expired == []
    return seconds


async def measure(rounds: int) -> dict[str, list[float]]:
    async with SimGateway.started(PAIRINGS) as gateway:
        results: dict[str, list[float]] = {}
        for name, pair in gateway.pairs.items():
            await one_round(pair)  # what an endpoint understands is learnt once
            results[name] = [await one_round(pair) for _ in range(rounds)]
        return results


def percentile(values: list[float], share: float) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    logging.disable(logging.ERROR)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    table = Table(title=f"client reset → blocks free, {rounds} rounds each, ms")
    table.add_column("connector")
    for column in ("median", "p99", "max"):
        table.add_column(column, justify="right")
    for name, seconds in asyncio.run(measure(rounds)).items():
        shown = (statistics.median(seconds), percentile(seconds, 0.99), max(seconds))
        table.add_row(name, *(f"{value * 1000:.0f}" for value in shown))
    Console().print(table)


if __name__ == "__main__":
    main()
