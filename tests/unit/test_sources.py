from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc import config, configsections
from extproc.fleet.discovery import Resolver
from extproc.fleet.engines import Engine
from extproc.fleet.fleet import Fleet
from extproc.fleet.sources import DnsSource, FileSource
from tests.support.dns_server import DnsServer
from tests.support.fleet import fleet_of, named, names, spec
from tests.support.hangingfile import hanging


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Seconds until it held."""
    started = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - started


@contextlib.asynccontextmanager
async def running(work: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ---- a watched file ----


def lists(*decoders: int, **more: Any) -> str:
    return yaml.safe_dump(
        {"decode": [{"url": f"http://10.0.2.{n}:8000", "name": f"decode-{n}"} for n in decoders]} | more
    )


class Watched:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.fleet = fleet_of(spec("prefill", 1))
        self.source = FileSource(self.fleet, path)

    def read(self) -> None:
        """Twice, as it takes for a change."""
        self.source.read()
        self.source.read()

    @property
    def decoders(self) -> list[str]:
        return names(self.fleet.engines("decode"))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "fleet.yaml")


def test_the_file_lists_engines_beside_those_of_other_sources(watched: Watched) -> None:
    watched.path.write_text(lists(1, 2, prefill=[{"url": "http://[2001:db8::9]:8000", "group": "g", "drain": True}]))
    watched.source.read()  # the first time nothing is waited for
    assert watched.decoders == ["decode-1", "decode-2"]
    assert names(watched.fleet.engines("prefill")) == ["prefill-1", "[2001:db8::9]:8000"]
    added = watched.fleet.engines("prefill")[1]
    assert (added.endpoint, added.pairing, added.draining) == ("[2001:db8::9]:8000", ("g", "nixl"), True)
    assert watched.source.problem is None


def test_an_engines_key_may_end_in_a_newline(watched: Watched) -> None:
    watched.path.write_text("decode:\n- url: http://10.0.2.1:8000\n  api_key: |\n    sk-1\n")
    watched.source.read()
    assert [engine.api_key for engine in watched.fleet.engines("decode")] == ["sk-1"]


def test_a_change_is_taken_over_and_engines_that_stay_are_the_same(watched: Watched) -> None:
    watched.path.write_text(lists(1, 2))
    watched.read()
    kept = named(watched.fleet, "decode-2")
    watched.path.write_text(lists(2, 3))
    watched.read()
    assert watched.decoders == ["decode-2", "decode-3"]
    assert named(watched.fleet, "decode-2") is kept


def test_a_file_that_is_still_being_written_is_not_taken(watched: Watched) -> None:
    watched.path.write_text(lists(1))
    watched.read()
    text = lists(1, 2, 3)
    for size in range(0, len(text), 7):  # many of these are valid YAML, with engines missing
        watched.path.write_text(text[:size])
        watched.source.read()
    assert watched.decoders == ["decode-1"]
    assert watched.source.problem is None
    watched.path.write_text(text)
    watched.read()
    assert watched.decoders == ["decode-1", "decode-2", "decode-3"]


BAD: dict[str, tuple[str, str]] = {
    "no YAML": ("decode: [", "not YAML"),
    "no UTF-8": ("decode: \udcc3(", "not YAML"),
    "no date": ("a: 2024-13-45", "not YAML"),
    "too deep": ("[" * 600, "not YAML"),
    "empty": ("", "expected `prefill` and `decode` lists"),
    "nothing in it": ("{}", "expected `prefill` and `decode` lists"),
    "a list": ("- url: http://10.0.2.1:8000", "at the top level, found a list"),
    "a secret on the line at fault": ("api_key: sk-secret: x", "not YAML: line 1, column 19"),
    "unknown key": ("decoders: []", "decoders: unknown key"),
    "unknown key of an engine": (
        "decode: [{url: 'http://10.0.2.1:8000', modles: []}]",
        "decode[0].modles: unknown key",
    ),
    "bad URL": ("decode: [{url: '10.0.2.1:8000'}]", "decode[0].url: expected a URL like http://host:port"),
    "bad value": ("decode: [{url: 'http://10.0.2.1', drain: 7}]", "decode[0].drain: "),
    "key that no header can carry": (
        "decode: [{url: 'http://10.0.2.1', api_key: sk-secret-ü}]",
        "decode[0].api_key: expected printable ASCII characters on one line",
    ),
    "listed twice": ("decode: [{url: 'http://10.0.2.1'}, {url: 'http://10.0.2.1'}]", "is listed twice"),
    "key that is no name": ("7: []", "a key is not a string"),
}


@pytest.mark.parametrize(("text", "problem"), BAD.values(), ids=BAD)
def test_a_bad_file_keeps_the_fleet_and_says_why(
    watched: Watched, text: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watched.path.write_text(lists(1, 2))
    watched.read()
    engines = watched.fleet.engines()
    watched.path.write_bytes(text.encode("utf-8", "surrogateescape"))
    for _ in range(5):
        watched.read()
    assert watched.fleet.engines() == engines
    assert problem in (watched.source.problem or "")
    assert watched.fleet.sources[-1] == (f"file {watched.path}", 2, watched.source.problem)
    logged = capsys.readouterr().out
    assert logged.count("fleet file not taken over") == 1  # not with every look
    assert "sk-secret" not in logged

    watched.path.write_text(lists(3))
    watched.read()
    assert (watched.decoders, watched.source.problem) == (["decode-3"], None)
    assert watched.fleet.sources[-1] == (f"file {watched.path}", 1, None)


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the configuration's: as all its other paths."""
    (tmp_path / "fleets").mkdir()
    (tmp_path / "fleets" / "fleet.yaml").write_text(lists(1))
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "extproc.yaml").write_text("fleet: {file: fleets/fleet.yaml}")
    monkeypatch.chdir(tmp_path)
    path = config.load("conf/extproc.yaml").fleet.file
    assert path is not None
    watched = Watched(path)
    watched.read()
    assert (watched.decoders, watched.source.problem) == (["decode-1"], None)


