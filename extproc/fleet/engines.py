"""Engines and the fleet they form, with what this process has reserved on each."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Sequence
from typing import Literal
from urllib.parse import urlsplit

from extproc import config
from extproc.connectors import Connector, connector
from extproc.picking import Policy, policy

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


class Engine:
    """One vLLM server. ``address`` is an IP once the name has been resolved, else None."""

    __slots__ = (
        "abort_port",
        "address",
        "api_key",
        "connector",
        "inflight",
        "lease_s",
        "name",
        "port",
        "role",
        "side_channel_hosts",
        "url",
    )

    def __init__(
        self,
        *,
        role: Role,
        url: str,
        name: str | None = None,
        connector: Connector,
        lease_s: float = 30.0,
        api_key: str | None = None,
        abort_port: int | None = None,
        side_channel_hosts: Sequence[str] = (),
    ) -> None:
        parts = urlsplit(url)
        self.role = role
        self.url = url
        self.name = name or parts.netloc
        self.port: int = parts.port or (443 if parts.scheme == "https" else 80)
        self.connector = connector
        self.lease_s = lease_s
        self.api_key = api_key
        self.abort_port = abort_port
        self.side_channel_hosts = tuple(side_channel_hosts)
        self.inflight = 0
        self.address: str | None = parts.hostname if _is_address(parts.hostname or "") else None

    @property
    def host(self) -> str:
        """The host of the URL, a name or an address without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def endpoint(self) -> str | None:
        """``ip:port``, an IPv6 address in brackets, as Envoy's override_host policy compares it; None if unresolved."""
        if self.address is None:
            return None
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    def __repr__(self) -> str:
        return f"<Engine {self.role} {self.name}>"


class Reservation:
    """A share of an engine's load, given back exactly once however often :meth:`release` is called."""

    __slots__ = ("_held", "engine")

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._held = True
        engine.inflight += 1

    def release(self) -> None:
        if self._held:
            self._held = False
            self.engine.inflight -= 1


class Fleet:
    """All engines by role. Picking and reserving is one step, so a burst never sees the same stale load."""

    def __init__(self, engines: Sequence[Engine], policies: dict[Role, Policy]) -> None:
        self._engines: dict[Role, list[Engine]] = {r: [e for e in engines if e.role == r] for r in ROLES}
        self._policies = policies
        self._turns: dict[Role, int] = dict.fromkeys(ROLES, 0)

    def engines(self, role: Role) -> Sequence[Engine]:
        return self._engines[role]

    def ready(self, role: Role) -> bool:
        """Whether any engine of the role could be picked now."""
        return any(_usable(engine) for engine in self._engines[role])

    def preferences(
        self, role: Role, *, exclude: Collection[Engine] = (), where: Callable[[Engine], bool] | None = None
    ) -> list[Engine]:
        """The usable engines, best first."""
        candidates = [
            engine
            for engine in self._engines[role]
            if _usable(engine) and engine not in exclude and (where is None or where(engine))
        ]
        if not candidates:
            return []
        turn = self._turns[role]
        self._turns[role] = turn + 1
        return self._policies[role](candidates, turn)

    def reserve(
        self, role: Role, *, exclude: Collection[Engine] = (), where: Callable[[Engine], bool] | None = None
    ) -> Reservation | None:
        """Pick the best engine and count it as loaded, in one step. None where there is no engine to pick."""
        best = self.preferences(role, exclude=exclude, where=where)
        return Reservation(best[0]) if best else None


def _usable(engine: Engine) -> bool:
    return engine.address is not None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def from_config(settings: config.Config) -> Fleet:
    """The static fleet of a configuration."""
    fleet = settings.fleet
    engines = []
    for role, listed in (("prefill", fleet.prefill), ("decode", fleet.decode)):
        for entry in listed:
            key = entry.api_key or fleet.api_key
            engines.append(
                Engine(
                    role=role,  # type: ignore[arg-type]
                    url=entry.url,
                    name=entry.name,
                    connector=connector(entry.connector or fleet.connector),
                    lease_s=entry.lease_s or fleet.lease_s,
                    api_key=key.get_secret_value() if key else None,
                    abort_port=entry.abort_port,
                    side_channel_hosts=entry.side_channel_hosts,
                )
            )
    return Fleet(
        engines,
        {"prefill": policy(settings.routing.prefill_policy), "decode": policy(settings.routing.decode_policy)},
    )
