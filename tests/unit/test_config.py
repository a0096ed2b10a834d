"""The configuration: what is accepted, what is refused in which words, and that secrets stay secret."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from extproc import config, configenv, configsections
from extproc.bootstrap import render
from extproc.configtext import parse_yaml
from extproc.configtypes import split_listen
from extproc.errors import ConfigError

FLEET = {"decode": [{"url": "http://d:1"}]}
SECRET = "sk-4f1c-secret"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(configenv.PREFIX):
            monkeypatch.delenv(name)


def _problems(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config.build(values, source="f")
    lines = str(error.value).split("\n")
    assert all(line.startswith("f: ") for line in lines)
    return [line.removeprefix("f: ") for line in lines]


def _file(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "extproc.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_as_people_write_it(tmp_path: Path) -> None:
    text = """
grpc:   {listen: 0.0.0.0:9002, tls: null}
admin:  {listen: 127.0.0.1:9003}
fleet:
  connector: nixl                  # default for engines below
  prefill: [{url: http://10.0.0.7:8000}]
  decode:  [{url: http://10.0.0.8:8000}, {url: http://10.0.0.9:8000/}]
prefill: {timeout_s: 60, attempts: 2, on_failure: error}
log:
  # level: debug
"""
    settings = config.load(_file(tmp_path, text))

    assert settings.grpc.listen == "0.0.0.0:9002"
    assert settings.admin.listen == "127.0.0.1:9003"
    assert [engine.url for engine in settings.fleet.prefill] == ["http://10.0.0.7:8000"]
    assert [engine.url for engine in settings.fleet.decode] == ["http://10.0.0.8:8000", "http://10.0.0.9:8000"]
    assert (settings.prefill.timeout_s, settings.prefill.attempts, settings.prefill.on_failure) == (60.0, 2, "error")
    assert settings.log == configsections.Log()
    assert config.load(str(tmp_path / "extproc.yaml")) == settings


def test_a_configuration_cannot_be_changed() -> None:
    settings = config.build({"fleet": FLEET})

    with pytest.raises(ValidationError):
        settings.prefill.attempts = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "fleet: required"),
        ("# nothing\n", "fleet: required"),
        ("fleet:\n", "fleet: required"),
        ("- a\n", "expected keys like `fleet:` at the top level, found a list"),
        ("fleet\n", "expected keys like `fleet:` at the top level, found a str"),
        ("fleet: {decode: [\n", "not YAML: line 2, column 1: expected the node content, but found '<stream end>'"),
        ("fleet:\n\tdecode: 1\n", "not YAML: line 2, column 1: found character '\\t' that cannot start any token"),
        ("fleet: 1\nfleet: 2\n", "not YAML: line 2, column 1: 'fleet' is there twice"),
        ("log: {level: info, level: debug}\n", "not YAML: line 1, column 20: 'level' is there twice"),
        ("1: 2\n", "not YAML: line 1, column 1: a key is not a string"),
        ("a: 2001-99-99\n", "not YAML: a date or number that cannot be"),
        ("a: " + "[" * 5000, "not YAML: nested too deeply"),
        (b"a: \xff\n", "not YAML: not text"),
    ],
)
def test_files_that_cannot_be_understood(tmp_path: Path, text: str | bytes, problem: str) -> None:
    path = _file(tmp_path, text)

    with pytest.raises(ConfigError) as error:
        config.load(path)

    assert str(error.value) == f"{path}: {problem}"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(tmp_path / "none.yaml")
    assert str(error.value) == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"

    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        config.load(tmp_path)


def test_merge_keys_and_anchors_work() -> None:
    text = "x: &shared {lease_s: 9}\ny:\n  <<: *shared\n  url: http://h:1\n"

    assert parse_yaml(text) == {"x": {"lease_s": 9}, "y": {"lease_s": 9, "url": "http://h:1"}}


# ── keys and values ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"prefil": {}}, ["prefil: unknown key; did you mean 'prefill'?"]),
        ({"prefill": {"timeouts": 1}}, ["prefill.timeouts: unknown key; did you mean 'timeout_s'?"]),
        (
            {"prefill": {"fallback": {"max_body": 1}}},
            ["prefill.fallback.max_body: unknown key; did you mean 'max_body_bytes'?"],
        ),
        ({"fleet": {**FLEET, "helth": {}}}, ["fleet.helth: unknown key; did you mean 'health'?"]),
        (
            {"fleet": {**FLEET, "health": {"intervall_s": 1}}},
            ["fleet.health.intervall_s: unknown key; did you mean 'interval_s'?"],
        ),
        (
            {"fleet": {"decode": [{"url": "http://d:1"}, {"urll": "http://d:2"}]}},
            ["fleet.decode[1].url: required", "fleet.decode[1].urll: unknown key; did you mean 'url'?"],
        ),
        ({"log": {"zzz": 1}}, ["log.zzz: unknown key; known: format, level"]),
        ({"life": {"patience": 5}}, ["life.patience: unknown key; known: drain_s, notice_s"]),
        (
            {"prefill": {"timeout_s": "long"}},
            ["prefill.timeout_s: Input should be a valid number, unable to parse string as a number"],
        ),
        ({"prefill": {"timeout_s": 0}}, ["prefill.timeout_s: Input should be greater than 0"]),
        ({"prefill": {"timeout_s": float("inf")}}, ["prefill.timeout_s: Input should be a finite number"]),
        ({"life": {"notice_s": float("nan")}}, ["life.notice_s: Input should be a finite number"]),
        ({"prefill": {"attempts": 11}}, ["prefill.attempts: Input should be less than or equal to 10"]),
        ({"prefill": {"on_failure": "retry"}}, ["prefill.on_failure: Input should be 'error' or 'decode'"]),
        ({"prefill": 5}, ["prefill: Input should be a valid dictionary or instance of Prefill"]),
        ({"fleet": {"decode": {}}}, ["fleet.decode: Input should be a valid list"]),
        ({"fleet": {"decode": []}}, ["fleet: decode: required, unless `file` or `dns` provide decode engines"]),
        (
            {"routing": {"paths": ["v1/completions"]}},
            ["routing.paths[0]: expected a path like /v1/completions, without a query"],
        ),
        (
            {"routing": {"paths": ["/a", "/b?c"]}},
            ["routing.paths[1]: expected a path like /v1/completions, without a query"],
        ),
        (
            {"grpc": {"tls": {"cert": "x"}}},
            [
                "grpc.tls.certificate: required",
                "grpc.tls.key: required",
                "grpc.tls.cert: unknown key; known: certificate, key, client_ca",
            ],
        ),
        ({"prefill": {"timeout_s": 1e300}}, ["prefill.timeout_s: Input should be less than or equal to 86400"]),
        ({"life": {"notice_s": 86401}}, ["life.notice_s: Input should be less than or equal to 86400"]),
        ({"fleet": {**FLEET, "health": {"path": "health"}}}, ["fleet.health.path: expected a path like /health"]),
        ({"fleet": {**FLEET, "health": {"path": "/a\nb"}}}, ["fleet.health.path: expected a path like /health"]),
        ({"admin": {"listen": ""}}, ["admin.listen: expected host:port, like 0.0.0.0:9002 or [::]:9002"]),
    ],
)
def test_each_key_at_fault_is_named(values: dict[str, Any], problems: list[str]) -> None:
    assert _problems({"fleet": FLEET, **values}) == problems


def test_all_faults_are_told_at_once() -> None:
    assert _problems({"logg": {}, "prefill": {"attempts": 0}}) == [
        "fleet: required",
        "prefill.attempts: Input should be greater than or equal to 1",
        "logg: unknown key; did you mean 'log'?",
    ]


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://h:1/", "http://h:1"),
        ("HTTPS://Host.Example:443/", "https://host.example:443"),
        ("http://h", "http://h"),
        ("http://h:", "http://h"),
        ("http://[2001:DB8::1]:8000", "http://[2001:db8::1]:8000"),
        ("http://my_pod-0.svc.local.:8000", "http://my_pod-0.svc.local.:8000"),
    ],
)
def test_engine_urls(url: str, kept: str) -> None:
    assert config.build({"fleet": {"decode": [{"url": url}]}}).fleet.decode[0].url == kept


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "h",
        "//h:1",
        "ftp://h:1",
        "http://",
        "http://:8000",
        "http://h:0",
        "http://h:65536",
        "http://h:x",
        "http://h:1/v1",
        "http://h:1//",
        "http://h:1?a=b",
        "http://h:1#a",
        "http://u:p@h:1",
        "http://@h:1",
        "http://a b:1",
        "http://h:1 ",
        "http://h:1\n",
        "http://[::1",
        "http://[zz]:1",
        "http://::1:80",
        "http://h,i:1",
    ],
)
def test_bad_engine_urls_are_refused_with_an_example(url: str) -> None:
    [problem] = _problems({"fleet": {"decode": [{"url": url}]}})

    assert problem.startswith("fleet.decode[0].url: expected a URL like http://host:port")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0.0.0.0:9002", ("0.0.0.0", 9002)),
        ("localhost:0", ("localhost", 0)),
        ("[::]:9002", ("::", 9002)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
    ],
)
def test_listen_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_listen(text) == parts
    assert config.build({"fleet": FLEET, "grpc": {"listen": text}}).grpc.listen == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":9002",
        "9002",
        "h",
        "h:",
        "h:x",
        "h:-1",
        "h:65536",
        "h:²",
        "h: 1",
        "a b:1",
        "[::1]",
        "[zz]:1",
        "[h]:1",
        "[]:1",
        "unix:/x",
    ],
)
def test_bad_listen_addresses_are_refused_with_an_example(text: str) -> None:
    assert _problems({"fleet": FLEET, "grpc": {"listen": text}}) == [
        "grpc.listen: expected host:port, like 0.0.0.0:9002 or [::]:9002"
    ]


@pytest.mark.parametrize("text", ["::1:9002", ":::9002", "2001:db8::1:9002"])
def test_an_ipv6_listen_address_needs_brackets(text: str) -> None:
    assert _problems({"fleet": FLEET, "grpc": {"listen": text}}) == [
        "grpc.listen: an IPv6 address needs brackets, like [::]:9002"
    ]


@pytest.mark.parametrize(("text"), ["", "foo", "foo:", "foo:65536", "::1:9002", "http://foo:9002", ":9002"])
def test_the_address_of_the_service_has_a_host_and_a_port(text: str) -> None:
    assert _problems({"fleet": FLEET, "envoy": {"extproc": text}}) == [
        "envoy.extproc: expected host:port, like 127.0.0.1:9002 or [::1]:9002"
    ]


@pytest.mark.parametrize("text", ["8.8.8.8", "8.8.8.8:0", "dns.test:53", "2001:db8::1:53", "[2001:db8::1]", ""])
def test_dns_servers_are_addresses_with_ports(text: str) -> None:
    dns = {"dns": [{"role": "decode", "name": "d.local"}], "dns_servers": ["10.0.0.10:53", "[fd00::10]:53", text]}

    assert _problems({"fleet": dns}) == [
        "fleet.dns_servers[2]: expected address:port, like 10.0.0.10:53 or [fd00::10]:53"
    ]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("http://otel-collector:4317", "http://otel-collector:4317"),
        ("https://otel.example/", "https://otel.example"),
        ("http://[::1]:4317", "http://[::1]:4317"),
        ("otel-collector:4317", "otel-collector:4317"),
    ],
)
def test_addresses_of_a_trace_collector(text: str, kept: str) -> None:
    assert config.build({"fleet": FLEET, "tracing": {"endpoint": text}}).tracing.endpoint == kept


@pytest.mark.parametrize(
    "text", ["h:0", "", "http://[::1", "collector", "http://", "ftp://c:1", "http://c:4317/v1/traces"]
)
def test_bad_addresses_of_a_trace_collector_are_refused_by_name(text: str) -> None:
    [problem] = _problems({"fleet": FLEET, "tracing": {"endpoint": text}})

    assert problem.startswith("tracing.endpoint: expected ")


# ── engines listed twice ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("engines", "twice"),
    [
        ([{"url": "http://d:1"}, {"url": "http://d:1"}], "d:1"),
        ([{"url": "http://d:1"}, {"url": "http://D:1/"}], "d:1"),
        ([{"url": "http://d"}, {"url": "http://d:80"}], "d:80"),
        ([{"url": "https://d"}, {"url": "https://d:443"}], "d:443"),
        ([{"url": "http://d:1"}, {"url": "https://d:1"}], "d:1"),
        ([{"url": "http://d:1", "name": "a"}, {"url": "http://d:1", "name": "b"}], "d:1"),
        ([{"url": "http://d:1", "name": "a"}, {"url": "http://d:2", "name": "a"}], "a"),
        ([{"url": "http://d:1", "name": "d:2"}, {"url": "http://d:2"}], "d:2"),
    ],
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_is_listed_once(role: str, engines: list[dict[str, str]], twice: str) -> None:
    assert _problems({"fleet": {**FLEET, role: engines}}) == [f"fleet: {role}: {twice} is listed twice"]


def test_an_engine_may_have_both_roles() -> None:
    settings = config.build({"fleet": {**FLEET, "prefill": [{"url": "http://d:1", "name": "d:1"}]}})

    assert settings.fleet.prefill[0].endpoint == settings.fleet.decode[0].endpoint == "d:1"


# ── numbers without measure ──────────────────────────────────────────────────────────────────────────────────────────


def _numbers(model: type[BaseModel], *path: str) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _numbers(field.annotation, *path, name)
        elif field.annotation in (int, float):
            yield (*path, name)


@pytest.mark.parametrize("path", list(_numbers(config.Config)), ids=".".join)
def test_a_number_that_is_accepted_can_be_used_in_a_bootstrap(path: tuple[str, ...]) -> None:
    for number in (1e300, 10**30):
        values: dict[str, Any] = {"fleet": {**FLEET}}
        section = values
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = number
        refused = ""
        try:
            settings = config.build(values, source="f")
        except ConfigError as error:
            refused = str(error)
        assert refused.startswith(f"f: {'.'.join(path)}: ") if refused else render(settings)


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "where", "expected"),
    [
        ("EXTPROC_PREFILL__TIMEOUT_S", "3", "prefill.timeout_s", 3.0),
        ("extproc_prefill__timeout_s", "3", "prefill.timeout_s", 3.0),
        ("EXTPROC_PREFILL__FALLBACK__MAX_CONCURRENT", "9", "prefill.fallback.max_concurrent", 9),
        ("EXTPROC_GRPC__LISTEN", "[::]:1", "grpc.listen", "[::]:1"),
        ("EXTPROC_ADMIN__LISTEN", "null", "admin.listen", None),
        ("EXTPROC_LOG", '{"level": "debug"}', "log.level", "debug"),
        ("EXTPROC_ROUTING__PATHS", '["/a"]', "routing.paths", ["/a"]),
        ("EXTPROC_ENVOY__FAIL_OPEN", "false", "envoy.fail_open", False),
    ],
)
def test_the_environment_wins_over_the_file(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, where: str, expected: object
) -> None:
    monkeypatch.setenv(name, value)
    file = {"prefill": {"timeout_s": 7, "attempts": 4, "fallback": {"max_body_bytes": 5}}, "log": {"format": "json"}}

    found: Any = config.build({"fleet": FLEET, **file})
    for part in where.split("."):
        found = getattr(found, part)
    assert found == expected

    settings = config.build({"fleet": FLEET, **file})
    assert (settings.prefill.attempts, settings.prefill.fallback.max_body_bytes) == (4, 5)
    assert settings.log.format == "json"


def test_the_environment_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTPROC_FLEET__DECODE", '[{"url": "http://e:1", "api_key": "k"}]')
    monkeypatch.setenv("EXTPROC_FLEET__API_KEY", "123")

    fleet = config.build({}).fleet

    assert [engine.url for engine in fleet.decode] == ["http://e:1"]
    assert fleet.api_key is not None
    assert fleet.api_key.get_secret_value() == "123"


@pytest.mark.parametrize("name", ["EXTPROC_FLEET__API_KEY", "EXTPROC_LOG__FORMAT", "EXTPROC_FLEET"])
def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    settings = config.build({"fleet": {**FLEET, "api_key": "file"}, "log": {"format": "json"}})
    assert settings.fleet.api_key is not None
    assert (settings.fleet.api_key.get_secret_value(), settings.log.format) == ("file", "json")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (
            "EXTPROC_PREFIL__TIMEOUT_S",
            "3",
            "environment variable EXTPROC_PREFIL__TIMEOUT_S: there is no section 'prefil'",
        ),
        (
            "extproc_prefil__timeout_s",
            "3",
            "environment variable extproc_prefil__timeout_s: there is no section 'prefil'",
        ),
        (
            "EXTPROC_PREFILL__TIMEOUTS",
            "3",
            "environment variable EXTPROC_PREFILL__TIMEOUTS: prefill.timeouts: unknown key; did you mean 'timeout_s'?",
        ),
        (
            "extproc_prefill__attempts",
            "two",
            "environment variable extproc_prefill__attempts: "
            "prefill.attempts: Input should be a valid integer, unable to parse string as an integer",
        ),
        (
            "EXTPROC_FLEET__PREFILL__0__URL",
            "http://p:1",
            "f: fleet.prefill: Input should be a valid list (with EXTPROC_FLEET__PREFILL__0__URL from the environment)",
        ),
        (
            "EXTPROC_FLEET__DECODE",
            '[{"name": "d"}]',
            "environment variable EXTPROC_FLEET__DECODE: fleet.decode[0].url: required",
        ),
        (
            "EXTPROC_PREFILL",
            '{"attempts": 0}',
            "environment variable EXTPROC_PREFILL: prefill.attempts: Input should be greater than or equal to 1",
        ),
        (
            "EXTPROC_GRPC__TLS__CERTIFICATE",
            "/c.pem",
            "f: grpc.tls.key: required (with EXTPROC_GRPC__TLS__CERTIFICATE from the environment)",
        ),
        ("EXTPROC_ROUTING__PATHS", "/a", "environment variable EXTPROC_ROUTING__PATHS: expected JSON"),
        (
            "EXTPROC_FLEET__DECODE",
            "http://d:1",
            'environment variable EXTPROC_FLEET__DECODE: expected JSON, like [{"url": "http://host:port"}]',
        ),
        ("EXTPROC_LOG", "debug", 'environment variable EXTPROC_LOG: expected JSON, like {"key": "value"}'),
    ],
)
def test_faults_in_the_environment_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        config.build({"fleet": FLEET}, source="f")
    assert str(error.value) == problem


def test_faults_of_the_file_are_not_blamed_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where a variable sets something else in the same section; nor the other way round."""
    monkeypatch.setenv("EXTPROC_PREFILL", '{"timeout_s": 3, "fallback": {"max_concurrent": 1}}')
    monkeypatch.setenv("EXTPROC_PREFILL__ADMISSION__QUEUE", "-1")
    monkeypatch.setenv("EXTPROC_LOG__LEVEL", "")
    file = {"prefill": {"attempts": 0, "fallback": {"max_body_bytes": -1}}, "log": {"level": "loud"}}
    with pytest.raises(ConfigError) as error:
        config.build({"fleet": FLEET, **file}, source="f")
    assert [line.partition(": Input")[0] for line in str(error.value).split("\n")] == [
        "f: prefill.attempts",
        "f: prefill.fallback.max_body_bytes",
        "environment variable EXTPROC_PREFILL__ADMISSION__QUEUE: prefill.admission.queue",
        "f: log.level",
    ]


def test_what_kubernetes_puts_there_for_a_service_of_that_name_is_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "tcp://10.96.0.7:9002"
    for name, value in {
        "EXTPROC_SERVICE_HOST": "10.96.0.7",
        "EXTPROC_SERVICE_PORT": "9002",
        "EXTPROC_SERVICE_PORT_GRPC": "9002",
        "EXTPROC_PORT": address,
        "EXTPROC_PORT_9002_TCP": address,
        "EXTPROC_PORT_9002_TCP_PROTO": "tcp",
        "EXTPROC_PORT_9002_TCP_PORT": "9002",
        "EXTPROC_PORT_9002_TCP_ADDR": "10.96.0.7",
        "EXTPROC_ADMIN_SERVICE_HOST": "10.96.0.8",
        "EXTPROC_ADMIN_PORT": address,
        "EXTPROC_GRPC_PORT_9002_TCP": address,
    }.items():
        monkeypatch.setenv(name, value)

    assert config.build({"fleet": FLEET}) == config.Config(fleet=configsections.Fleet.model_validate(FLEET))


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _keys(settings: config.Config) -> list[str | None]:
    """All that there are: the fleet's, a prefiller's, a decoder's, a DNS entry's, and that of tickets."""
    fleet = settings.fleet
    owners = (fleet, fleet.prefill[0], fleet.decode[0], fleet.dns[0])
    keys = [*(owner.api_key for owner in owners), settings.release.ticket_key]
    return [key.get_secret_value() if key else None for key in keys]


def _with_key(key: str) -> dict[str, Any]:
    return {
        "fleet": {
            "api_key": key,
            "prefill": [{"url": "http://p:1", "api_key": key}],
            "decode": [{"url": "http://d:1", "api_key": key}],
            "dns": [{"role": "decode", "name": "d.local", "api_key": key}],
        },
        "release": {"ticket_key": key},
    }


@pytest.mark.parametrize("key", [f"{SECRET}\n", f" {SECRET}\r\n", f"\t{SECRET} "])
def test_keys_come_from_files_that_end_in_a_newline(key: str) -> None:
    assert _keys(config.build(_with_key(key))) == [SECRET] * 5


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "must not be empty; leave the key out, or write null"),
        (" \n", "must not be empty; leave the key out, or write null"),
        (f"{SECRET}\nmore", "expected printable ASCII characters on one line"),
        (f"{SECRET}\0more", "expected printable ASCII characters on one line"),
        (f"{SECRET}-schlüssel", "expected printable ASCII characters on one line"),
        (f"{SECRET}\ud800", "expected printable ASCII characters on one line"),
    ],
)
def test_keys_that_no_header_can_carry_are_refused_by_name(key: str, problem: str) -> None:
    where = ("fleet.prefill[0].api_key", "fleet.decode[0].api_key", "fleet.api_key", "fleet.dns[0].api_key")

    problems = _problems(_with_key(key))

    assert sorted(problems) == sorted(f"{name}: {problem}" for name in (*where, "release.ticket_key"))


def test_secrets_are_in_no_printed_form() -> None:
    settings = config.build(_with_key(SECRET))

    for part in (settings, settings.fleet, settings.fleet.prefill[0], settings.release):
        for text in (repr(part), str(part), f"{part}", part.model_dump_json(), repr(part.model_dump())):
            assert SECRET not in text
    assert settings.fleet.decode[0].api_key is not None
    assert settings.fleet.decode[0].api_key.get_secret_value() == SECRET
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    "text",
    [
        f"fleet:\n  api_key: {SECRET}: more\n",
        f"fleet:\n  api_key: {SECRET}\n tls: 1\n",
        f"fleet: {{api_key: {SECRET}, decode: [\n",
        f"fleet:\n\tapi_key: {SECRET}\n",
        f"fleet: {{api_key: *{SECRET}}}\n",
        f"fleet: {{api_key: !{SECRET} x}}\n",
        f"fleet: {{api_key: !!int {SECRET}}}\n",
        f"fleet: {{api_key: !!timestamp {SECRET}}}\n",
        f"fleet: {{api_key: [{SECRET}], decode: []}}\n",
        f"fleet: {{api_key: {{{SECRET}: 1}}, decode: []}}\n",
        f"fleet: {{decode: [{{url: 'http://user:{SECRET}@h:1'}}]}}\n",
        f"fleet: {{decode: [{{url: 'http://h:1/{SECRET}'}}]}}\n",
        f"fleet: {{decode: [{{url: 'http://h:1', api_key: 5, name: {SECRET}}}]}}\n",
        f"release: {{ticket_key: [{SECRET}]}}\nfleet: {{}}\n",
        f"prefill: {{timeout_s: {SECRET}, on_failure: {SECRET}}}\nfleet: {{}}\n",
        SECRET,
    ],
)
def test_no_error_shows_a_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.load(_file(tmp_path, text))

    shown: BaseException | None = error.value
    while shown is not None:  # what a traceback would print
        assert SECRET not in str(shown)
        shown = None if shown.__suppress_context__ else shown.__cause__ or shown.__context__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EXTPROC_FLEET__DECODE", f'[{{"url": "http://e:1", "api_key": "{SECRET}}}]'),
        ("EXTPROC_FLEET", SECRET),
        ("EXTPROC_PREFILL__TIMEOUT_S", SECRET),
        ("EXTPROC_RELEASE__TICKET_KEYS", SECRET),
        ("EXTPROC_NOTHING__KEY", SECRET),
    ],
)
def test_no_error_shows_a_value_of_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError) as error:
        config.build({"fleet": FLEET})

    shown: BaseException | None = error.value
    while shown is not None:
        assert SECRET not in str(shown)
        shown = None if shown.__suppress_context__ else shown.__cause__ or shown.__context__