def test_a_bad_file_that_is_put_right_again_is_in_force(watched: Watched) -> None:
    good = lists(1)
    for text, problem in ((good, False), ("decode: [", True), (good, False)):
        watched.path.write_text(text)
        watched.read()
        assert (watched.source.problem is not None) is problem
        assert watched.decoders == ["decode-1"]


def test_a_file_that_is_away_for_a_while(watched: Watched) -> None:
    watched.source.read()
    assert watched.source.problem == "cannot be read: No such file or directory"
    watched.path.write_text(lists(1))
    watched.read()
    watched.path.unlink()
    watched.read()
    assert watched.source.problem == "cannot be read: No such file or directory"
    assert watched.decoders == ["decode-1"]
    watched.path.write_text(lists(1))
    watched.read()
    assert watched.source.problem is None


def test_a_pipe_is_not_waited_for(watched: Watched) -> None:
    os.mkfifo(watched.path)
    watched.read()
    assert watched.source.problem == "cannot be read: not a regular file"
    watched.path.unlink()
    watched.path.write_text(lists(1))
    watched.read()
    assert (watched.decoders, watched.source.problem) == (["decode-1"], None)


async def test_a_file_that_hangs_is_told_and_taken_over_once_it_does_not(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.fleet.sources._FILE_PATIENCE_S", 0.05)
    watched.path.write_text(lists(1))
    async with contextlib.AsyncExitStack() as held:
        hangs = await held.enter_async_context(hanging(watched.path))
        async with running(watched.source.run()):
            await hangs.wait()
            await until(lambda: watched.source.problem == "cannot be read: no answer from its file system")
            assert watched.decoders == []
            await held.aclose()
            await until(lambda: watched.decoders == ["decode-1"])
            assert watched.source.problem is None


def test_secrets_of_a_bad_file_are_not_told(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    watched.path.write_text("decode: [{url: 'nonsense', api_key: 'hush-hush', abort_port: 'hush-hush'}]")
    watched.read()
    assert "decode[0].abort_port" in (watched.source.problem or "")
    assert "hush" not in (watched.source.problem or "") + capsys.readouterr().out


def test_an_explicitly_empty_fleet_is_taken_over(watched: Watched) -> None:
    watched.path.write_text(lists(1))
    watched.read()
    watched.path.write_text("{prefill: [], decode: []}")
    watched.read()
    assert watched.decoders == []


def _in_place(path: Path, text: str) -> None:
    path.write_text(text)


def _by_rename(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


def _as_kubernetes_does(path: Path, text: str) -> None:
    """A ConfigMap volume: file -> ..data/file, ..data -> a directory that is replaced."""
    directory = path.parent / f"..{time.monotonic_ns()}"
    directory.mkdir()
    (directory / path.name).write_text(text)
    link = path.parent / "..data_tmp"
    link.symlink_to(directory.name)
    os.replace(link, path.parent / "..data")
    if not path.is_symlink():
        path.symlink_to(Path("..data") / path.name)


@pytest.mark.parametrize("write", [_in_place, _by_rename, _as_kubernetes_does])
async def test_every_way_to_change_the_file_takes_less_than_a_second(
    watched: Watched, write: Callable[[Path, str], None]
) -> None:
    write(watched.path, lists(1))
    async with running(watched.source.run()):
        await until(lambda: watched.decoders == ["decode-1"])
        write(watched.path, lists(1, 2))
        assert await until(lambda: watched.decoders == ["decode-1", "decode-2"]) < 1.0
        write(watched.path, "decode: [")
        await until(lambda: watched.source.problem is not None)
        write(watched.path, lists(3))
        assert await until(lambda: watched.decoders == ["decode-3"]) < 1.0


# ---- DNS ----


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with DnsServer() as started:
        yield started


def dns_fleet(*servers: DnsServer, **fields: Any) -> Fleet:
    return fleet_of(dns_servers=[server.address for server in servers], **fields)


def dns_source(fleet: Fleet, name: str = "engines.test", **fields: Any) -> DnsSource:
    return DnsSource(fleet, configsections.Dns(**{"role": "decode", "name": name, **fields}))


def urls(fleet: Fleet) -> list[str]:
    return [engine.url for engine in fleet.engines()]


async def test_one_engine_for_each_address(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.2", "10.0.0.1", ttl=30)
    fleet = dns_fleet(server)
    assert await dns_source(fleet).refresh() == 30
    assert urls(fleet) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert [(engine.endpoint, engine.role) for engine in fleet.engines()] == [
        ("10.0.0.1:8000", "decode"),
        ("10.0.0.2:8000", "decode"),
    ]


async def test_O16_ipv6_addresses(server: DnsServer) -> None:
    server.set("engines.test", "AAAA", "2001:DB8:0:0::1", ttl=20)
    server.set("engines.test", "A", "10.0.0.1", ttl=10)
    fleet = dns_fleet(server)
    assert await dns_source(fleet, port=9000).refresh() == 10
    assert urls(fleet) == ["http://10.0.0.1:9000", "http://[2001:db8::1]:9000"]
    assert fleet.engines()[1].endpoint == "[2001:db8::1]:9000"


@pytest.mark.parametrize("kind", ["address", "srv"])
@pytest.mark.parametrize(
    ("family", "expected", "asked"),
    [("ipv4", "http://10.0.0.1:8000", "A"), ("ipv6", "http://[2001:db8::1]:8000", "AAAA")],
)
async def test_O16_of_engines_with_two_addresses_one_is_listed(
    server: DnsServer, kind: str, family: str, expected: str, asked: str
) -> None:
    server.set("pod.test", "A", "10.0.0.1")
    server.set("pod.test", "AAAA", "2001:db8::1")
    server.set("engines.test", "SRV", "0 10 8000 pod.test.")
    fleet = dns_fleet(server)
    await dns_source(fleet, "engines.test" if kind == "srv" else "pod.test", type=kind, family=family).refresh()
    assert urls(fleet) == [expected]
    assert {query.kind for query in server.queries} - {"SRV"} == {asked}
    server.fail("pod.test", "SERVFAIL")
    assert await dns_source(fleet, "pod.test", family=family).refresh() == 1
    assert urls(fleet) == [expected]


async def test_O16_a_server_at_an_ipv6_address() -> None:
    async with DnsServer("::1") as server:
        server.set("engines.test", "A", "10.0.0.1")
        fleet = dns_fleet(server)
        await dns_source(fleet).refresh()
        assert urls(fleet) == ["http://10.0.0.1:8000"]


async def test_services_name_hosts_and_ports(server: DnsServer) -> None:
    server.set("_http._tcp.engines.test", "SRV", "0 10 8001 a.test.", "0 10 8002 b.test.", "5 10 8003 a.test.", ttl=60)
    server.set("a.test", "A", "10.0.0.1", ttl=50)
    server.set("b.test", "AAAA", "2001:db8::2", ttl=40)
    fleet = dns_fleet(server)
    assert await dns_source(fleet, "_http._tcp.engines.test", type="srv").refresh() == 40
    assert urls(fleet) == ["http://10.0.0.1:8001", "http://10.0.0.1:8003", "http://[2001:db8::2]:8002"]


async def test_a_service_that_is_decidedly_not_available_has_no_engines(server: DnsServer) -> None:
    server.set("_http._tcp.engines.test", "SRV", "0 0 0 .")
    fleet = dns_fleet(server)
    await dns_source(fleet, "_http._tcp.engines.test", type="srv").refresh()
    assert urls(fleet) == []


async def test_the_entrys_settings_and_the_fleets_defaults(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1")
    fleet = dns_fleet(server, lease_s=12, api_key="k", max_inflight={"prefill": 9})
    source = dns_source(
        fleet,
        role="prefill",
        scheme="https",
        port=443,
        connector="mooncake-ascend",
        models=["m"],
        group="g",
        data_parallel_size=4,
        abort_port=5557,
    )
    await source.refresh()
    (engine,) = fleet.engines()
    assert (engine.role, engine.url, engine.tls) == ("prefill", "https://10.0.0.1:443", True)
    assert (engine.lease_s, engine.api_key, engine.spec.max_inflight) == (12, "k", 9)
    assert (engine.pairing, engine.spec.models) == (("g", "mooncake-ascend"), frozenset({"m"}))
    assert (engine.spec.data_parallel_size, engine.abort_port) == (4, 5557)


async def test_records_that_change_change_the_engines(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1", "10.0.0.2")
    fleet = dns_fleet(server)
    source = dns_source(fleet)
    await source.refresh()
    kept = fleet.decoder_at("10.0.0.2:8000")
    server.set("engines.test", "A", "10.0.0.2", "10.0.0.3")
    await source.refresh()
    assert urls(fleet) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]
    assert fleet.decoder_at("10.0.0.2:8000") is kept


@pytest.mark.parametrize(("ttl", "pause"), [(0, 1), (1, 1), (5, 5), (300, 300), (86400, 300)])
async def test_looked_up_again_after_the_ttl_within_bounds(server: DnsServer, ttl: int, pause: float) -> None:
    server.set("engines.test", "A", "10.0.0.1", ttl=ttl)
    assert await dns_source(dns_fleet(server)).refresh() == pause


async def test_an_alias_shortens_the_ttl(server: DnsServer) -> None:
    server.set("engines.test", "CNAME", "real.test.", ttl=5)
    server.set("real.test", "A", "10.0.0.1", ttl=300)
    fleet = dns_fleet(server)
    assert await dns_source(fleet).refresh() == 5
    assert urls(fleet) == ["http://10.0.0.1:8000"]


async def test_a_name_that_does_not_exist_any_more_has_no_engines(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1")
    fleet = dns_fleet(server)
    source = dns_source(fleet)
    await source.refresh()
    server.set("engines.test", "A")
    assert await source.refresh() == 1
    assert urls(fleet) == []
    server.set("engines.test", "A", "10.0.0.4")
    await source.refresh()
    assert urls(fleet) == ["http://10.0.0.4:8000"]


@pytest.mark.parametrize("code", ["SERVFAIL", "REFUSED", "NOTIMP"])
@pytest.mark.parametrize("kind", ["address", "srv"])
async def test_engines_stay_while_the_server_fails(
    server: DnsServer, code: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.set("engines.test", "SRV", "0 10 8000 a.test.")
    for name in ("engines.test", "a.test"):
        server.set(name, "A", "10.0.0.1")
    fleet = dns_fleet(server)
    source = dns_source(fleet, type=kind)
    await source.refresh()
    assert urls(fleet) == ["http://10.0.0.1:8000"]
    server.fail("engines.test", code)
    for _ in range(3):
        assert await source.refresh() == 1
    assert urls(fleet) == ["http://10.0.0.1:8000"]
    (_, told) = fleet.sources
    assert (told.engines, told.problem) == (1, "look-up failed: NoNameservers")
    output = capsys.readouterr().out
    assert output.count("DNS discovery fails; engines stay") == 1
    server.fail("engines.test", None)
    await source.refresh()
    assert "DNS discovery works again" in capsys.readouterr().out
    if kind == "srv":
        server.fail("a.test", code)
        await source.refresh()
        assert urls(fleet) == ["http://10.0.0.1:8000"]


async def test_one_kind_of_records_that_fails_stays_as_it_was(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1")
    server.set("engines.test", "AAAA", "2001:db8::1")
    fleet = dns_fleet(server)
    source = dns_source(fleet)
    await source.refresh()
    server.fail("engines.test", "SERVFAIL", kind="AAAA")
    server.set("engines.test", "A", "10.0.0.2")
    assert await source.refresh() == 1
    assert urls(fleet) == ["http://[2001:db8::1]:8000", "http://10.0.0.2:8000"]


async def test_a_server_that_never_tells_ipv6_addresses_does_not_hide_the_others(server: DnsServer) -> None:
    server.fail("engines.test", "SERVFAIL", kind="AAAA")
    server.set("engines.test", "A", "10.0.0.1")
    fleet = dns_fleet(server)
    await dns_source(fleet).refresh()
    assert urls(fleet) == ["http://10.0.0.1:8000"]


async def test_a_server_that_is_silent_or_gone(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1")
    fleet = dns_fleet(server)
    source = dns_source(fleet)
    source._resolver.lifetime = 0.2
    await source.refresh()
    server.silent = True
    assert await source.refresh() == 1
    assert urls(fleet) == ["http://10.0.0.1:8000"]
    server.silent = False
    server.set("engines.test", "A", "10.0.0.2")
    await source.refresh()
    assert urls(fleet) == ["http://10.0.0.2:8000"]


async def test_the_second_server_is_asked_when_the_first_fails(server: DnsServer) -> None:
    """Both at the same host: it is the port that tells them apart."""
    async with DnsServer() as other:
        server.fail("engines.test")
        other.set("engines.test", "A", "10.0.0.1")
        fleet = dns_fleet(server, other)
        await dns_source(fleet).refresh()
        assert urls(fleet) == ["http://10.0.0.1:8000"]
        assert (server.asked("engines.test", "A"), other.asked("engines.test", "A")) == (1, 1)


async def test_an_answer_that_does_not_fit_a_datagram_comes_over_tcp(server: DnsServer) -> None:
    addresses = [f"10.1.{number // 250}.{number % 250 + 1}" for number in range(500)]
    server.set("engines.test", "A", *addresses)
    fleet = dns_fleet(server)
    await dns_source(fleet).refresh()
    assert sorted(engine.address or "" for engine in fleet.engines()) == sorted(addresses)
    assert {query.over for query in server.queries if query.kind == "A"} == {"udp", "tcp"}


async def test_two_entries_of_one_name_do_not_replace_each_other(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1")
    fleet = dns_fleet(server)
    sources = [dns_source(fleet, port=8000), dns_source(fleet, port=8001), dns_source(fleet, role="prefill")]
    for source in (*sources, *sources):
        await source.refresh()
    assert len(fleet.engines("decode")) == 2
    assert len(fleet.engines("prefill")) == 1


async def test_a_running_source_follows_the_records(server: DnsServer) -> None:
    server.set("engines.test", "A", "10.0.0.1", ttl=1)
    fleet = dns_fleet(server)
    async with running(dns_source(fleet).run()):
        await until(lambda: urls(fleet) == ["http://10.0.0.1:8000"])
        server.set("engines.test", "A", "10.0.0.2", ttl=3600)
        assert 0.5 < await until(lambda: urls(fleet) == ["http://10.0.0.2:8000"]) < 2.0
    assert server.asked("engines.test", "A") == 2


# ---- engines configured by name ----


class Names:
    """``getaddrinfo`` as a test wants it: the system's own resolver cannot be pointed at a server on another port."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []
        self.hanging: dict[str, asyncio.Event] = {}
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **_: Any) -> list[Any]:
        import socket

        self.asked.append(host)
        if host in self.hanging:
            await self.hanging[host].wait()
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, port, 0, 0))
            if ":" in address
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in self.addresses[host]
        ]


def by_name(*hosts: str) -> Fleet:
    return fleet_of(*(spec("decode", n, url=f"http://{host}:8000", name=host) for n, host in enumerate(hosts, 1)))


def addresses(fleet: Fleet) -> list[str | None]:
    return [engine.address for engine in fleet.engines()]


async def test_the_systems_own_names_are_resolved() -> None:
    fleet = by_name("localhost", "10.0.0.9")
    await Resolver(fleet, 5).refresh()
    assert addresses(fleet) == ["127.0.0.1", "10.0.0.9"]


async def test_an_address_is_kept_as_long_as_the_name_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, found = by_name("a"), Names(monkeypatch, a=["10.0.0.1", "10.0.0.2"])
    heard: list[Engine] = []
    fleet.on_change(lambda: heard.extend(fleet.engines()))
    resolver = Resolver(fleet, 5)
    for listed in (["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"], []):
        found.addresses = {"a": listed} if listed else {}
        await resolver.refresh()
        assert addresses(fleet) == ["10.0.0.1"]
    assert len(heard) == 1
    found.addresses = {"a": ["10.0.0.2"]}
    await resolver.refresh()
    assert addresses(fleet) == ["10.0.0.2"]
    assert len(heard) == 2


async def test_a_resolver_that_is_woken_up_in_the_tick_of_its_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet changes while the service stops."""
    fleet = by_name("a")
    Names(monkeypatch, a=["10.0.0.1"])
    running = asyncio.create_task(Resolver(fleet, 60).run())
    async with asyncio.timeout(5):
        while addresses(fleet) != ["10.0.0.1"]:
            await asyncio.sleep(0)
        for _ in range(5):  # it waits again
            await asyncio.sleep(0)
        fleet.changed()
        await asyncio.sleep(0)  # what it waits for is there, and it has not run yet
        running.cancel()
        await asyncio.wait({running})
    assert running.cancelled()


async def test_ipv4_first_as_envoy_does_and_ipv6_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, both=["2001:db8::1", "10.0.0.1"], six=["2001:db8::2"])
    fleet = by_name("both", "six")
    await Resolver(fleet, 5).refresh()
    assert [engine.endpoint for engine in fleet.engines()] == ["10.0.0.1:8000", "[2001:db8::2]:8000"]


async def test_failing_names_are_logged_once_and_so_is_their_recovery(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, found = by_name("a"), Names(monkeypatch)
    resolver = Resolver(fleet, 5)
    for _ in range(3):
        await resolver.refresh()
    assert capsys.readouterr().out.count("engine name does not resolve") == 1
    found.addresses = {"a": ["10.0.0.1"]}
    await resolver.refresh()
    assert capsys.readouterr().out.count("engine resolved") == 1


async def test_a_name_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, found = by_name("hangs", "a"), Names(monkeypatch, a=["10.0.0.1"], b=["10.0.0.2"], hangs=["10.0.0.3"])
    found.hanging["hangs"] = asyncio.Event()
    async with running(Resolver(fleet, 3600).run()):
        await until(lambda: addresses(fleet) == [None, "10.0.0.1"])
        fleet.update("file", [spec("decode", 3, url="http://b:8000")])
        await until(lambda: addresses(fleet) == [None, "10.0.0.1", "10.0.0.2"])
        assert found.asked.count("hangs") == 1
        found.hanging["hangs"].set()
        await until(lambda: addresses(fleet) == ["10.0.0.3", "10.0.0.1", "10.0.0.2"])


async def test_new_engines_are_looked_up_at_once_and_others_not_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet, found = by_name("a"), Names(monkeypatch, a=["10.0.0.1"], b=["10.0.0.2"])
    async with running(Resolver(fleet, 3600).run()):
        await until(lambda: addresses(fleet) == ["10.0.0.1"])
        for _ in range(20):
            await asyncio.sleep(0)
        assert found.asked == ["a"]  # its own news is none to it
        fleet.update("file", [spec("decode", 2, url="http://b:8000")])
        await until(lambda: addresses(fleet) == ["10.0.0.1", "10.0.0.2"])
