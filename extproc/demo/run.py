"""Starts the stack, runs the scenarios and tells, in a terminal, what happened."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from extproc.demo.scenarios import SCENARIOS, ScenarioFailed, Shown
from extproc.demo.stack import EngineKind, Stack
from extproc.errors import ExtprocError
from extproc.processes import find_envoy

# Slow enough to watch, fast enough not to bore: 300 µs a prompt token, 5 ms an answer token.
_SIM_ARGUMENTS = ("--prefill-us-per-token", "300", "--decode-ms-per-token", "5", "--blocks", "512")

# Neither a probe nor a load report may keep requests from the refusing decoder: the demo shows what Envoy does then.
_SETTINGS = {
    "fleet": {"health": {"interval_s": 2.0, "unhealthy_after": 10}},
    "routing": {"prefill_policy": "round_robin", "decode_policy": "round_robin"},
}


def run(*, once: bool, kind: EngineKind) -> None:
    """Exits the process: 0 when every scenario went as it should."""
    try:
        # Where output goes to a file or a pipe there is no width to ask for.
        console = Console(width=None if sys.stdout.isatty() else 110)
        sys.exit(asyncio.run(_demo(console, once=once, kind=kind)))
    except KeyboardInterrupt:
        sys.exit(130)
    except asyncio.CancelledError:
        sys.exit(143)


async def _demo(console: Console, *, once: bool, kind: EngineKind) -> int:
    engines = 2 if kind == "sim" else 1
    if task := asyncio.current_task():  # real engines leave processes behind when they are not stopped
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="extproc-demo-") as folder:
        try:
            find_envoy()  # before the engines: it is what a plain installation lacks
            with console.status("starting") as status:
                stack = Stack(
                    Path(folder),
                    prefill=engines,
                    decode=engines,
                    kind=kind,
                    engine_arguments=_SIM_ARGUMENTS,
                    settings=_SETTINGS,
                    progress=lambda text: status.update(f"{text} …"),
                )
                await stack.__aenter__()
        except ExtprocError as error:
            console.print(f"[red]{escape(str(error))}[/]")
            return 1
        try:
            return await _show(console, stack, once=once)
        finally:
            await stack.__aexit__(None, None, None)


async def _show(console: Console, stack: Stack, *, once: bool) -> int:
    _introduce(console, stack)
    failures = 0
    table = _table()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for scenario in SCENARIOS:
            if scenario.simulated_only and stack.kind != "sim":
                continue
            with console.status(scenario.title):
                try:
                    shown = await scenario.run(stack, client)
                except (ScenarioFailed, httpx.HTTPError, TimeoutError) as error:
                    failures += 1
                    text = str(error) or type(error).__name__
                    table.add_row(f"{scenario.title}\n[red]✗ {escape(text)}[/]")
                else:
                    table.add_row(*_row(shown))
    console.print(table)
    console.print("[red]something is wrong: see ✗ above[/]" if failures else "[green]all as it should be[/]")
    if not once:
        await _stay(console, stack)
    return 1 if failures else 0


def _introduce(console: Console, stack: Stack) -> None:
    names = {role: ", ".join(e.name for e in stack.engines if e.role == role) for role in ("prefill", "decode")}
    console.print(
        f"client ──▶ Envoy    {stack.url}\n"
        f"           ├─ ext_proc ──▶ extproc  {stack.admin_url} ── prefill leg ──▶ {names['prefill']}\n"
        f"           └─ decode leg, tokens ──▶ {names['decode']}   (KV blocks: decoder ◀─ prefiller)\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table() -> Table:
    table = Table(title="what happened to each request", show_lines=True, box=box.SIMPLE)
    table.add_column("request", min_width=30, overflow="fold")
    for column in ("prefill", "decode", "first byte", "total", "outcome"):
        table.add_column(column, no_wrap=column != "outcome", overflow="fold")
    return table


def _row(shown: Shown) -> list[str]:
    record = shown.record

    def text(key: str) -> str:
        value: Any = record.get(key)
        return "–" if value is None else str(value)

    def took(key: str) -> str:
        return f"{text(key)} ms" if record.get(key) is not None else "–"

    outcome = record.get("outcome") or record.get("decision") or "–"
    if record.get("release"):
        outcome += f", {record['release']} in {record['release_ms']} ms"
    cells = [f"{text('prefiller')}\n{took('prefill_ms')}".removesuffix("\n–"), text("decoder")]
    cells += [took(key) for key in ("first_byte_ms", "ended_ms")]
    return [f"{shown.title}\n[green]✓[/] [dim]{shown.verdict}[/]", *cells, outcome]


async def _stay(console: Console, stack: Stack) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    console.print(
        "\nIt stays up. Try it, and stop it with Ctrl-C:\n\n"
        f"  curl -N {stack.url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"model": "tiny", "stream": true, "max_tokens": 40, '
        '"messages": [{"role": "user", "content": "hello"}]}\'\n\n'
        "What happened to it, and to all before, says the status page:\n\n"
        f"  {stack.admin_url}/\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    await stop.wait()
