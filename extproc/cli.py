"""The command line. Each command lives in the module of what it does, which imports its heavy parts only when run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from extproc import __version__
from extproc.errors import ConfigError, ExtprocError

app = typer.Typer(
    name="extproc",
    help="Prefill/decode disaggregated vLLM behind any Envoy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut long options' names
)

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="The configuration file (YAML).")]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"extproc {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    config: ConfigOption,
    worker: Annotated[int | None, typer.Option(hidden=True, help="Run this one of `grpc.workers` alone.")] = None,
    supervisor_pid: Annotated[
        int | None, typer.Option("--supervisor", hidden=True, help="End when this process does.")
    ] = None,
) -> None:
    """Run the service that Envoy calls."""
    from extproc import server, supervisor
    from extproc.config import load

    settings = load(config)
    if supervisor_pid is not None:
        supervisor.end_with(supervisor_pid)
    if worker is not None:
        server.run(supervisor.for_worker(settings, worker), worker=worker)
    elif settings.grpc.workers > 1:
        supervisor.run(settings, config)
    else:
        server.run(settings)


@app.command()
def envoy(
    config: ConfigOption,
    eds: Annotated[
        bool, typer.Option("--eds", help="Have the service tell Envoy its decoders, also those that are listed.")
    ] = False,
) -> None:
    """Print an Envoy bootstrap that fits this configuration."""
    from extproc.bootstrap import render
    from extproc.config import load

    typer.echo(render(load(config), eds=eds), nl=False)


@app.command(short_help="Say what is wrong, and what to do about it.")
def check(
    config: ConfigOption,
    as_json: Annotated[
        bool, typer.Option("--json", help="For scripts: a list of findings, each with its code.")
    ] = False,
) -> None:
    """Look at the configuration, the engines and Envoy as they are, and say what is wrong and what to do."""
    from extproc.check.run import run
    from extproc.config import load

    run(load(config), as_json=as_json)


@app.command(short_help="Show what the service makes of a request.")
def probe(
    requests: Annotated[
        list[Path], typer.Argument(help="JSON files: an OpenAI body, or {path, method, headers, body}.")
    ],
    target: Annotated[str, typer.Option(help="The service's gRPC address, host:port.")] = "127.0.0.1:9002",
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 120.0,
    ca: Annotated[Path | None, typer.Option(help="The service has TLS: trust this CA (PEM).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="Show this certificate (PEM), with --key.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
) -> None:
    """Play Envoy against a running service and print every change it would make (the prefill call is real)."""
    from extproc.probe import TlsFiles, run

    if ca is None and (certificate or key):
        raise ConfigError("--certificate and --key need --ca")
    run(target, requests, timeout_s=timeout, tls=TlsFiles(ca, certificate, key) if ca else None)


def _register() -> None:
    from extproc.demo.command import demo
    from extproc.sim.command import sim

    app.command()(sim)
    app.command(short_help="Run all of it on this machine, and show it.")(demo)


def main() -> None:
    """Entry point of the ``extproc`` script: configuration errors end with status 2 and no traceback."""
    # Both are looked at once, when gRPC is imported. It writes past our log, a line for each handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Its older server sockets take fewer threads for a message: 9 % less CPU for a request where the service is busy,
    # 15 % where it is not (docs/performance.md).
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    _register()
    try:
        app()
    except ConfigError as error:
        typer.echo(str(error), err=True)
        sys.exit(2)
    except ExtprocError as error:
        typer.echo(str(error), err=True)
        sys.exit(1)
