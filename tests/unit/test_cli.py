"""The command line's own help, as a terminal of 80 columns shows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer.main

from extproc import cli
from extproc.demo.command import demo
from extproc.sim.command import sim

COMMANDS = ("serve", "envoy", "check", "probe", "sim", "demo")


def _help(*arguments: str) -> str:
    command = [sys.executable, "-m", "extproc", *arguments, "--help"]
    environment = os.environ | {"COLUMNS": "80", "TERM": "dumb"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout


def _options(command: str) -> set[str]:
    app = typer.Typer()
    for registered in cli.app.registered_commands:
        app.command()(registered.callback)  # type: ignore[type-var]
    app.command()(sim)
    app.command()(demo)
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {name for one in parameters if not one.hidden for name in (*one.opts, *one.secondary_opts) if "--" in name}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_options_name_is_cut(command: str) -> None:
    words = _help(command).replace(",", " ").split()
    assert _options(command) <= set(words)


def test_every_command_is_listed_with_a_whole_sentence() -> None:
    lines = _help().partition("Commands:")[2].splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines if line.strip())
    assert listed.keys() == set(COMMANDS)
    assert all(text.endswith(".") and not text.endswith("...") for text in listed.values())
