"""docs/walkthroughs.md: its commands, run as they stand, print what the page says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from extproc.processes import find_envoy, free_port
from extproc.sim.failures import MODES

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(180)]

PAGE: Final = (Path(__file__).parents[2] / "docs" / "walkthroughs.md").read_text()
PORTS: Final = ("8080", "8100", "8190", "8200", "8201", "9002", "9003", "9901")
PATIENCE_S: Final = 60.0


def blocks(ports: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(commands, the lines they are said to print), on ports that are free here."""
    text = re.sub(rf"\b(?:{'|'.join(PORTS)})\b", lambda match: ports[match[0]], PAGE)
    for commands, _, printed in re.findall(r"^```sh\n(.*?)^```(\n\n```\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE):
        yield commands, printed.splitlines()


def pattern(line: str) -> re.Pattern[str]:
    """``…`` stands for anything."""
    return re.compile(".*".join(map(re.escape, line.split("…"))))


def environment(ports: Mapping[str, str]) -> dict[str, str]:
    """What the page leaves at its defaults goes to free ports as well."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("EXTPROC_", "GRPC_"))}
    addresses = {"GRPC": "9002", "ADMIN": "9003", "ENVOY": "8080"}
    listen = {f"EXTPROC_{section}__LISTEN": f"127.0.0.1:{ports[port]}" for section, port in addresses.items()}
    envoy = {name: f"127.0.0.1:{ports[port]}" for name, port in (("ADMIN", "9901"), ("EXTPROC", "9002"))}
    return (
        own
        | listen
        | {f"EXTPROC_ENVOY__{name}": value for name, value in envoy.items()}
        | {
            "EXTPROC_LIFE__NOTICE_S": "0",
            "NO_PROXY": "*",
            "COLUMNS": "250",
        }
    )


def commands_in(folder: Path) -> None:
    """``extproc`` and ``envoy``, as an installation has them on the path."""
    folder.mkdir()
    envoy = f"{find_envoy()} --disable-hot-restart --concurrency 1"
    for name, command in {"extproc": f"{sys.executable} -m extproc", "envoy": envoy}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)


@contextlib.asynccontextmanager
async def shell(folder: Path, ports: Mapping[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        "bash",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=folder,
        env=environment(ports) | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_what_the_page_says_is_what_happens(tmp_path: Path) -> None:
    commands_in(tmp_path / "bin")
    ports = {port: str(free_port()) for port in PORTS}
    assert len(set(ports.values())) == len(PORTS)
    async with shell(tmp_path, ports) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        async def run(commands: str) -> list[str]:
            stdin.write(f"{commands}\necho; echo =done=\n".encode())
            lines: list[str] = []
            async with asyncio.timeout(PATIENCE_S):
                while (line := (await stdout.readline()).decode()) != "=done=\n":
                    assert line, lines
                    lines.append(line.rstrip())
            return lines

        printing = 0
        for commands, expected in blocks(ports):
            printed = await run(commands)
            place = 0
            for line in expected:
                found = [n for n, text in enumerate(printed[place:], place) if pattern(line).fullmatch(text)]
                assert found, f"{commands}\nprinted {printed[place:]}, not {line!r}"
                place = found[0] + 1
            printing += bool(expected)
        assert printing == 9


def test_every_way_to_fail_is_on_the_page() -> None:
    table = PAGE.partition("| mode | what the engine does |\n")[2].partition("\n\n")[0]
    named = {mode for row in table.splitlines()[1:] for mode in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named - {"503"} | {"status"} == set(MODES)