def test_the_errors_of_a_watched_fleet_file() -> None:
    with pytest.raises(ValidationError) as error:
        configsections.EngineLists.model_validate({"prefill": [{"urll": SECRET}], "decod": []})

    assert config.explain(error.value) == [
        "prefill[0].url: required",
        "prefill[0].urll: unknown key; did you mean 'url'?",
        "decod: unknown key; did you mean 'decode'?",
    ]


# ── what follows from it ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["X-Api-Key", "x-api-key"])
def test_headers_are_compared_in_lower_case(name: str) -> None:
    settings = config.build({"fleet": FLEET, "prefill": {"admission": {"fair_by": name}}})

    assert settings.prefill.admission.fair_by == "x-api-key"


@pytest.mark.parametrize("name", ["", "a b", "a:", "ä", "a\n"])
def test_what_is_no_header_is_refused(name: str) -> None:
    assert _problems({"fleet": FLEET, "prefill": {"admission": {"fair_by": name}}}) == [
        "prefill.admission.fair_by: expected the name of a header, like x-api-key"
    ]


def test_the_time_that_a_prefill_may_take_in_all() -> None:
    settings = config.build(
        {"fleet": FLEET, "prefill": {"timeout_s": 5, "attempts": 3, "admission": {"max_wait_s": 2}}}
    )

    assert settings.prefill.budget_s == 17.0


def test_a_dump_can_be_loaded_again() -> None:
    settings = config.build({"fleet": FLEET, "prefill": {"timeout_s": 5}})

    assert config.build(json.loads(settings.model_dump_json())) == settings
