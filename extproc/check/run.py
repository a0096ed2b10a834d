"""Runs all checks and prints their findings."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import ssl
import sys
import time
from typing import Any, Final

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc import supervisor
from extproc.check.engines import check_engines
from extproc.check.findings import Findings
from extproc.check.gateway import check_envoy
from extproc.check.handover import HandOver
from extproc.config import Config
from extproc.configsections import Log
from extproc.configtypes import split_listen
from extproc.enginehttp import EngineClient
from extproc.errors import ConfigError
from extproc.fleet import engines
from extproc.fleet.discovery import Resolver
from extproc.fleet.fleet import Fleet, policies
from extproc.fleet.sources import DnsSource, FileSource
from extproc.releaseways import ReleaseWays
from extproc.sidechannel import SideChannels
from extproc.telemetry import logs
from extproc.tls import Certificates

_TIMEOUT_S: Final = 15.0
_CONNECT_S: Final = 2.0


class _Client(httpx.AsyncClient):
    """Whose time limit is one for the whole answer: httpx's own is for each piece, of which there may be no end."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await super().send(request, **options)
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete answer within {_TIMEOUT_S} s", request=request) from None


async def check(config: Config) -> Findings:
    """Everything that can be known from here. Sends each prefiller a few short prefills, and releases them."""
    findings = Findings()
    fleet = Fleet(config.fleet, policies(config))
    fleet.update("configuration", engines.specs(config.fleet, config.fleet))
    await _discover(config, fleet, findings)
    channels = SideChannels()
    http = EngineClient(connect_timeout_s=_CONNECT_S, max_connections=64, keepalive_s=config.prefill.keepalive_s)
    try:
        async with (
            http,
            _Client(timeout=httpx.Timeout(_TIMEOUT_S, connect=_CONNECT_S), trust_env=False) as client,
        ):
            ways = ReleaseWays(config.release, fleet, http, channels)
            known = await check_engines(fleet.engines(), client, findings)
            await HandOver(known, ways, client, findings).run()
            await check_envoy(config, fleet, client, findings)
            await _check_service(config, client, findings)
            await ways.flush(time.monotonic() + _TIMEOUT_S)
    finally:
        await channels.aclose()
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


async def _check_service(config: Config, client: httpx.AsyncClient, findings: Findings) -> None:
    """The service on this machine, each worker of it, as the configuration says where it listens."""
    try:
        supervisor.check_ports(config)
    except ConfigError as error:
        findings.error("ports", "service", str(error), "change one of them")
        return
    if config.grpc.tls is not None:
        try:
            Certificates(config.grpc.tls).credentials()
        except ConfigError as error:
            findings.error("tls_files", "service", str(error), "the service does not start with it")
    for worker in range(config.grpc.workers):
        subject = "service" if config.grpc.workers == 1 else f"worker {worker}"
        await _check_worker(supervisor.for_worker(config, worker), subject, client, findings)


async def _check_worker(config: Config, subject: str, client: httpx.AsyncClient, findings: Findings) -> None:
    host, port = _here(config.grpc.listen)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    serving = await (_is_serving(target) if config.grpc.tls is None else _speaks_tls(host, port))
    if serving is None:
        if await _is_taken(host, port):
            text = f"what answers at {target} is not this service as configured"
            findings.warning("service_down", subject, text, "is `grpc.tls` the same there? Else change `grpc.listen`")
        else:
            findings.note("service_down", subject, f"it does not run at {target}", "start it: `extproc serve`")
        return
    reason = await _why_not_ready(config, client)
    if serving and not reason:
        findings.ok(subject, f"serving at {target}")
    else:
        text = f"it runs at {target}, but is not serving: {reason or 'see /readyz for why'}"
        findings.warning("not_serving", subject, text, "Envoy sends it nothing until it is ready")


def _here(listen: str) -> tuple[str, int]:
    """Where this machine reaches a listener."""
    host, port = split_listen(listen)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port


async def _is_taken(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _is_serving(target: str) -> bool | None:
    """By gRPC's health protocol; None where nobody speaks it."""
    async with grpc.aio.insecure_channel(target, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.RpcError:
            return None
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _speaks_tls(host: str, port: int) -> bool | None:
    """Whether a TLS server for HTTP/2 is there. More it says only to those who show a certificate of its liking."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return None
    chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.close()
    return True if chosen == "h2" else None


async def _why_not_ready(config: Config, client: httpx.AsyncClient) -> str:
    """The service's own word, where its admin port is on and answers."""
    if config.admin.listen is None:
        return ""
    host, port = _here(config.admin.listen)
    try:
        answer = await client.get(f"http://{f'[{host}]' if ':' in host else host}:{port}/readyz")
    except httpx.HTTPError:
        return ""
    return answer.text.strip() if answer.status_code == 503 else ""


def run(config: Config, *, as_json: bool = False) -> None:
    """Print the findings; exits with 1 when there is an error among them."""
    logs.configure(Log(level="error"))  # what is done along the way is not what was asked for
    findings = asyncio.run(check(config))
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    sys.exit(1 if findings.failed else 0)


def _print(findings: Findings) -> None:
    from rich.console import Console
    from rich.text import Text

    marks = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "error": ("✗", "red")}
    console = Console(highlight=False, soft_wrap=True)
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:  # engines' own words: none of them is markup
        code = (f"  [{finding.code}]", "dim") if finding.code else ""
        console.print(Text.assemble(marks[finding.level], f" {finding.subject:<{width}}  {finding.text}", code))
        if finding.todo:
            console.print(Text.assemble(" " * (width + 4), (f"→ {finding.todo}", "dim")))
