"""Side by side: what each contender adds in time and CPU, over several rounds in one run.

``python -m bench.run`` prints a table; with ``--write`` it goes to ``bench/results/``, with the raw figures as JSON and
a plot. All contenders run at once and are loaded in turn, round after round, so that drift of the machine meets all of
them alike. CPU is what the operating system accounts to the processes between client and engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bench.contenders import Contender, contender, engines, simulated_engines

RESULTS: Final = Path(__file__).parent / "results"
CONTENDERS: Final = (
    "engine alone",
    "two-step client",
    "Envoy alone",
    "Envoy + a bare grpc.aio service, no prefill",
    "Envoy + extproc",
    "vllm-router",
    "Envoy + vllm-router",
    "Envoy + extproc, responses streamed through it",
)


@dataclass(frozen=True)
class Workload:
    name: str
    size: int
    concurrency: int
    stream: bool = False
    tokens: int = 16
    token_ms: float = 0.0
    seconds: float = 1.2
    rounds: int | None = None
    """None: as many as asked for."""
    rate: float = 0.0
    """Requests a second, on simulated engines that take their time; 0: as fast as they go, on mock engines."""


WORKLOADS: Final = (
    Workload("unary 5 KB, c=1", 5120, 1),
    *(Workload(f"unary {label}, c=16", size, 16) for label, size in (("0.5 KB", 512), ("5 KB", 5120))),
    *(Workload(f"unary {label}, c=16", size, 16) for label, size in (("32 KB", 32 * 1024), ("400 KB", 400 * 1024))),
    Workload("unary 5 KB, c=256", 5120, 256),
    Workload("first token 5 KB, c=1", 5120, 1, stream=True, tokens=2),
    Workload("first token 32 KB, c=1", 32 * 1024, 1, stream=True, tokens=2),
    Workload("200 tokens, c=16", 5120, 16, stream=True, tokens=200, token_ms=2.0, seconds=3.0, rounds=5),
    Workload("2000 tokens, c=16", 5120, 16, stream=True, tokens=2000, token_ms=2.0, seconds=5.0, rounds=4),
    Workload("8,000 tokens in, 200 out, 1/s", 0, 0, stream=True, tokens=200, seconds=15.0, rounds=1, rate=1.0),
)
SHAPE: Final = ("two-step client", *CONTENDERS[4:])
"""Who takes part in the last one: all that do both steps."""

# Of a large model on a fast GPU: 8,000 tokens are prefilled in 0.48 s, and each token takes 10 ms.
_REALISTIC: Final = "--model m --prefill-us-per-token 60 --decode-ms-per-token 10 --max-model-len 16384 --blocks 8192"


@dataclass
class Cell:
    """One workload on one contender: a value for each round."""

    first_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    failures: int = 0

    def own_cpu(self) -> list[float]:
        """Milliseconds of CPU a request, of all processes of the contender together."""
        rounds = list(zip(*self.cpu_ms.values(), strict=True))
        return [sum(values) for values in rounds]


async def measure(target: Contender, workload: Workload) -> tuple[dict[str, Any], dict[str, float]]:
    """One round: the client's samples, and the CPU seconds that each process used meanwhile."""
    command = [sys.executable, "-m", "bench.load", str(target.port), "--tokens", str(workload.tokens)]
    if workload.rate:
        command += ["--rate", str(workload.rate), "--requests", str(round(workload.rate * workload.seconds))]
    else:
        command += ["--size", str(workload.size), "--concurrency", str(workload.concurrency)]
        command += ["--seconds", str(workload.seconds), *(["--stream"] if workload.stream else [])]
    if target.prefill_port:
        command += ["--prefill-port", str(target.prefill_port)]
    before = target.cpu_seconds()
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    after = target.cpu_seconds()
    return json.loads(output), {name: after[name] - before[name] for name in before}


