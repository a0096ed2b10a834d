"""Where engines come from besides the configuration: a watched file, and DNS."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.nameserver import Do53Nameserver
from pydantic import ValidationError

from extproc import config, configsections, configtext, daemonthread
from extproc.configtypes import split_listen
from extproc.errors import ConfigError
from extproc.fleet.engines import Spec, spec, specs
from extproc.fleet.fleet import Fleet
from extproc.telemetry.logs import log

_FILE_POLL_S: Final = 0.3
_FILE_PATIENCE_S: Final = 5.0
_MIN_TTL_S: Final = 1.0
_MAX_TTL_S: Final = 300.0
_LIFETIME_S: Final = 3.0
_KINDS: Final = {"any": ("A", "AAAA"), "ipv4": ("A",), "ipv6": ("AAAA",)}
_FAILURES: Final = (dns.exception.DNSException, OSError)
_NUMBERS: Final = itertools.count(1)


class FileSource:
    """A YAML file with ``prefill`` and ``decode`` lists, shaped as in the configuration.

    Read again within a second of each change, also of one behind a symbolic link (Kubernetes swaps those). A file that
    is not right as a whole changes nothing, and the log says what is wrong with it.
    """

    def __init__(self, fleet: Fleet, path: Path) -> None:
        self._fleet = fleet
        self._path = path
        self._source = f"file {path}"
        fleet.expect(self._source)
        self._in_force: bytes | None = None
        self._seen: bytes | None = None
        self._refused: tuple[bytes, str] | None = None
        self._complaint = ""
        self.problem: str | None = "not read yet"
        """Why the file as it is now is not in force; None when it is."""

    def read(self) -> None:
        """Take over the file if it has changed, and is not still being written: it must be the same twice in a row."""
        self._take_over(self._look())

    async def run(self) -> None:
        while True:
            looking = daemonthread.start(self._look, "fleet file")  # a large file takes its time to parse
            if not (await asyncio.wait({looking}, timeout=_FILE_PATIENCE_S))[0]:
                self._complain("cannot be read: no answer from its file system")
                self._fleet.report(self._source, self.problem)
            self._take_over(await looking)
            await asyncio.sleep(_FILE_POLL_S)

    def _look(self) -> configsections.EngineLists | None:
        """What the file lists, if that is news and in order."""
        try:
            if not self._path.is_file() and self._path.exists():  # a pipe would block, a device never end
                self._complain("cannot be read: not a regular file")
                return None
            text = self._path.read_bytes()
        except OSError as error:
            self._complain(f"cannot be read: {error.strerror}")
            return None
        before, self._seen = self._seen, text
        if text == self._in_force:
            self.problem, self._complaint = None, ""
            return None
        if text != before and self._in_force is not None:
            return None
        if self._refused is not None and text == self._refused[0]:
            self._complain(self._refused[1])
            return None
        try:
            listed = self._parse(text)
        except ConfigError as error:
            self._refused = text, str(error)
            self._complain(str(error))
            return None
        self._in_force = text
        return listed

    def _take_over(self, listed: configsections.EngineLists | None) -> None:
        if listed is not None:
            self.problem, self._complaint = None, ""
            self._fleet.update(self._source, specs(self._fleet.settings, listed))
        self._fleet.report(self._source, self.problem)

    def _parse(self, text: bytes) -> configsections.EngineLists:
        values = configtext.parse_yaml(text)  # its errors show no values: the file may hold keys
        if not values:
            raise ConfigError("expected `prefill` and `decode` lists")
        try:
            return configsections.EngineLists(**values)
        except (ValidationError, TypeError) as error:
            problems = config.explain(error) if isinstance(error, ValidationError) else [str(error)]
            raise ConfigError("; ".join(problems)) from error

    def _complain(self, problem: str) -> None:
        self.problem = problem
        if problem != self._complaint:
            self._complaint = problem
            log.error("fleet file not taken over; the fleet stays as it was", file=str(self._path), problem=problem)


class DnsSource:
    """Engines behind one DNS name: one for each address, or each SRV target's address; looked up again at each TTL.

    A name that does not exist (any more), or has no such records, has no engines. While servers fail or time out, the
    engines stay as they are.
    """

    def __init__(self, fleet: Fleet, settings: configsections.Dns) -> None:
        self._fleet = fleet
        self._settings = settings
        self._source = f"dns {next(_NUMBERS)} {settings.name}"
        fleet.expect(self._source)
        self._kinds = _KINDS[settings.family]
        self._resolver = resolver(fleet.settings.dns_servers)
        self._known: dict[tuple[str, str], list[str]] = {}
        self._failing = False

    async def refresh(self) -> float:
        """One look-up; returns the seconds until the next."""
        try:
            found, ttl = await (self._services() if self._settings.type == "srv" else self._addresses())
        except (dns.exception.DNSException, OSError) as error:
            if not self._failing:
                log.warning("DNS discovery fails; engines stay", name=self._settings.name, error=type(error).__name__)
            self._failing = True
            self._fleet.report(self._source, f"look-up failed: {type(error).__name__}")
            return _MIN_TTL_S
        if self._failing:
            self._failing = False
            log.info("DNS discovery works again", name=self._settings.name)
        self._fleet.update(self._source, self._specs(found))
        return min(_MAX_TTL_S, max(_MIN_TTL_S, ttl))

    async def run(self) -> None:
        while True:
            await asyncio.sleep(await self.refresh())

    async def _addresses(self) -> tuple[list[tuple[str, int]], float]:
        addresses, ttl = await self._lookup_host(self._settings.name)
        return [(address, self._settings.port) for address in addresses], ttl

    async def _services(self) -> tuple[list[tuple[str, int]], float]:
        try:
            answer = await self._resolver.resolve(self._settings.name, "SRV")
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return [], _MIN_TTL_S
        services = [(record.target.to_text(), record.port) for record in answer]
        hosts = await asyncio.gather(*(self._lookup_host(target) for target, _ in services))
        targets = {target for target, _ in services}
        self._known = {key: addresses for key, addresses in self._known.items() if key[0] in targets}
        found = [
            (address, port) for (_, port), (addresses, _) in zip(services, hosts, strict=True) for address in addresses
        ]
        return found, min(_ttl(answer), *(ttl for _, ttl in hosts))

    async def _lookup_host(self, name: str) -> tuple[list[str], float]:
        """All addresses of a name. One kind may be missing; one that no server tells stays as it was."""
        lookups = [self._resolver.resolve(name, kind) for kind in self._kinds]
        answers = await asyncio.gather(*lookups, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException) and not _is_none(answer)]
        if len(failures) == len(answers) or any(not isinstance(failure, _FAILURES) for failure in failures):
            raise failures[0]
        addresses: list[str] = []
        ttls = []
        for kind, answer in zip(self._kinds, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._known[name, kind] = [record.address for record in answer]
                ttls.append(_ttl(answer))
            elif _is_none(answer):
                self._known[name, kind] = []
            else:
                ttls.append(_MIN_TTL_S)
            addresses += self._known.get((name, kind), [])
        return addresses, min(ttls, default=_MIN_TTL_S)

    def _specs(self, found: Iterable[tuple[str, int]]) -> list[Spec]:
        settings, made = self._settings, []
        for address, port in sorted(set(found)):
            name = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            url = f"{settings.scheme}://{name}"
            made.append(spec(self._fleet.settings, settings, settings.role, url, name, address))
        return made


def _ttl(answer: dns.resolver.Answer) -> float:
    """Seconds for which the answer holds; an alias on the way to it may shorten them."""
    return float(answer.chaining_result.minimum_ttl)


def _is_none(error: BaseException) -> bool:
    """Whether a server says that there is no such record."""
    return isinstance(error, dns.resolver.NXDOMAIN | dns.resolver.NoAnswer)


def resolver(servers: Iterable[str]) -> dns.asyncresolver.Resolver:
    """A resolver for ``host:port`` servers, or for the system's own, with its search domains."""
    listed = [split_listen(server) for server in servers]
    if listed:
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers = [Do53Nameserver(host, port) for host, port in listed]
    else:
        made = dns.asyncresolver.Resolver()
        made.use_search_by_default = True
    made.lifetime = _LIFETIME_S
    return made
