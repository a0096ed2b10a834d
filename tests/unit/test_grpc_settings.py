"""What the command line tells gRPC before it is imported, and whether the installed gRPC knows it."""

import os
import subprocess
import sys

import pytest

# As gRPC starts, it complains of experiments that it does not know.
STARTED = """
import os
import typer
typer.Typer.__call__ = lambda self: None
from extproc.cli import main
main()
os.environ["GRPC_EXPERIMENTS"] += {more!r}
import grpc
grpc.insecure_channel("127.0.0.1:1").close()
print(os.environ["GRPC_EXPERIMENTS"], os.environ["GRPC_VERBOSITY"])
"""


def started(more: str = "", **environment: str) -> tuple[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-c", STARTED.format(more=more)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip(), done.stderr


def test_the_installed_grpc_knows_the_experiment() -> None:
    output, errors = started()
    assert (output, errors) == ("-event_engine_listener ERROR", "")
    assert "Unknown experiment: no_such_thing" in started(",-no_such_thing")[1]


@pytest.mark.parametrize(("name", "value"), [("GRPC_EXPERIMENTS", "event_engine_listener"), ("GRPC_VERBOSITY", "INFO")])
def test_who_runs_it_has_the_last_word(name: str, value: str) -> None:
    assert value in started(**{name: value})[0].split()