async def bench(names: Sequence[str], workloads: Sequence[Workload], rounds: int) -> dict[str, dict[str, Cell]]:
    """``{workload: {contender: cell}}``."""
    results: dict[str, dict[str, Cell]] = {}
    for token_ms, realistic in sorted({(workload.token_ms, bool(workload.rate)) for workload in workloads}):
        with tempfile.TemporaryDirectory() as folder:
            async with contextlib.AsyncExitStack() as stack:
                directory = Path(folder)
                made = (
                    simulated_engines(directory, _REALISTIC.split())
                    if realistic
                    else engines(directory, token_ms=token_ms)
                )
                ports = await stack.enter_async_context(made)
                targets = []
                for name in (name for name in names if name in SHAPE or not realistic):
                    try:
                        targets.append(await stack.enter_async_context(contender(name, directory, *ports)))
                    except LookupError as error:
                        print(f"left out: {error}", file=sys.stderr)
                for workload in (w for w in workloads if (w.token_ms, bool(w.rate)) == (token_ms, realistic)):
                    results[workload.name] = await _rounds(targets, workload, rounds)
    return {workload.name: results[workload.name] for workload in workloads}


async def _rounds(targets: Sequence[Contender], workload: Workload, rounds: int) -> dict[str, Cell]:
    cells = {target.name: Cell() for target in targets}
    rounds = workload.rounds or rounds
    warm_up = replace(
        workload, tokens=min(workload.tokens, 16), seconds=min(workload.seconds, 2.0 if workload.rate else 0.4)
    )
    for target in targets:
        await measure(target, warm_up)
    for number in range(1, rounds + 1):
        for target in targets:
            samples, cpu = await measure(target, workload)
            if not samples["total"]:
                cells[target.name].failures += samples["failures"]
                continue
            cell, count = cells[target.name], len(samples["total"])
            cell.first_ms.append(statistics.median(samples["first"]) * 1000)
            cell.total_ms.append(statistics.median(samples["total"]) * 1000)
            cell.rate.append(count / samples["seconds"])
            cell.failures += samples["failures"]
            for name, seconds in cpu.items():
                cell.cpu_ms.setdefault(name, []).append(seconds * 1000 / count)
        print(f"{workload.name}: round {number} of {rounds}", file=sys.stderr)
    return cells


