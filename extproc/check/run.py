"""Runs all checks and prints their findings."""

from __future__ import annotations

import sys
import time

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.check.engines import EngineChecks
from extproc.check.findings import Findings
from extproc.check.gateway import check_envoy
from extproc.config import Config, split_listen
from extproc.enginehttp import EngineClient
from extproc.fleet import engines
from extproc.fleet.discovery import Resolver
from extproc.fleet.fleet import Fleet, policies
from extproc.fleet.sources import DnsSource, FileSource
from extproc.releaseways import ReleaseWays
from extproc.sidechannel import SideChannels

_TIMEOUT_S = 15.0


async def check(config: Config) -> Findings:
    """Everything that can be known from here. Sends each prefiller a few short prefills, and releases them."""
    findings = Findings()
    fleet = Fleet(config.fleet, policies(config))
    fleet.update("configuration", engines.specs(config.fleet, config.fleet))
    await _discover(config, fleet, findings)
    channels = SideChannels()
    http = EngineClient(connect_timeout_s=2.0, max_connections=64, keepalive_s=config.prefill.keepalive_s)
    try:
        async with http, httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client:
            ways = ReleaseWays(config.release, fleet, http, channels)
            await EngineChecks(fleet, ways, client, findings).run()
            await check_envoy(config, fleet, client, findings)
            await ways.flush(time.monotonic() + _TIMEOUT_S)
    finally:
        await channels.aclose()
    await _check_service(config, findings)
    if config.release.ticket_key is None:
        text = "tickets are signed with a key derived from the fleet's configuration"
        findings.note("ticket_key", "service", text, "set release.ticket_key to a secret, the same on all replicas")
    return findings


async def _discover(config: Config, fleet: Fleet, findings: Findings) -> None:
    if config.fleet.file:
        source = FileSource(fleet, config.fleet.file)
        source.read()
        if source.problem:
            findings.error("fleet_file", "fleet", f"{config.fleet.file}: {source.problem}", "mend the file")
    for entry in config.fleet.dns:
        before = len(fleet.engines(entry.role))
        await DnsSource(fleet, entry).refresh()
        if len(fleet.engines(entry.role)) == before:
            findings.error(
                "dns", "fleet", f"{entry.name} leads to no engine", "check the name, its type and the servers"
            )
    await Resolver(fleet, config.fleet.resolve_s).refresh()


async def _check_service(config: Config, findings: Findings) -> None:
    host, port = split_listen(config.grpc.listen)
    target = f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
    async with grpc.aio.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.RpcError:
            findings.note("service_down", "service", f"it does not run at {target}", "start it: `extproc serve`")
            return
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        findings.ok("service", f"serving at {target}")
    else:
        findings.warning("not_serving", "service", f"runs at {target}, but is not serving", "see /readyz for why")


def run(config: Config) -> None:
    """Print the findings; exits with 1 when there is an error among them."""
    import asyncio

    from rich import box
    from rich.console import Console
    from rich.table import Table

    findings = asyncio.run(check(config))
    marks = {"ok": "[green]✓[/]", "note": "[dim]·[/]", "warning": "[yellow]![/]", "error": "[red]✗[/]"}
    table = Table(show_header=False, box=box.SIMPLE)
    for finding in findings:
        todo = f"\n[dim]→ {finding.todo}[/]" if finding.todo else ""
        table.add_row(marks[finding.level], finding.subject, f"{finding.text}{todo}")
    Console().print(table)
    sys.exit(1 if findings.failed else 0)
