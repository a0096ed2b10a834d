"""The admin port of a running service."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import ANY

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from extproc import __version__
from extproc.admin import page_policy, serving
from extproc.config import build
from extproc.configsections import Admin
from extproc.errors import ConfigError
from extproc.server import Server
from tests.grpc.stand import JSON, Stand, through
from tests.support.engines import Answer, RecordedRequest, answer_prefill
from tests.support.gateway import CHAT, CHAT_BODY, until, until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOST: Final = "127.0.0.1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing() -> AsyncIterator[Stand]:
    async with Stand.standing() as stand:
        yield stand


@pytest_asyncio.fixture(loop_scope="module")
async def stand(standing: Stand) -> AsyncIterator[Stand]:
    await standing.reset()
    yield standing
    await standing.settled()


@pytest_asyncio.fixture(loop_scope="module")
async def admin(stand: Stand) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stand.admin_url, trust_env=False, timeout=30) as client:
        yield client


def _values(**sections: Any) -> dict[str, Any]:
    """A service that ends at once."""
    listen = {"listen": f"{HOST}:0"}
    fleet = {"decode": [{"url": "http://127.0.0.1:9", "name": "decode-1"}], "health": {"interval_s": 3600}}
    values = {"fleet": fleet, "grpc": listen, "admin": listen, "life": {"notice_s": 0, "drain_s": 1}}
    return values | sections


# ── health and readiness ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_service_that_runs_is_healthy_and_ready(admin: httpx.AsyncClient) -> None:
    for path, text in (("/healthz", "ok\n"), ("/readyz", "ready\n")):
        answer = await admin.get(path)
        assert (answer.status_code, answer.text) == (200, text)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("fleet", "reason"),
    [
        ({"decode": [{"url": "http://no.such.name.invalid:80"}]}, "no decode engine has an address"),
        (
            {
                "decode": [{"url": "http://127.0.0.1:9"}],
                "prefill": [{"url": "http://no.such.name.invalid:80"}],
            },
            "no prefill engine has an address",
        ),
    ],
)
async def test_why_a_service_is_not_ready(fleet: Mapping[str, Any], reason: str) -> None:
    async with Server(build(_values(fleet=fleet))) as server, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://{HOST}:{server.admin_port}/readyz")
        assert (answer.status_code, answer.text) == (503, f"{reason}\n")
        assert (await client.get(f"http://{HOST}:{server.admin_port}/healthz")).status_code == 200


async def test_a_service_that_drains_is_healthy_and_not_ready() -> None:
    async with Stand.standing({"life": {"notice_s": 0, "drain_s": 30}}, prefill=1, decode=1) as stand:
        going_on = asyncio.Event()

        async def held(request: RecordedRequest) -> Answer:
            await going_on.wait()
            return answer_prefill(request)

        stand.prefillers[0].respond = held
        async with stand.envoy("BUFFERED") as envoy:
            running = asyncio.create_task(through(envoy))
            await stand.prefillers[0].wait_for(1)
            assert stand.server is not None
            leaving = asyncio.create_task(stand.server.__aexit__(None, None, None))
            await until(lambda: stand.server is not None and stand.server.why_not_ready() is not None)
            answer = await stand.client.get(f"{stand.admin_url}/readyz")
            assert (answer.status_code, answer.text) == (503, "draining\n")
            assert (await stand.client.get(f"{stand.admin_url}/healthz")).status_code == 200
            going_on.set()
            await running
            await leaving
        with pytest.raises(httpx.ConnectError):
            await stand.client.get(f"{stand.admin_url}/healthz")


# ── what it tells ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_metrics_are_prometheus_text(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.labels
    }
    assert samples["extproc_ready"] == 1


async def test_the_fleet(admin: httpx.AsyncClient, stand: Stand) -> None:
    answer = await admin.get("/fleet")
    assert answer.headers["cache-control"] == "no-store"
    told = answer.json()
    assert {key: told[key] for key in ("version", "in_flight", "releases")} == {
        "version": __version__,
        "in_flight": 0,
        "releases": {
            "requested": 0,
            "pending": 0,
            "left_to_timer": 0,
            "released": 0,
            "refused": 0,
            "timed_out": 0,
            "dropped": 0,
        },
    }
    assert told["sources"] == [{"source": "configuration", "engines": 4, "problem": None}]
    engines = [("prefill", engine) for engine in stand.prefillers] + [("decode", engine) for engine in stand.decoders]
    assert [(told["name"], told["role"], told["endpoint"]) for told in told["engines"]] == [
        (f"{role}-{number % 2 + 1}", role, engine.endpoint) for number, (role, engine) in enumerate(engines)
    ]
    assert told["engines"][0] == {
        "name": "prefill-1",
        "role": "prefill",
        "url": stand.prefillers[0].url,
        "endpoint": stand.prefillers[0].endpoint,
        "connector": "nixl",
        "group": None,
        "models": ANY,  # known once it has been probed
        "state": "ready",
        "reason": None,
        "inflight": 0,
        "handoffs": 0,
        "reserved_tokens": 0,
        "picked": ANY,
    } | {key: ANY for key in ("waiting", "running", "kv_usage") if key in told["engines"][0]}


async def test_an_engines_load_is_shown_while_its_report_is_fresh(stand: Stand, admin: httpx.AsyncClient) -> None:
    assert stand.server is not None
    (engine, _) = stand.server.service.fleet.engines("decode")
    engine.report.waiting, engine.report.running, engine.report.kv_usage = 2, 5, 0.12345
    engine.report.at = time.monotonic() + 3600  # newer than any that comes in meanwhile
    told = (await admin.get("/fleet")).json()["engines"][2]
    assert (told["waiting"], told["running"], told["kv_usage"]) == (2, 5, 0.1235)
    engine.report.at = time.monotonic() - 3600
    told = (await admin.get("/fleet")).json()["engines"][2]
    assert not told.keys() & {"waiting", "running", "kv_usage"}


async def test_what_is_wrong_with_an_engine_is_told(stand: Stand, admin: httpx.AsyncClient) -> None:
    assert stand.server is not None
    (engine, _) = stand.server.service.fleet.engines("prefill")
    engine.health.probed_ok, engine.health.reason = False, "status 503"
    told = (await admin.get("/fleet")).json()["engines"][0]
    assert (told["state"], told["reason"]) == ("unhealthy", "status 503")
    engine.health.probed_ok = True


@pytest.mark.parametrize(("query", "count"), [("", 4), ("?limit=2", 2), ("?limit=0", 0), ("?limit=99999", 4)])
async def test_exchanges_newest_first(stand: Stand, query: str, count: int) -> None:
    assert stand.server is not None
    stand.server.service.recent._records.clear()
    names = [f"{query}-{number}" for number in range(4)]
    async with stand.envoy("BUFFERED") as envoy:
        for name in names:
            await through(envoy, headers=[*JSON, ("x-request-id", name)])
    answer = await stand.client.get(f"{stand.admin_url}/exchanges{query}")
    told = answer.json()
    assert [record["client_request_id"] for record in told["exchanges"]] == names[::-1][:count]
    assert abs(told["now"] - time.time()) < 30


@pytest.mark.parametrize("limit", ["", "-1", "x", "%C2%B2", "1e3", "1" * 10])
async def test_a_limit_that_is_no_number_is_refused(admin: httpx.AsyncClient, limit: str) -> None:
    answer = await admin.get(f"/exchanges?limit={limit}")
    assert (answer.status_code, answer.text) == (400, "limit: expected a number\n")


async def test_what_is_not_there(admin: httpx.AsyncClient) -> None:
    assert (await admin.get("/nothing")).status_code == 404
    assert (await admin.get("/../extproc.yaml")).status_code == 404


# ── draining engines ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_drained_engine_gets_no_new_requests(stand: Stand, admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/fleet/prefill-1/drain")
    assert (answer.status_code, answer.text) == (200, "prefill-1: drained\n")
    states = {engine["name"]: engine["state"] for engine in (await admin.get("/fleet")).json()["engines"]}
    assert states == {"prefill-1": "draining", "prefill-2": "ready", "decode-1": "ready", "decode-2": "ready"}
    async with stand.envoy("BUFFERED") as envoy:
        for _ in range(4):
            await through(envoy)
        assert [len(engine.requests) for engine in stand.prefillers] == [0, 4]
        for _ in range(2):  # once is enough
            answer = await admin.post("/fleet/prefill-1/undrain")
            assert (answer.status_code, answer.text) == (200, "prefill-1: undrained\n")
        for _ in range(4):
            await through(envoy)
    back, other = (len(engine.requests) for engine in stand.prefillers)
    assert back > 0
    assert back + other == 8


async def test_a_drain_tells_what_is_left_and_can_be_waited_for() -> None:
    """Running prefills, and then what was handed over: an engine that is stopped before loses those requests."""
    async with Stand.standing({"life": {"notice_s": 0, "drain_s": 30}}, prefill=1, decode=1) as stand:
        going_on = asyncio.Event()

        async def held(request: RecordedRequest) -> Answer:
            await going_on.wait()
            return answer_prefill(request)

        stand.prefillers[0].respond = held
        url = f"{stand.admin_url}/fleet/prefill-1/drain"

        async def drained(query: str = "") -> tuple[int, str]:
            answer = await stand.client.post(url + query)
            return answer.status_code, answer.text

        async with stand.envoy("BUFFERED") as envoy:
            asking = asyncio.create_task(envoy.request("POST", CHAT, JSON, CHAT_BODY))
            await stand.prefillers[0].wait_for(1)
            busy = "prefill-1: draining, 1 running, 0 handed over to requests that have not ended\n"
            assert await drained() == (200, busy)
            assert await drained("?wait_s=1") == (503, busy)
            waiting = asyncio.create_task(drained("?wait_s=30"))
            going_on.set()
            exchange = await asking
            await exchange.response(200)
            handed_over = "prefill-1: draining, 0 running, 1 handed over to requests that have not ended\n"
            assert await drained() == (200, handed_over)
            (engine, _) = (await stand.client.get(f"{stand.admin_url}/fleet")).json()["engines"]
            assert (engine["inflight"], engine["handoffs"]) == (0, 1)
            assert not waiting.done()
            await exchange.finish()
            assert await waiting == (200, "prefill-1: drained\n")
            assert await drained() == (200, "prefill-1: drained\n")


@pytest.mark.parametrize("wait", ["", "x", "-1", "1.5", "123456"])
async def test_a_wait_that_is_no_number_drains_nothing(stand: Stand, admin: httpx.AsyncClient, wait: str) -> None:
    answer = await admin.post(f"/fleet/prefill-1/drain?wait_s={wait}")
    assert (answer.status_code, answer.text) == (400, "wait_s: expected a number of seconds\n")
    assert stand.server is not None
    assert not any(engine.draining for engine in stand.server.service.fleet.engines())


async def test_why_a_source_of_engines_is_not_in_force(tmp_path: Path) -> None:
    """In /fleet and in the metrics, from the moment on that it fails until it is mended."""
    file = tmp_path / "fleet.yaml"
    file.write_text("decode: [{url: 'http://127.0.0.1:10', name: decode-2}]")
    values = _values()
    values["fleet"]["file"] = str(file)
    async with Server(build(values)) as server, httpx.AsyncClient(trust_env=False) as client:
        admin = f"http://{HOST}:{server.admin_port}"

        async def sources() -> dict[str, tuple[int, str | None]]:
            listed = (await client.get(f"{admin}/fleet")).json()["sources"]
            return {source["source"]: (source["engines"], source["problem"]) for source in listed}

        async def counted() -> dict[str, float]:
            text = (await client.get(f"{admin}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            return {s.labels["state"]: s.value for s in samples if s.name == "extproc_fleet_sources"}

        async def becomes(problem: str | None) -> None:
            async def is_so() -> bool:
                return await sources() == {"configuration": (1, None), f"file {file}": (1, problem)}

            await until_async(is_so)

        await becomes(None)
        assert await counted() == {"ok": 2, "failing": 0}
        good = file.read_text()
        for text, problem in (
            ("decode: [{url: nonsense}]", "decode[0].url: expected a URL like http://host:port"),
            (good, None),
            ("decode: [", "not YAML: line 1, column 10: expected the node content, but found '<stream end>'"),
        ):
            file.write_text(text)
            await becomes(problem)
            assert await counted() == ({"ok": 2, "failing": 0} if problem is None else {"ok": 1, "failing": 1})
            assert [engine.name for engine in server.service.fleet.engines()] == ["decode-1", "decode-2"]
        file.write_text("decode: [{url: 'http://127.0.0.1:11', name: decode-3}]")
        await becomes(None)


async def test_drain_needs_an_engine_and_an_action(admin: httpx.AsyncClient) -> None:
    answer = await admin.post("/fleet/prefill-9/drain")
    assert (answer.status_code, answer.text) == (404, "there is no engine called 'prefill-9'\n")
    answer = await admin.post("/fleet/prefill-1/stop")
    assert (answer.status_code, answer.text) == (404, "use drain or undrain\n")
    assert (await admin.get("/fleet/prefill-1/drain")).status_code == 405


async def test_an_engines_name_may_be_anything() -> None:
    name = 'rack 7/ü "1" ?#&%'
    values = _values()
    values["fleet"]["decode"].append({"url": "http://127.0.0.1:10", "name": name})
    async with Server(build(values)) as server, httpx.AsyncClient(trust_env=False) as client:
        base = f"http://{HOST}:{server.admin_port}/fleet"
        quoted = "rack%207%2F%C3%BC%20%221%22%20%3F%23%26%25"
        assert (await client.post(f"{base}/{quoted}/drain")).text == f"{name}: drained\n"
        states = {engine["name"]: engine["state"] for engine in (await client.get(base)).json()["engines"]}
    assert states == {"decode-1": "ready", name: "draining"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),  # curl
        ({"origin": "http://127.0.0.1:{port}"}, 200),
        ({"origin": "http://localhost:{port}", "host": "localhost:{port}"}, 200),
        ({"origin": "http://[::1]:{port}", "host": "[::1]:{port}"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://[", "host": "["}, 403),
        ({"origin": "http://evil.example:{port}", "host": "evil.example:{port}"}, 403),  # DNS rebinding
    ],
)
async def test_web_pages_cannot_drain_engines(
    stand: Stand, admin: httpx.AsyncClient, headers: Mapping[str, str], status: int
) -> None:
    assert stand.server is not None
    headers = {name: value.replace("{port}", str(stand.server.admin_port)) for name, value in headers.items()}
    assert (await admin.post("/fleet/decode-2/drain", headers=headers)).status_code == status
    states = {engine["name"]: engine["state"] for engine in (await admin.get("/fleet")).json()["engines"]}
    assert states["decode-2"] == ("draining" if status == 200 else "ready")
    await admin.post("/fleet/decode-2/undrain")


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_page_may_run_its_own_script_alone(admin: httpx.AsyncClient) -> None:
    """How a browser takes it: tests/browser."""
    answer = await admin.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert re.findall(r"""(?:src|href)=["'](?!data:)|url\(|@import|\son\w+=|\sstyle=""", answer.text) == []


