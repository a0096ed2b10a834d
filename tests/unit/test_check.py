"""``extproc check`` against simulated engines, a running service and the real Envoy: each planted mistake is found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
import yaml

from extproc.bootstrap import render
from extproc.check import run
from extproc.check.findings import Finding, Findings
from extproc.check.run import check
from extproc.config import build
from extproc.processes import EnvoyProcess, envoy_process, free_port
from extproc.server import Server
from extproc.sim.config import SimConfig
from extproc.sim.server import SimEngine
from extproc.vllm_plugin.leases import Leases
from extproc.vllm_plugin.listener import AbortListener
from tests.support.certificates import issued
from tests.support.engines import Answer, RecordedRequest, StubEngine
from tests.support.gateway import until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

HOST: Final = "127.0.0.1"
KEY: Final = "sk-engine-secret"

Settings = Mapping[str, Any]
Change = Callable[[dict[str, Any]], None]


class Site:
    """Two prefillers and two decoders, the service, and an Envoy with the bootstrap that fits: all as it should be."""

    def __init__(self) -> None:
        self.prefillers: list[SimEngine] = []
        self.decoders: list[SimEngine] = []
        self.server: Server
        self.envoy: EnvoyProcess

    @classmethod
    @contextlib.asynccontextmanager
    async def standing(cls) -> AsyncIterator[Site]:
        async with contextlib.AsyncExitStack() as stack:
            site = cls()
            for role, engines in (("prefill", site.prefillers), ("decode", site.decoders)):
                for _ in range(2):
                    config = SimConfig(role=role)  # type: ignore[arg-type]
                    engines.append(await stack.enter_async_context(SimEngine(config)))
            site.server = await stack.enter_async_context(Server(build(site.values())))
            site.envoy = await stack.enter_async_context(await site.envoy_with())
            yield site

    def values(self, **changes: Any) -> dict[str, Any]:
        """The configuration; each change is merged over its section."""
        grpc, admin = (getattr(getattr(self, "server", None), f"{name}_port", 0) for name in ("grpc", "admin"))
        envoy = getattr(self, "envoy", None)
        values: dict[str, Any] = {
            "grpc": {"listen": f"{HOST}:{grpc}"},
            "admin": {"listen": f"{HOST}:{admin}"},
            "fleet": {
                "prefill": [{"url": e.url, "name": f"prefill-{n}"} for n, e in enumerate(self.prefillers, 1)],
                "decode": [{"url": e.url, "name": f"decode-{n}"} for n, e in enumerate(self.decoders, 1)],
            },
            "release": {"ticket_key": "a secret"},
            "life": {"notice_s": 0, "drain_s": 5},
            "envoy": {
                "listen": f"{HOST}:0",
                "admin": envoy.admin_url.removeprefix("http://") if envoy else f"{HOST}:0",
                "extproc": f"{HOST}:{grpc}",
            },
        }
        for section, keys in changes.items():
            values[section] = {**values.get(section, {}), **keys}
        return values

    async def check(self, **changes: Any) -> Findings:
        return await check(build(self.values(**changes)))

    async def envoy_with(self, change: Change = lambda _: None) -> EnvoyProcess:
        """Not started yet: an Envoy whose bootstrap was changed."""
        values = self.values()
        values["envoy"]["admin"] = f"{HOST}:0"
        bootstrap = yaml.safe_load(await asyncio.to_thread(render, build(values)))
        change(bootstrap)
        text = yaml.safe_dump(bootstrap).replace("timeout: 1s", "timeout: 20s")  # a slow service is no dead one
        return envoy_process(text, concurrency=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site() -> AsyncIterator[Site]:
    async with Site.standing() as site:
        yield site


def codes(findings: Findings) -> dict[str, set[str]]:
    """Of everything that is not ok: code to subjects. What is wrong must come with what to do."""
    found: dict[str, set[str]] = {}
    for finding in findings:
        assert finding.subject
        assert finding.text
        if finding.level != "ok":
            assert finding.code
            assert finding.todo or finding.level == "note"
            found.setdefault(finding.code, set()).add(finding.subject)
    return found


def one(findings: Findings, code: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.code == code]
    return finding


# ── a right setup ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_nothing_is_wrong_where_nothing_is(site: Site) -> None:
    findings = await site.check()
    assert {finding.level for finding in findings} == {"ok"}
    texts = [(finding.subject, finding.text) for finding in findings]
    for number in (1, 2):
        assert (f"prefill-{number}", "prefill, version 0.32.0, serves tiny") in texts
        assert (f"prefill-{number}", "prefills, hands over, and releases when told to") in texts
        for other in (1, 2):
            assert (f"decode-{number}", f"takes over KV blocks from prefill-{other}") in texts
    assert ("envoy", "filter, access log, metadata, limits and decode cluster fit") in texts
    assert ("service", f"serving at {HOST}:{site.server.grpc_port}") in texts
    assert not findings.failed
    # It was a look, and leaves nothing behind.
    for engine in (*site.prefillers, *site.decoders):
        await engine.until(lambda engine=engine: not engine.pinned)  # type: ignore[misc]
        assert engine.state()["blocks"]["used"] == 0
        assert engine.state()["side_channel"]["alive"]


async def test_vllm_ascend_is_right_too() -> None:
    engines = {"connector": "mooncake-ascend", "tp": 2}
    async with (
        SimEngine(SimConfig(role="prefill", **engines)) as prefiller,  # type: ignore[arg-type]
        SimEngine(SimConfig(role="decode", **engines)) as decoder,  # type: ignore[arg-type]
    ):
        fleet = {"connector": "mooncake-ascend", "prefill": [{"url": prefiller.url}], "decode": [{"url": decoder.url}]}
        values = {"fleet": fleet, "envoy": {"admin": None}, "grpc": {"listen": f"{HOST}:{free_port()}"}}
        findings = await check(build(values))
        await prefiller.until(lambda: not prefiller.pinned)
    assert set(codes(findings)) == {"envoy_unknown", "service_down", "ticket_key"}  # notes, all of them
    assert {finding.level for finding in findings} == {"ok", "note"}


# ── engines ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _pair(prefill: Any, decode: Any, **fleet: Any) -> Findings:
    """A check of two engines and nothing else; of a URL, or of an entry of the configuration."""
    entries = {
        role: [{"name": role, **(entry if isinstance(entry, dict) else {"url": entry})}]
        for role, entry in (("prefill", prefill), ("decode", decode))
    }
    values = {
        "fleet": entries | fleet,
        "envoy": {"admin": None},
        "release": {"ticket_key": "a secret"},
        "grpc": {"listen": f"{HOST}:{free_port()}"},
    }
    findings = await check(build(values))
    for note in ("envoy_unknown", "service_down"):
        findings.remove(one(findings, note))
    return findings


async def test_an_engine_that_is_down(site: Site) -> None:
    gone = f"http://{HOST}:{free_port()}"
    findings = await _pair(site.prefillers[0].url, gone)
    assert codes(findings) == {"unreachable": {"decode"}, "no_pair": {"prefill"}}
    assert one(findings, "unreachable").text == f"{gone} does not answer: ConnectError"


async def test_a_name_that_does_not_resolve(site: Site) -> None:
    findings = await _pair(site.prefillers[0].url, "http://no.such.name.invalid:8000")
    assert codes(findings) == {"unresolved": {"decode"}, "no_pair": {"prefill"}}


async def test_an_api_key_that_is_wrong(site: Site) -> None:
    async with SimEngine(SimConfig(role="decode", api_key=KEY)) as decoder:
        for entry in ({"url": decoder.url}, {"url": decoder.url, "api_key": "sk-another"}):
            findings = await _pair(site.prefillers[0].url, entry)
            assert codes(findings) == {"unauthorized": {"decode"}, "no_pair": {"prefill"}}
        findings = await _pair(site.prefillers[0].url, {"url": decoder.url, "api_key": KEY})
        assert codes(findings) == {}
    assert KEY not in str(findings)


class Odd(StubEngine):
    """A recording engine of the simulated ones' model, whose GET answers can be chosen."""

    def __init__(self, role: Any = "decode", **probes: Answer) -> None:
        super().__init__(role, models=["tiny"])
        self._probe_answers = {"/" + path.replace("_", "/"): answer for path, answer in probes.items()}

    async def answer(self, request: RecordedRequest) -> Answer:
        if request.method == "GET" and request.target in self._probe_answers:
            return self._probe_answers[request.target]
        return await super().answer(request)