def table(results: dict[str, dict[str, Cell]]) -> str:
    """Markdown: medians over rounds, with (min–max)."""
    columns = "workload | contender | first byte ms | last byte ms | requests/s | CPU ms/request, by process | failures"
    lines = [f"| {columns} |", "|---|---|---|---|---|---|---|"]
    for workload, cells in results.items():
        for name, cell in cells.items():
            if not cell.first_ms:
                lines.append(f"| {workload} | {name} | – | – | – | – | {cell.failures} |")
                continue
            cpu = ", ".join(f"{process} {_median(values)}" for process, values in cell.cpu_ms.items()) or "–"
            lines.append(
                f"| {workload} | {name} | {_median(cell.first_ms)} | {_median(cell.total_ms)} | "
                f"{statistics.median(cell.rate):.0f} | {cpu} | {cell.failures} |"
            )
    return "\n".join(lines) + "\n"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def targets_table(results: dict[str, dict[str, Cell]]) -> str:
    """The figures that the project set itself targets for."""
    rows = ["| figure | target | measured |", "|---|---|---|"]

    def median(workload: str, name: str, attribute: str) -> float:
        cell = results[workload][name]
        values = getattr(cell, attribute)
        return statistics.median(values() if callable(values) else values)

    def extproc_cpu(workload: str) -> float:
        """What Envoy with extproc uses above Envoy alone: extproc itself, and Envoy's own share of talking to it."""
        return median(workload, "Envoy + extproc", "own_cpu") - median(workload, "Envoy alone", "own_cpu")

    for size in ("5 KB", "32 KB"):
        workload = f"first token {size}, c=1"
        if workload not in results:
            continue
        hop = median(workload, "Envoy alone", "first_ms") - median(workload, "engine alone", "first_ms")
        direct = median(workload, "two-step client", "first_ms")
        ours = median(workload, "Envoy + extproc", "first_ms") - direct - hop
        text = f"{ours:.2f} ms"
        if "vllm-router" in results[workload]:
            text += f"; vllm-router {median(workload, 'vllm-router', 'first_ms') - direct:.2f} ms"
        rows.append(f"| added time to first token, {size}, c=1 | ≤ vllm-router's, ≤ 3 ms | {text} |")
    for workload, target in (("200 tokens, c=16", "≤ 0.5"), ("2000 tokens, c=16", "≤ 0.06")):
        if workload in results and "vllm-router" in results[workload]:
            router = median(workload, "vllm-router", "own_cpu")
            text = f"{extproc_cpu(workload) / router:.3f} ({extproc_cpu(workload):.2f} of {router:.2f} ms)"
            rows.append(f"| CPU added to Envoy ÷ vllm-router's whole CPU, {workload} | {target} | {text} |")
    if "unary 5 KB, c=16" in results:
        five = extproc_cpu("unary 5 KB, c=16")
        own = statistics.median(results["unary 5 KB, c=16"]["Envoy + extproc"].cpu_ms["extproc"])
        bare = statistics.median(results["unary 5 KB, c=16"][CONTENDERS[3]].cpu_ms["bare"])
        text = (
            f"the service {own:.2f} ms, {own / bare:.2f} × the bare one's {bare:.2f}; with Envoy's share {five:.2f} ms"
        )
        rows.append(
            f"| CPU added to Envoy, unary 5 KB, c=16 | ≤ 1.5 ms where the bare one's is 0.67: 2.24 × | {text} |"
        )
        if "unary 400 KB, c=16" in results:
            large = extproc_cpu("unary 400 KB, c=16")
            rows.append(f"| CPU added, 400 KB ÷ 5 KB | ≤ 2 | {large / five:.2f} ({large:.2f} ms) |")
    return "\n".join(rows) + "\n"


def plot(results: dict[str, dict[str, Cell]], file: Path) -> None:
    """CPU a request of each contender, by workload."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    mpl.use("Agg")
    from matplotlib import pyplot

    names = [name for name, cell in next(iter(results.values())).items() if cell.cpu_ms]
    figure, axes = pyplot.subplots(1, len(results), figsize=(3.1 * len(results), 4), squeeze=False)
    for axis, (workload, cells) in zip(axes[0], results.items(), strict=True):
        shown = dict.fromkeys(names, 0.0)
        shown |= {name: statistics.median(cell.own_cpu()) for name, cell in cells.items() if cell.cpu_ms}
        axis.barh(
            range(len(shown)), list(shown.values()), color=["#6c5ce7" if "extproc" in n else "#9aa3b5" for n in shown]
        )
        axis.set_yticks(range(len(shown)), list(shown) if axis is axes[0][0] else [""] * len(shown), fontsize=8)
        axis.set_title(workload, fontsize=8)
        axis.set_xlabel("CPU ms / request", fontsize=8)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the workloads' names")
    parser.add_argument("--contender", action="append", help="one of the contenders; all by default")
    parser.add_argument("--write", action="store_true", help="write bench/results/")
    parser.add_argument("--quick", action="store_true", help="one short round of each: does everything work?")
    options = parser.parse_args()
    workloads = [workload for workload in WORKLOADS if options.only in workload.name]
    if options.quick:
        options.rounds = 1
        workloads = [
            replace(workload, seconds=min(workload.seconds, 3.0 if workload.rate else 0.5), rounds=1)
            for workload in workloads
        ]
    results = asyncio.run(bench(options.contender or CONTENDERS, workloads, options.rounds))
    text = table(results)
    if not options.contender:
        text += "\n" + targets_table(results)
    print(text)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "table.md").write_text(text, encoding="utf-8")
        (RESULTS / "figures.json").write_text(json.dumps(results, default=vars, indent=1) + "\n", encoding="utf-8")
        plot(results, RESULTS / "cpu.png")


if __name__ == "__main__":
    main()