async def test_a_page_with_several_scripts_has_no_policy() -> None:
    with pytest.raises(ValueError, match="too many"):
        page_policy("<script>1</script><script>2</script><style></style>")


# ── listening ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_by_default_it_is_for_this_machine_alone() -> None:
    assert Admin().listen == "127.0.0.1:9003"


async def test_a_taken_address_is_the_configurations_fault() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        address = f"{HOST}:{taken.getsockname()[1]}"
        problem = rf"^admin\.listen: {re.escape(address)} cannot be bound: Address already in use$"
        with pytest.raises(ConfigError, match=problem):
            async with Server(build(_values(admin={"listen": address}))):
                pass


async def test_a_host_that_is_not_here_is_the_configurations_fault() -> None:
    for host, reason in (
        ("no.such.host.invalid", "Name or service not known"),
        ("192.0.2.1", "Cannot assign requested"),
    ):
        with pytest.raises(ConfigError, match=rf"^admin\.listen: {re.escape(host)}:9003 cannot be bound: {reason}"):
            async with serving(None, f"{host}:9003"):
                pass


async def test_it_listens_on_ipv6_too() -> None:
    async with Server(build(_values(admin={"listen": "[::1]:0"}))) as server, httpx.AsyncClient() as client:
        assert (await client.get(f"http://[::1]:{server.admin_port}/healthz")).text == "ok\n"


async def test_it_can_be_turned_off() -> None:
    async with Server(build(_values(admin={"listen": None}))) as server:
        assert server.admin_port == 0
