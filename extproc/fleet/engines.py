"""Engines: what each is, how it is doing, and what this process has reserved on it."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

from extproc import configsections
from extproc.connectors import Connector, connector
from extproc.fleet.health import Health

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Spec:
    """An engine as a source of the fleet describes it: configuration, watched file or DNS."""

    role: Role
    url: str
    name: str
    connector: Connector
    lease_s: float = 30.0
    api_key: str | None = field(default=None, repr=False)
    abort_port: int | None = None
    side_channel_hosts: tuple[str, ...] = ()
    models: frozenset[str] | None = None
    """The models it serves; None: whatever its ``/v1/models`` says, and any until that is known."""
    group: str = ""
    data_parallel_size: int = 1
    max_inflight: int | None = None
    drain: bool = False
    address: str | None = None
    """Its IP where the source knows it (DNS discovery); otherwise it is looked up from the URL."""


@dataclass(slots=True)
class Report:
    """Load as the engine's own ``/metrics`` told it, and what of it was ours then."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    foreign: int = 0
    """Requests that this process had not sent: other replicas' and direct ones."""
    at: float = float("-inf")
    """``time.monotonic()`` of the scrape."""


class Engine:
    """One vLLM server. ``spec`` may be replaced while it lives; its counters and its health stay."""

    __slots__ = (
        "address",
        "drained",
        "health",
        "host",
        "inflight",
        "known_models",
        "picked",
        "port",
        "report",
        "reserved_tokens",
        "spec",
        "tls",
    )

    def __init__(self, spec: Spec) -> None:
        parts = urlsplit(spec.url)
        self.spec = spec
        self.host: str = parts.hostname or ""
        """The host of the URL, a name or an address without brackets."""
        self.tls = parts.scheme == "https"
        self.port: int = parts.port or (443 if self.tls else 80)
        self.address: str | None = canonical(spec.address or self.host)
        """An IP in its canonical spelling once the name has been resolved, else None."""
        self.inflight = 0
        self.reserved_tokens = 0
        self.picked = 0
        self.drained = False
        """Taken out by an operator through the admin port; ``spec.drain`` is the source's word."""
        self.health = Health()
        self.report = Report()
        self.known_models: frozenset[str] | None = None

    @property
    def role(self) -> Role:
        return self.spec.role

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def connector(self) -> Connector:
        return self.spec.connector

    @property
    def lease_s(self) -> float:
        return self.spec.lease_s

    @property
    def api_key(self) -> str | None:
        return self.spec.api_key

    @property
    def abort_port(self) -> int | None:
        return self.spec.abort_port

    @property
    def side_channel_hosts(self) -> tuple[str, ...]:
        return self.spec.side_channel_hosts

    @property
    def endpoint(self) -> str | None:
        """``ip:port``, an IPv6 address in brackets, as Envoy's override_host policy compares it; None if unresolved."""
        if self.address is None:
            return None
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @property
    def pairing(self) -> tuple[str, str]:
        """Engines hand over within one pairing only: the same group and the same connector."""
        return self.spec.group, self.spec.connector.name

    @property
    def draining(self) -> bool:
        """No new work; what runs may finish."""
        return self.drained or self.spec.drain

    def state(self, now: float) -> str:
        """In one word: unresolved, draining, unhealthy (by probes), ejected (by failed requests) or ready."""
        if self.address is None:
            return "unresolved"
        if self.draining:
            return "draining"
        if self.health.probed_ok is False:
            return "unhealthy"
        return "ejected" if self.health.ejected(now) else "ready"

    @property
    def full(self) -> bool:
        """At its cap of requests from this process."""
        return self.spec.max_inflight is not None and self.inflight >= self.spec.max_inflight

    def serves(self, model: str | None) -> bool:
        models = self.spec.models if self.spec.models is not None else self.known_models
        return model is None or models is None or model in models

    def foreign_load(self, now: float, stale_s: float) -> int:
        """Requests on it that are not ours, by a report that is not older than ``stale_s``."""
        return self.report.foreign if now - self.report.at <= stale_s else 0

    def __repr__(self) -> str:
        return f"<Engine {self.role} {self.name}>"


class Reservation:
    """A share of an engine's load, given back exactly once however often :meth:`release` is called."""

    __slots__ = ("_held", "_on_release", "_turn", "engine", "tokens")

    def __init__(self, engine: Engine, tokens: int = 0, on_release: Callable[[], None] | None = None) -> None:
        self.engine = engine
        self.tokens = tokens
        self._held = True
        self._on_release = on_release
        self._turn = engine.picked
        engine.inflight += 1
        engine.picked += 1
        engine.reserved_tokens += tokens
        engine.health.began(self, time.monotonic())

    def rank(self, ranks: int | None = None) -> int | None:
        """The data-parallel rank whose turn it is, of the engine's or of the first ``ranks``; None where it has one."""
        size = self.engine.spec.data_parallel_size if ranks is None else ranks
        return self._turn % size if size > 1 else None

    def undecided(self) -> None:
        """The request told nothing of the engine (its client left): another one may be tried there."""
        self.engine.health.ended(self)

    def release(self) -> None:
        if not self._held:
            return
        self._held = False
        self.engine.inflight -= 1
        self.engine.reserved_tokens -= self.tokens
        self.engine.health.ended(self)
        if self._on_release is not None:
            self._on_release()


def canonical(host: str) -> str | None:
    """An IP address (without brackets) as Envoy spells it: it compares hosts as text. None for a name."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return None


def specs(fleet: configsections.Fleet, listed: configsections.EngineLists) -> list[Spec]:
    """The engines that a configuration or a watched file lists, with the fleet's defaults filled in."""
    found = []
    roles: tuple[tuple[Role, Sequence[configsections.Engine]], ...] = (
        ("prefill", listed.prefill),
        ("decode", listed.decode),
    )
    for role, entries in roles:
        for entry in entries:
            made = spec(fleet, entry, role, entry.url, entry.name or urlsplit(entry.url).netloc)
            found.append(replace(made, side_channel_hosts=tuple(entry.side_channel_hosts), drain=entry.drain))
    return found


def spec(
    fleet: configsections.Fleet,
    settings: configsections.EngineSettings,
    role: Role,
    url: str,
    name: str,
    address: str | None = None,
) -> Spec:
    """An engine with these settings, and the fleet's defaults filled in."""
    key = settings.api_key or fleet.api_key
    return Spec(
        role=role,
        url=url,
        name=name,
        connector=connector(settings.connector or fleet.connector),
        lease_s=settings.lease_s or fleet.lease_s,
        api_key=key.get_secret_value() if key else None,
        abort_port=settings.abort_port,
        models=frozenset(settings.models) if settings.models is not None else None,
        group=settings.group,
        data_parallel_size=settings.data_parallel_size,
        max_inflight=settings.max_inflight or fleet.max_inflight.get(role),
        address=address,
    )
