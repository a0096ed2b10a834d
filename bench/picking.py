"""Picking policies on eight simulated prefillers: how evenly they load them, and how much of the prompts is cached.

::

    python bench/picking.py                 # a table
    python bench/picking.py --write docs    # docs/picking.md and docs/picking.png (needs matplotlib)

The policies, the reservations and the load reports are the service's own code; time, engines and clients are simulated
(a discrete-event simulation: no sockets, no sleeping), so a run takes seconds and gives the same numbers everywhere.

What is simulated:

* Engines: each prefills one prompt after the other, first come first served, at a fixed pace for each token that is not
  in its prefix cache, which holds so many tokens' blocks and forgets the least recently used.
* Clients: conversations of several turns, each turn's prompt being all that was said before; most begin with one of a
  few system prompts (a Zipf distribution); some are single long documents that share nothing.
* The service: one or several replicas, each of which knows its own reservations and sees the others' load only in the
  engines' reports, once a second.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import heapq
import itertools
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from extproc import picking
from extproc.connectors import connector
from extproc.fleet import engines as fleet_engines
from extproc.fleet.engines import Engine, Report, Reservation, Spec
from extproc.picking import Need, Policy

POLICIES = ("round_robin", "least_inflight", "least_loaded", "power_of_two", "prefix_affinity")
BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class World:
    """What is simulated; times in seconds, sizes in tokens."""

    engines: int = 8
    pace: float = 8000.0
    """Tokens that an engine prefills in a second."""
    overhead_s: float = 0.01
    cache: int = 400_000
    """Tokens whose blocks an engine keeps."""
    block: int = 64
    duration_s: float = 300.0
    warm_up_s: float = 100.0
    system_prompts: int = 40
    zipf: float = 1.1
    system_tokens: tuple[float, float] = (1200, 0.6)
    """Median and spread (sigma of the logarithm)."""
    turns: float = 6.0
    user_tokens: tuple[float, float] = (120, 0.9)
    answer_tokens: tuple[float, float] = (250, 0.7)
    think_s: float = 15.0
    documents: float = 0.1
    """Share of arrivals that are single long documents."""
    document_tokens: tuple[float, float] = (5000, 0.5)
    report_s: float = 1.0
    affinity_bytes: int = 2048
    seed: int = 6


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: bytes

    @property
    def tokens(self) -> int:
        return len(self.prompt) // BYTES_PER_TOKEN


def traffic(world: World, rate: float) -> list[Arrival]:
    """Arrivals at ``rate`` per second, conversations' later turns included; the same for every policy."""
    chance = random.Random(world.seed)
    texts = itertools.count()

    def size(shape: tuple[float, float]) -> int:
        median, spread = shape
        return max(1, round(median * chance.lognormvariate(0, spread)))

    def text(tokens: int) -> bytes:
        """Text that nothing else shares."""
        word = hashlib.blake2b(next(texts).to_bytes(8, "little"), digest_size=32).digest()
        return (word * (tokens * BYTES_PER_TOKEN // 32 + 1))[: tokens * BYTES_PER_TOKEN]

    system = [text(size(world.system_tokens)) for _ in range(world.system_prompts)]
    weights = [1 / rank**world.zipf for rank in range(1, world.system_prompts + 1)]
    per_start = world.documents + (1 - world.documents) * world.turns
    arrivals: list[Arrival] = []
    # Conversations that began before the clock did, so that the rate is the same from the first second on.
    at = -world.turns * world.think_s
    while (at := at + chance.expovariate(rate / per_start)) < world.duration_s:
        if chance.random() < world.documents:
            arrivals.append(Arrival(at, text(size(world.document_tokens))))
            continue
        said = chance.choices(system, weights)[0]
        turn_at = at
        while True:
            said += text(size(world.user_tokens))
            arrivals.append(Arrival(turn_at, said))
            if chance.random() < 1 / world.turns:
                break
            said += text(size(world.answer_tokens))
            turn_at += chance.expovariate(1 / world.think_s)
    return sorted((a for a in arrivals if 0 <= a.at < world.duration_s), key=lambda arrival: arrival.at)


class Cache:
    """The prefix cache of an engine: blocks by the chained hash of all that comes before."""

    def __init__(self, world: World) -> None:
        self._room = world.cache // world.block
        self._size = world.block * BYTES_PER_TOKEN
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def use(self, prompt: bytes) -> int:
        """Take a prompt in; how many of its tokens were there."""
        hits, missed, digest = 0, False, b""
        for start in range(0, len(prompt) - self._size + 1, self._size):
            digest = hashlib.blake2b(prompt[start : start + self._size], digest_size=16, key=digest).digest()
            if digest in self._blocks and not missed:
                hits += 1
            else:
                missed = True
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._room:
            self._blocks.popitem(last=False)
        return hits * self._size // BYTES_PER_TOKEN


@dataclass
class Prefiller:
    """One simulated engine, and what each replica of the service knows of it."""

    cache: Cache
    known: list[Engine]
    free_at: float = 0.0
    queue: deque[float] = field(default_factory=deque)
    """When each of the requests there will be done."""
    work: float = 0.0
    """Tokens that had to be computed."""


@dataclass
class Result:
    policy: str
    requests: int
    hit_rate: float
    """Share of all prompt tokens that was found in a cache."""
    imbalance: float
    """The busiest engine's computed tokens over the mean of all."""
    utilisation: float
    wait_s: dict[int, float]
    """Percentile -> seconds between arrival and the begin of the prefill."""
    done_s: dict[int, float]
    """Percentile -> seconds between arrival and the end of the prefill."""


class Clock:
    """Stands in for the ``time`` module where the service's code asks for the time."""

    def __init__(self) -> None:
        self.now = 0.0
        for module in (picking, fleet_engines):
            module.__dict__["time"] = SimpleNamespace(monotonic=lambda: self.now)


def run(world: World, name: str, policies: Sequence[Policy], arrivals: Sequence[Arrival]) -> Result:
    """Simulate one policy; ``policies`` has that of each replica."""
    clock = Clock()
    prefillers = [
        Prefiller(
            Cache(world),
            [Engine(Spec("prefill", f"http://10.0.0.{n}:8000", f"p{n}", connector("nixl"))) for _ in policies],
        )
        for n in range(1, world.engines + 1)
    ]
    by_engine = {engine: prefiller for prefiller in prefillers for engine in prefiller.known}
    done: list[tuple[float, int, Reservation]] = []
    numbers = itertools.count()
    next_report = 0.0
    turns = [0] * len(policies)
    waits, totals, hits, asked = [], [], 0, 0

    for number, arrival in enumerate(arrivals):
        while (done and done[0][0] <= arrival.at) or next_report <= arrival.at:
            if done and done[0][0] <= next_report:
                clock.now, _, reservation = heapq.heappop(done)
                reservation.release()
            else:
                clock.now = next_report
                next_report += world.report_s
                for prefiller in prefillers:
                    report(prefiller, clock.now)
        clock.now = arrival.at
        replica = number % len(policies)  # Envoy's round robin over the service's replicas
        candidates = [prefiller.known[replica] for prefiller in prefillers]
        beginning = hashlib.blake2b(arrival.prompt[: world.affinity_bytes], digest_size=16).digest()
        need = Need(tokens=arrival.tokens, affinity=beginning)
        best = policies[replica](candidates, turns[replica], need)[0]
        turns[replica] += 1
        prefiller = by_engine[best]
        cached = min(prefiller.cache.use(arrival.prompt), arrival.tokens - 1)
        begin = max(arrival.at, prefiller.free_at)
        prefiller.free_at = begin + world.overhead_s + (arrival.tokens - cached) / world.pace
        prefiller.queue.append(prefiller.free_at)
        heapq.heappush(done, (prefiller.free_at, next(numbers), Reservation(best, arrival.tokens)))
        if arrival.at >= world.warm_up_s:
            hits += cached
            asked += arrival.tokens
            prefiller.work += arrival.tokens - cached
            waits.append(begin - arrival.at)
            totals.append(prefiller.free_at - arrival.at)

    work = [prefiller.work for prefiller in prefillers]
    return Result(
        policy=name,
        requests=len(waits),
        hit_rate=hits / asked,
        imbalance=max(work) / statistics.fmean(work),
        utilisation=sum(work) / (world.pace * world.engines * (world.duration_s - world.warm_up_s)),
        wait_s=percentiles(waits),
        done_s=percentiles(totals),
    )


def report(prefiller: Prefiller, now: float) -> None:
    """What the engine's /metrics would say, as each replica of the service takes it."""
    while prefiller.queue and prefiller.queue[0] <= now:
        prefiller.queue.popleft()
    present = len(prefiller.queue)
    running = min(1, present)
    for engine in prefiller.known:
        foreign = max(0, present - engine.inflight)
        engine.report = Report(waiting=present - running, running=running, foreign=foreign, at=now)


def percentiles(values: Sequence[float]) -> dict[int, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {percent: cuts[percent - 1] for percent in (50, 95, 99)}


def policy_of(name: str, replica: int) -> Policy:
    """The policy as the service runs it; chance is fixed, so that runs can be compared."""
    if name == "power_of_two":
        return functools.partial(picking.power_of_two, salt=replica.to_bytes(1, "little"))
    return picking.policy(name)


@dataclass(frozen=True)
class Setting:
    rate: float
    """Requests per second."""
    replicas: int
    documents_only: bool = False

    @property
    def title(self) -> str:
        what = "requests/s that share nothing" if self.documents_only else "requests/s"
        return f"{self.rate:.0f} {what}, {self.replicas} replica{'s' if self.replicas > 1 else ''} of the service"


SETTINGS = (Setting(20, 1), Setting(28, 1), Setting(28, 3), Setting(8, 1, documents_only=True))


def measure(world: World) -> Iterator[tuple[Setting, list[Result]]]:
    for setting in SETTINGS:
        here = replace(world, documents=1.0) if setting.documents_only else world
        arrivals = traffic(here, setting.rate)
        replicas = range(setting.replicas)
        yield setting, [run(here, name, [policy_of(name, n) for n in replicas], arrivals) for name in POLICIES]


HEADER = ("policy", "cached", "imbalance", "busy", "wait p50", "p95", "p99", "done p50", "p95", "p99")


def table(results: Sequence[Result]) -> str:
    """As Markdown; times in milliseconds."""
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1))]
    for result in results:
        times = [f"{seconds * 1000:.0f}" for found in (result.wait_s, result.done_s) for seconds in found.values()]
        shares = (f"{result.hit_rate:.0%}", f"{result.imbalance:.2f}", f"{result.utilisation:.0%}")
        rows.append((f"`{result.policy}`", *shares, *times))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(measured: Sequence[tuple[Setting, list[Result]]], file: Path) -> None:
    """One row for each setting: cached share, imbalance, and the slowest prefills."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown: tuple[tuple[str, Callable[[Result], float]], ...] = (
        ("prompt tokens found in a cache, %", lambda result: result.hit_rate * 100),
        ("busiest engine's computed tokens / mean", lambda result: result.imbalance),
        ("arrival to end of prefill, p99, s", lambda result: result.done_s[99]),
    )
    figure, axes = pyplot.subplots(len(measured), len(shown), figsize=(13, 2.6 * len(measured)), squeeze=False)
    for row, (setting, results) in zip(axes, measured, strict=True):
        names = [result.policy for result in results][::-1]
        for axis, (label, value) in zip(row, shown, strict=True):
            values = [value(result) for result in results][::-1]
            bars = axis.barh(names, values, color=["#c44e52" if n == "prefix_affinity" else "#4c72b0" for n in names])
            axis.bar_label(bars, fmt="%.2f" if 0 < max(values) < 10 else "%.0f", padding=3)
            axis.set_xlim(0, max(values) * 1.18 or 1)
            axis.set_xlabel(label)
            axis.spines[["top", "right"]].set_visible(False)
            if axis is not row[0]:
                axis.set_yticklabels([])
        row[0].set_title(setting.title, loc="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the picking policies on simulated prefillers.")
    parser.add_argument("--write", type=Path, metavar="DIRECTORY", help="put the tables into picking.md, and a plot")
    parser.add_argument("--duration", type=float, default=World.duration_s, help="simulated seconds")
    parser.add_argument("--seed", type=int, default=World.seed)
    options = parser.parse_args()
    world = World(duration_s=options.duration, warm_up_s=options.duration / 3, seed=options.seed)
    measured = []
    for setting, results in measure(world):
        measured.append((setting, results))
        print(f"{setting.title} ({results[0].requests} requests counted)\n\n{table(results)}\n", flush=True)
    if options.write:
        write(options.write, measured)


def write(directory: Path, measured: Sequence[tuple[Setting, list[Result]]]) -> None:
    """Replace what stands between the markers of picking.md; the words around it stay."""
    file = directory / "picking.md"
    begin, end = "<!-- results -->\n", "<!-- /results -->\n"
    text = file.read_text(encoding="utf-8")
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    tables = "\n".join(f"**{setting.title}**\n\n{table(results)}\n" for setting, results in measured)
    file.write_text(f"{before}\n{tables}\n{after}", encoding="utf-8")
    plot(measured, directory / "picking.png")


if __name__ == "__main__":
    main()