async def test_versions_that_differ(site: Site) -> None:
    async with Odd(version=Answer.json({"version": "0.21.0"})) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert "versions_differ" in codes(findings)
    assert one(findings, "versions_differ").text.endswith("decode 0.21.0, prefill 0.32.0")


async def test_an_engine_that_is_ill(site: Site) -> None:
    async with Odd(health=Answer(503)) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert codes(findings) == {"unhealthy": {"decode"}, "no_pair": {"prefill"}}


async def test_an_engine_whose_answer_has_no_end(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_TIMEOUT_S", 2.0)

    async def between(_: int) -> None:
        await asyncio.sleep(0.05)  # httpx has a limit for each piece alone

    async with Odd(health=Answer(events=[b"x"] * 1000, between_events=between)) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert codes(findings) == {"unreachable": {"decode"}, "no_pair": {"prefill"}}


DEEP: Final = Answer(body=b"[" * 100_000)


@pytest.mark.parametrize(
    "answer", [Answer(404), Answer(body=b"<html>"), Answer.json([]), Answer.json({"data": [1]}), DEEP]
)
async def test_a_server_that_is_no_vllm(site: Site, answer: Answer) -> None:
    async with Odd(v1_models=answer) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert codes(findings) == {"not_vllm": {"decode"}, "no_pair": {"prefill"}}


async def test_models_that_differ(site: Site) -> None:
    async with SimEngine(SimConfig(role="decode", model="other")) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert codes(findings) == {"no_common_model": {"fleet"}}
    async with (
        SimEngine(SimConfig(role="prefill", model="tiny,extra")) as prefiller,
        SimEngine(SimConfig(role="decode", model="tiny,extra")) as decoder,
    ):
        findings = await _pair({"url": prefiller.url, "models": ["tiny"]}, decoder.url)
        assert codes(findings) == {}
    one_more = Answer.json({"data": [{"id": "tiny"}, {"id": "extra"}]})
    async with Odd(v1_models=one_more) as decoder:
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert one(findings, "model_without_prefiller").level == "warning"  # it may be meant
    await _let_go(site)


async def test_models_that_an_engine_does_not_serve(site: Site) -> None:
    entry = {"url": site.prefillers[0].url, "models": ["tiny", "llama"]}
    findings = await _pair(entry, site.decoders[0].url)
    assert codes(findings) == {"models_wrong": {"prefill"}}
    assert one(findings, "models_wrong").text == "`models` says llama, which it does not serve"


async def test_groups_that_have_no_decoder(site: Site) -> None:
    findings = await _pair({"url": site.prefillers[0].url, "group": "a"}, {"url": site.decoders[0].url, "group": "b"})
    assert codes(findings) == {"no_pair": {"prefill"}}


async def test_a_fleet_with_too_many_pairs_to_try_each(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is tried once, all the same."""
    monkeypatch.setattr("extproc.check.handover._MAX_PAIRS", 3)
    findings = await site.check(envoy={"admin": None})
    assert codes(findings) == {"sampled": {"fleet"}, "envoy_unknown": {"envoy"}}
    assert one(findings, "sampled").text == "too many pairs to try each: 2 × 2"
    taken = [(finding.subject, finding.text) for finding in findings if "takes over" in finding.text]
    assert taken == [(f"decode-{n}", f"takes over KV blocks from prefill-{n}") for n in (1, 2)]


# ── the hand-over ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def _failing(engine: SimEngine, mode: str, **options: Any) -> AsyncIterator[None]:
    await engine.fail(mode, **options)
    try:
        yield
    finally:
        await engine.heal()


@pytest.mark.parametrize(
    ("mode", "options", "code"),
    [
        ("null_params", {}, "no_handoff"),  # vLLM without --kv-transfer-config
        ("no_params_key", {}, "no_handoff"),
        ("broken_json", {}, "bad_handoff"),
        ("status", {"status": 500}, "prefill_failed"),
        ("close_without_answer", {}, "prefill_failed"),
    ],
)
async def test_a_prefiller_that_does_not_hand_over(
    site: Site, mode: str, options: Mapping[str, Any], code: str
) -> None:
    async with _failing(site.prefillers[0], mode, **options, leg="prefill"):
        findings = await _pair(site.prefillers[0].url, site.decoders[0].url)
    assert codes(findings) == {code: {"prefill"}}


async def test_a_connector_that_is_another(site: Site) -> None:
    findings = await _pair(site.prefillers[0].url, site.decoders[0].url, connector="mooncake-ascend")
    assert codes(findings) == {"wrong_connector": {"prefill"}, "timer_only": {"prefill"}}
    assert one(findings, "wrong_connector").todo.startswith("set `connector: nixl`")
    assert site.prefillers[0].state()["side_channel"]["alive"]  # nothing was sent to a port of another kind

    ascend = {"connector": "mooncake-ascend"}
    async with (
        SimEngine(SimConfig(role="prefill", **ascend)) as prefiller,  # type: ignore[arg-type]
        SimEngine(SimConfig(role="decode", **ascend)) as decoder,  # type: ignore[arg-type]
    ):
        findings = await _pair(prefiller.url, decoder.url, connector="nixl")
    assert codes(findings)["wrong_connector"] == {"prefill"}
    assert one(findings, "wrong_connector").todo.startswith("set `connector: mooncake-ascend`")


async def test_a_connector_that_cannot_release(site: Site) -> None:
    findings = await _pair(site.prefillers[0].url, site.decoders[0].url, connector="timer")
    assert codes(findings) == {"timer_only": {"prefill"}}
    assert not findings.failed


def _params(**changes: Any) -> dict[str, Any]:
    told = {
        "do_remote_prefill": True,
        "remote_engine_id": "e1",
        "remote_block_ids": [[1]],
        "remote_request_id": "cmpl-1-0-0a1b2c3d",
        "remote_host": HOST,
        "remote_port": 0,
        "tp_size": 1,
    }
    return told | changes


def _telling(**params: Any) -> Odd:
    prefiller = Odd("prefill")
    prefiller.respond = lambda _: Answer.json({"choices": [], "kv_transfer_params": _params(**params)})
    return prefiller


async def test_push_mode(site: Site) -> None:
    port = site.prefillers[0].side_channel_port
    async with _telling(transfer_mode="push", remote_port=port) as prefiller, Odd() as decoder:
        findings = await _pair(prefiller.url, decoder.url)
    assert codes(findings)["push_mode"] == {"prefill"}


async def test_a_side_channel_that_is_closed(site: Site) -> None:
    port = free_port()
    async with _telling(remote_port=port) as prefiller, Odd() as decoder:
        findings = await _pair(prefiller.url, decoder.url)
    assert codes(findings)["side_channel_closed"] == {"prefill"}
    assert one(findings, "side_channel_closed").text == f"its side channel {HOST}:{port} cannot be reached from here"


async def test_a_decoder_that_cannot_take_the_blocks(site: Site) -> None:
    async with _failing(site.decoders[0], "status", status=500, leg="decode", count=1):
        findings = await _pair(site.prefillers[0].url, site.decoders[0].url)
    assert codes(findings) == {"transfer_failed": {"decode"}}
    assert one(findings, "transfer_failed").text.endswith("KV blocks from prefill: status 500")


async def test_a_side_channel_that_other_machines_cannot_reach(site: Site) -> None:
    async with SimEngine(SimConfig(role="decode", host="127.0.0.2")) as elsewhere:
        findings = await _pair(site.prefillers[0].url, elsewhere.url)
    assert codes(findings) == {"unroutable_host": {"prefill"}}
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in one(findings, "unroutable_host").todo


# ── releases ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_plugin_that_is_not_there(site: Site) -> None:
    port = free_port()
    findings = await _pair({"url": site.prefillers[0].url, "abort_port": port}, site.decoders[0].url)
    assert codes(findings) == {"no_plugin": {"prefill"}}
    assert one(findings, "no_plugin").text == f"nothing answers pings at its abort_port {port}"
    await _let_go(site)


async def test_an_abort_port_that_is_nixls_own(site: Site) -> None:
    prefiller = site.prefillers[0]
    findings = await _pair({"url": prefiller.url, "abort_port": prefiller.side_channel_port}, site.decoders[0].url)
    assert codes(findings) == {"abort_port": {"prefill"}}
    assert prefiller.state()["side_channel"]["alive"]  # it was not even pinged
    await _let_go(site)


class _NoWorker:
    """A worker that knows of no lease."""

    _reqs_to_send: Mapping[str, float] = {}
    _reqs_to_process: frozenset[str] = frozenset()


async def test_a_release_without_effect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that answers, and an engine that keeps the blocks: another engine's plugin, say."""
    monkeypatch.setattr("extproc.check.handover._EFFECT_S", 0.2)
    listener = AbortListener(Leases(_NoWorker()), f"tcp://{HOST}:0")  # type: ignore[arg-type]
    listener.start()
    try:
        findings = await _pair({"url": site.prefillers[0].url, "abort_port": listener.port}, site.decoders[0].url)
    finally:
        listener.stop()
    assert codes(findings) == {"release_without_effect": {"prefill"}}
    await _let_go(site)


async def test_a_release_that_is_refused(site: Site) -> None:
    """Decoders that do not tell of a rejected request what vLLM tells: something stands in front of them."""

    def proxied(request: RecordedRequest) -> Answer:
        return Answer.json({"choices": []}) if b"tiny" in request.body else Answer(404, body=b"no route")

    async with Odd() as decoder:
        decoder.respond = proxied
        findings = await _pair(site.prefillers[0].url, decoder.url)
    assert codes(findings) == {"release_failed": {"prefill"}}
    await _let_go(site)


async def _let_go(site: Site) -> None:
    """What a check could not release stays pinned for its lease: not beyond the test."""
    for engine in site.prefillers:
        for name in list(engine.pinned):
            engine.engine.sent(name)
        await until(lambda engine=engine: not engine.pinned)  # type: ignore[misc]


# ── where engines come from ───────────────────────────────────────────────────────────────────────────────────────────


async def test_a_fleet_file_that_cannot_be_used(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("decode: [{url: nowhere}]")
    findings = await _pair(site.prefillers[0].url, site.decoders[0].url, file=str(file))
    assert codes(findings) == {"fleet_file": {"fleet"}}


async def test_a_dns_name_that_leads_nowhere(site: Site) -> None:
    dns = [{"role": "decode", "name": "no.such.name.invalid"}]
    findings = await _pair(site.prefillers[0].url, site.decoders[0].url, dns=dns)
    assert codes(findings) == {"dns": {"fleet"}}


# ── Envoy ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _manager(bootstrap: dict[str, Any]) -> dict[str, Any]:
    (chain,) = bootstrap["static_resources"]["listeners"][0]["filter_chains"]
    manager: dict[str, Any] = chain["filters"][0]["typed_config"]
    return manager


def _routes(bootstrap: dict[str, Any]) -> list[dict[str, Any]]:
    routes: list[dict[str, Any]] = _manager(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]
    return routes


def _filter(bootstrap: dict[str, Any]) -> dict[str, Any]:
    return next(
        entry["typed_config"]
        for entry in _manager(bootstrap)["http_filters"]
        if entry["name"] == "envoy.filters.http.ext_proc"
    )


def _cluster(bootstrap: dict[str, Any], name: str) -> dict[str, Any]:
    return next(cluster for cluster in bootstrap["static_resources"]["clusters"] if cluster["name"] == name)


def _only_one_namespace(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["metadata_options"]["receiving_namespaces"]["untyped"] = ["extproc"]


def _no_namespaces(bootstrap: dict[str, Any]) -> None:
    del _filter(bootstrap)["metadata_options"]


def _no_body(bootstrap: dict[str, Any]) -> None:
    del _filter(bootstrap)["processing_mode"]["request_body_mode"]


def _streamed_body(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["processing_mode"]["request_body_mode"] = "STREAMED"


def _response_body(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["processing_mode"]["response_body_mode"] = "STREAMED"


def _small_buffers(bootstrap: dict[str, Any]) -> None:
    """The larger one counts."""
    bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 900_000
    _manager(bootstrap)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"] = 1_000_000


def _a_small_buffer_on_a_route(bootstrap: dict[str, Any]) -> None:
    _routes(bootstrap)[-1]["request_body_buffer_limit"] = 2_000_000


def _default_buffers(bootstrap: dict[str, Any]) -> None:
    del _manager(bootstrap)["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"]


def _short_patience(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["max_message_timeout"] = "60s"


def _default_patience(bootstrap: dict[str, Any]) -> None:
    del _filter(bootstrap)["max_message_timeout"], _filter(bootstrap)["message_timeout"]


def _round_robin(bootstrap: dict[str, Any]) -> None:
    del _cluster(bootstrap, "decode")["load_balancing_policy"]


def _other_key(bootstrap: dict[str, Any]) -> None:
    policy = _cluster(bootstrap, "decode")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    policy["typed_config"]["override_host_sources"][0]["metadata"]["key"] = "another"


def _a_decoder_less(bootstrap: dict[str, Any]) -> None:
    del _cluster(bootstrap, "decode")["load_assignment"]["endpoints"][0]["lb_endpoints"][1]


def _no_filter(bootstrap: dict[str, Any]) -> None:
    manager = _manager(bootstrap)
    manager["http_filters"] = [e for e in manager["http_filters"] if e["name"] != "envoy.filters.http.ext_proc"]


def _no_access_log(bootstrap: dict[str, Any]) -> None:
    del _manager(bootstrap)["access_log"]


def _bold_retries(bootstrap: dict[str, Any]) -> None:
    for route in _routes(bootstrap):
        route["route"]["retry_policy"]["retry_on"] = "5xx, connect-failure"


def _service_elsewhere(bootstrap: dict[str, Any]) -> None:
    (host,) = _cluster(bootstrap, "extproc")["load_assignment"]["endpoints"][0]["lb_endpoints"]
    host["endpoint"]["address"]["socket_address"]["port_value"] = free_port()


def _unheard_headers(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["processing_mode"]["request_header_mode"] = "SKIP"


def _unheard_answers(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["processing_mode"]["response_header_mode"] = "SKIP"


def _no_changes(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["mutation_rules"] = {"disallow_all": True}


def _no_errors(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["disable_immediate_response"] = True


def _a_mere_observer(bootstrap: dict[str, Any]) -> None:
    _filter(bootstrap)["observability_mode"] = True


def _no_guard(bootstrap: dict[str, Any]) -> None:
    manager = _manager(bootstrap)
    manager["http_filters"] = [e for e in manager["http_filters"] if e["name"] != "envoy.filters.http.lua"]


def _entry(bootstrap: dict[str, Any]) -> dict[str, Any]:
    entries: list[dict[str, Any]] = _manager(bootstrap)["http_filters"]
    return next(entry for entry in entries if entry["name"] == "envoy.filters.http.ext_proc")


def _a_filter_that_nothing_enables(bootstrap: dict[str, Any]) -> None:
    _entry(bootstrap)["disabled"] = True


def _a_filter_that_the_host_disables(bootstrap: dict[str, Any]) -> None:
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    host = _manager(bootstrap)["route_config"]["virtual_hosts"][0]
    host["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": {"@type": kind, "disabled": True}}
    for route in host["routes"]:
        route.pop("typed_per_filter_config", None)


def _two_filters(bootstrap: dict[str, Any]) -> None:
    _manager(bootstrap)["http_filters"].insert(0, {**_entry(bootstrap), "name": "once-more"})


def _other_path(bootstrap: dict[str, Any]) -> None:
    policy = _cluster(bootstrap, "decode")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    policy["typed_config"]["override_host_sources"][0]["metadata"]["path"] = [{"key": "x-gateway-destination"}]


def _routes_past_the_policy(bootstrap: dict[str, Any]) -> None:
    plain = {**_cluster(bootstrap, "decode"), "name": "plain"}
    del plain["load_balancing_policy"]
    bootstrap["static_resources"]["clusters"].append(plain)
    for route in _routes(bootstrap):
        route["route"]["cluster"] = "plain"


def _access_log(bootstrap: dict[str, Any]) -> dict[str, Any]:
    logs: list[dict[str, Any]] = _manager(bootstrap)["access_log"]
    return next(log for log in logs if log["name"] == "envoy.access_loggers.http_grpc")


def _log_elsewhere(bootstrap: dict[str, Any]) -> None:
    other = yaml.safe_load(yaml.safe_dump({**_cluster(bootstrap, "extproc"), "name": "logs"}))
    (host,) = other["load_assignment"]["endpoints"][0]["lb_endpoints"]
    host["endpoint"]["address"]["socket_address"]["port_value"] = free_port()
    bootstrap["static_resources"]["clusters"].append(other)
    _access_log(bootstrap)["typed_config"]["common_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "logs"


def _log_of_errors(bootstrap: dict[str, Any]) -> None:
    value = {"default_value": 500, "runtime_key": "status"}
    _access_log(bootstrap)["filter"] = {"status_code_filter": {"comparison": {"op": "GE", "value": value}}}


def _short_answers(bootstrap: dict[str, Any]) -> None:
    for route in _routes(bootstrap):
        route["route"].pop("timeout", None)


def _mirrored(bootstrap: dict[str, Any]) -> None:
    _routes(bootstrap)[-1]["route"]["request_mirror_policies"] = [{"cluster": "decode"}]


def _hedged(bootstrap: dict[str, Any]) -> None:
    _routes(bootstrap)[-1]["route"]["hedge_policy"] = {"hedge_on_per_try_timeout": True}


def _old_http(bootstrap: dict[str, Any]) -> None:
    cluster = _cluster(bootstrap, "extproc")
    del cluster["typed_extension_protocol_options"], cluster["health_checks"]


def _default_breakers(bootstrap: dict[str, Any]) -> None:
    del _cluster(bootstrap, "extproc")["circuit_breakers"]


def _small_breakers(bootstrap: dict[str, Any]) -> None:
    _cluster(bootstrap, "decode")["circuit_breakers"]["thresholds"][0]["max_requests"] = 200


@pytest.mark.parametrize(
    ("change", "expected", "text"),
    [
        (_only_one_namespace, {"namespaces"}, "dynamic metadata 'envoy.lb' is dropped without a word"),
        (_no_namespaces, {"namespaces"}, "dynamic metadata 'extproc' is dropped without a word"),
        (_no_body, {"body_mode"}, "request_body_mode is NONE: requests are refused"),
        (_streamed_body, {"body_mode"}, "request_body_mode is STREAMED: requests are refused"),
        (_response_body, {"response_body"}, "response_body_mode is STREAMED"),
        (_small_buffers, {"buffer_limit"}, "it buffers 1000000 bytes of a body, the service takes 33554432"),
        (_a_small_buffer_on_a_route, {"buffer_limit"}, "it buffers 2000000 bytes of a body"),
        (_default_buffers, {"buffer_limit"}, "it buffers 1048576 bytes of a body"),
        (_short_patience, {"message_timeout"}, "it waits 60 s for the service, prefills may take 130 s"),
        (_default_patience, {"message_timeout", "short_message_timeout"}, "message_timeout is 0.2 s"),
        (_round_robin, {"no_override_host"}, "no cluster's load balancer reads the decoder that the service picks"),
        (_other_key, {"no_override_host"}, "no cluster's load balancer reads"),
        (_a_decoder_less, {"hosts"}, "its decode cluster does not have decode-2"),
        (_no_filter, {"no_filter"}, "it has no ext_proc filter"),
        (_no_access_log, {"no_access_log"}, "no gRPC access log comes to the service"),
        (_unheard_headers, {"header_mode"}, "request_header_mode is SKIP: requests are refused"),
        (_unheard_answers, {"header_mode"}, "response_header_mode is SKIP: no Server-Timing"),
        (_no_changes, {"ignored"}, "mutation_rules.disallow_all is set"),
        (_no_errors, {"ignored"}, "disable_immediate_response is set"),
        (_a_mere_observer, {"ignored"}, "observability_mode is set"),
        (_no_guard, {"unguarded"}, "while the service is down, clients' own KV params reach the decoders"),
        (
            _a_filter_that_nothing_enables,
            {"no_filter"},
            "the ext_proc filter is disabled on all routes to the decoders",
        ),
        (_a_filter_that_the_host_disables, {"no_filter"}, "the ext_proc filter is disabled on all routes"),
        (_two_filters, {"twice"}, "each request is prefilled twice"),
        (_other_path, {"no_override_host"}, "no cluster's load balancer reads"),
        (_routes_past_the_policy, {"no_override_host"}, "no route leads to decode, which goes where the service says"),
        (
            _log_elsewhere,
            {"no_access_log"},
            "its gRPC access log goes elsewhere than to the service's cluster 'extproc'",
        ),
        (_log_of_errors, {"no_access_log"}, "its access log has a filter"),
        (_short_answers, {"route_timeout"}, "routes give an answer 15 s: longer ones are cut off"),
        (_mirrored, {"retries"}, "routes repeat requests (request_mirror_policies)"),
        (_hedged, {"retries"}, "routes repeat requests (hedge_on_per_try_timeout)"),
        (_old_http, {"service_unseen"}, "its cluster 'extproc' speaks HTTP/1.1: no call reaches the service"),
        (
            _default_breakers,
            {"circuit_breakers"},
            "its cluster 'extproc' takes 1024 requests at once, the service 10000",
        ),
        (_small_breakers, {"circuit_breakers"}, "its cluster 'decode' takes 200 requests at once"),
        (_bold_retries, {"retries"}, "routes repeat requests (5xx): the same KV params may reach two decoders"),
        (_service_elsewhere, {"service_unseen"}, "it finds no healthy service in its cluster 'extproc': 127.0.0.1:"),
    ],
)
async def test_an_envoy_that_does_not_fit(site: Site, change: Change, expected: set[str], text: str) -> None:
    async with await site.envoy_with(change) as envoy:
        findings = await site.check(
            envoy={"admin": envoy.admin_url.removeprefix("http://")},
            fleet={"prefill": []},  # the engines have been looked at
        )
    assert codes(findings) == {code: {"envoy"} for code in expected}
    assert any(text in finding.text for finding in findings)


async def test_a_service_that_envoy_does_not_reach_and_no_health_check_tells(site: Site) -> None:
    def change(bootstrap: dict[str, Any]) -> None:
        _service_elsewhere(bootstrap)
        del _cluster(bootstrap, "extproc")["health_checks"]
        _filter(bootstrap)["failure_mode_allow"] = False

    async with await site.envoy_with(change) as envoy, httpx.AsyncClient(trust_env=False) as client:
        (address,) = (await envoy.listeners()).values()
        assert (await client.get(f"http://{address}/v1/models")).status_code == 500
        findings = await site.check(envoy={"admin": envoy.admin_url.removeprefix("http://")}, fleet={"prefill": []})
    assert codes(findings) == {"service_unseen": {"envoy"}}
    assert "none is there" in one(findings, "service_unseen").text


def _patience_of_its_own(bootstrap: dict[str, Any]) -> None:
    """Long enough that the service need not ask for more: as gateways set it that know no max_message_timeout."""
    del _filter(bootstrap)["max_message_timeout"]
    _filter(bootstrap)["message_timeout"] = "145s"


def _room_on_the_listener(bootstrap: dict[str, Any]) -> None:
    """As Envoy Gateway does it; its clusters' small buffers hold no bodies."""
    _default_buffers(bootstrap)
    bootstrap["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 34_603_008
    for cluster in bootstrap["static_resources"]["clusters"]:
        cluster["per_connection_buffer_limit_bytes"] = 32_768


def _streamed_bodies(bootstrap: dict[str, Any]) -> None:
    """Without limits: nothing is held."""
    _default_buffers(bootstrap)
    mode = _filter(bootstrap)["processing_mode"]
    mode |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND"}


def _neighbours(bootstrap: dict[str, Any]) -> None:
    """Another app's route, with retries and limits of its own, and somebody else's processor."""
    cluster = {"name": "other", "type": "STATIC", "connect_timeout": "1s", "load_assignment": {"cluster_name": "other"}}
    bootstrap["static_resources"]["clusters"].append(cluster)
    action = {"cluster": "other", "retry_policy": {"retry_on": "5xx"}}
    route = {"match": {"prefix": "/other"}, "route": action, "request_body_buffer_limit": 32_768}
    _routes(bootstrap).insert(0, route)
    theirs = {
        "@type": _filter(bootstrap)["@type"],
        "grpc_service": {"envoy_grpc": {"cluster_name": "other"}},
        "processing_mode": {"request_body_mode": "STREAMED"},
    }
    _manager(bootstrap)["http_filters"].insert(0, {"name": "theirs", "typed_config": theirs, "disabled": True})


def _a_filter_that_a_route_enables(bootstrap: dict[str, Any]) -> None:
    """As the manifests for Istio do it."""
    _entry(bootstrap)["disabled"] = True
    word = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
    _routes(bootstrap)[-1]["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": word}


@pytest.mark.parametrize(
    "change",
    [_patience_of_its_own, _room_on_the_listener, _streamed_bodies, _neighbours, _a_filter_that_a_route_enables],
)
async def test_an_envoy_that_fits_in_its_own_way(site: Site, change: Change) -> None:
    async with await site.envoy_with(change) as envoy:
        findings = await site.check(envoy={"admin": envoy.admin_url.removeprefix("http://")}, fleet={"prefill": []})
    assert codes(findings) == {}


async def test_an_envoy_that_is_not_there(site: Site) -> None:
    for admin in (f"{HOST}:{free_port()}", site.decoders[0].url.removeprefix("http://"), None):
        findings = await site.check(envoy={"admin": admin}, fleet={"prefill": []})
        assert codes(findings) == {"envoy_unknown": {"envoy"}}
        assert not findings.failed


# ── the service ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _service(**sections: Any) -> Findings:
    """What is found of the service alone."""
    values = {"fleet": {"decode": [{"url": f"http://{HOST}:9"}]}, "envoy": {"admin": None}, **sections}
    findings = await check(build(values))
    return Findings(finding for finding in findings if finding.subject.startswith(("service", "worker")))


async def test_a_service_that_does_not_run() -> None:
    port = free_port()
    findings = await _service(grpc={"listen": f"0.0.0.0:{port}"}, admin={"listen": None})
    assert codes(findings) == {"service_down": {"service"}, "ticket_key": {"service"}}
    assert one(findings, "service_down").text == f"it does not run at 127.0.0.1:{port}"


async def test_a_service_that_is_not_ready() -> None:
    fleet = {"decode": [{"url": "http://no.such.name.invalid:8000"}]}
    listen = {"listen": f"{HOST}:0"}
    values = {"fleet": fleet, "grpc": listen, "admin": listen, "life": {"notice_s": 0, "drain_s": 1}}
    async with Server(build(values)) as server:
        findings = await _service(
            grpc={"listen": f"{HOST}:{server.grpc_port}"}, admin={"listen": f"{HOST}:{server.admin_port}"}
        )
    assert one(findings, "not_serving").text.endswith("is not serving: no decode engine has an address")


async def test_a_service_with_tls(tmp_path: Path) -> None:
    files = issued(tmp_path)
    tls = {"certificate": str(files.certificate), "key": str(files.key), "client_ca": str(files.ca)}
    listen = {"listen": f"{HOST}:0"}
    values = {"fleet": {"decode": [{"url": f"http://{HOST}:9"}]}, "grpc": listen | {"tls": tls}, "admin": listen}
    async with Server(build(values | {"life": {"notice_s": 0, "drain_s": 1}})) as server:
        grpc, admin = (f"{HOST}:{port}" for port in (server.grpc_port, server.admin_port))
        findings = await _service(grpc={"listen": grpc, "tls": tls}, admin={"listen": admin})
        assert codes(findings) == {"ticket_key": {"service"}}
        assert findings[0].text == f"serving at {grpc}"
        # One that speaks plain text there is not this one.
        findings = await _service(grpc={"listen": admin, "tls": tls}, admin={"listen": admin})
        assert "service_down" in codes(findings)
        findings = await _service(grpc={"listen": grpc}, admin={"listen": admin})
        assert one(findings, "service_down").text == f"what answers at {grpc} is not this service as configured"
    files.key.write_text("junk")
    findings = await _service(grpc={"listen": f"{HOST}:{free_port()}", "tls": tls})
    assert one(findings, "tls_files").text == f"grpc.tls.key: {files.key} is no PEM private key without a password"


async def test_workers(site: Site) -> None:
    with socket.socket() as taken:  # of the second one's port nobody is told
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        findings = await _service(grpc={"listen": f"{HOST}:{port - 1}", "workers": 2}, admin={"listen": None})
    assert codes(findings)["service_down"] == {"worker 0", "worker 1"}
    findings = await _service(grpc={"workers": 2})  # 9002 and 9003, which is the admin port
    assert codes(findings)["ports"] == {"service"}


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _command(site: Site, folder: Path, *options: str, **changes: Any) -> tuple[int, str, str]:
    file = folder / "extproc.yaml"
    file.write_text(yaml.safe_dump(site.values(**changes)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "check", "--config", str(file), *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_what_it_prints(site: Site, tmp_path: Path) -> None:
    status, output, errors = await _command(site, tmp_path)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "✓ prefill-1  prefill, version 0.32.0, serves tiny"
    assert all(line.startswith("✓ ") for line in lines)

    gone = {"url": f"http://{HOST}:{free_port()}", "name": "[red]gone[/nothing]"}  # names are no markup
    status, output, errors = await _command(site, tmp_path, fleet={"prefill": [], "decode": [gone]})
    assert (status, errors) == (1, "")
    lines = output.splitlines()
    assert lines[0] == f"✗ {gone['name']}  {gone['url']} does not answer: ConnectError  [unreachable]"
    assert lines[1].strip() == "→ start the engine, or fix its `url`"


async def test_what_it_tells_scripts(site: Site, tmp_path: Path) -> None:
    status, output, errors = await _command(
        site, tmp_path, "--json", fleet={"prefill": [], "decode": [{"url": "http://127.0.0.1:9"}]}
    )
    assert (status, errors) == (1, "")
    told = json.loads(output)
    assert told[0] == {
        "level": "error",
        "subject": "127.0.0.1:9",
        "text": "http://127.0.0.1:9 does not answer: ConnectError",
        "todo": "start the engine, or fix its `url`",
        "code": "unreachable",
    }
