"""Logs as the service writes them: one line per exchange, legible whatever clients send, without its content."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from extproc import configsections
from extproc.telemetry import logs
from tests.grpc.stand import JSON, Stand, refused, through
from tests.support.certificates import issued
from tests.support.engines import Answer, StubEngine
from tests.support.scripted_envoy import ScriptedEnvoy

ENGINE_KEY: Final = "sk-engine-secret"
TICKET_KEY: Final = "ticket-secret"
CLIENT_KEY: Final = "sk-client-secret"


# ── a service as a process, and what it wrote ─────────────────────────────────────────────────────────────────────────


class Lines:
    """The JSON log of a service that has ended."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.events: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]

    def exchange(self, client_request_id: str) -> dict[str, Any]:
        """The one line of that request."""
        (line,) = [line for line in self.of("exchange") if line.get("client_request_id") == client_request_id]
        return line


def _settings(**log: str) -> dict[str, Any]:
    return {"log": {"format": "json", **log}, "release": {"ticket_key": TICKET_KEY, "settle_s": 0.05}}


async def _output(stand: Stand) -> str:
    process = stand.instances[0].process
    await process.stop()
    assert process.returncode == 0
    return process.output()


def _headers(name: str) -> list[tuple[str, str | bytes]]:
    return [*JSON, ("x-request-id", name)]


async def test_each_exchange_is_one_line() -> None:
    settings = _settings(level="debug")
    async with Stand.standing(settings, process=True) as stand, stand.envoy("BUFFERED") as envoy:
        await through(envoy, headers=_headers("well"))
        await through(envoy, path="/v1/embeddings", headers=_headers("bypassed"))
        deep = b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}"
        await refused(envoy, 400, "json_too_deep", body=deep, headers=_headers("refused"))
        for engine in stand.prefillers:
            engine.respond = lambda _: Answer(503)
        await refused(envoy, 503, "prefill_unavailable", headers=_headers("failed"))
        lines = Lines(await _output(stand))

    well = lines.exchange("well")
    (prefill,) = [request for request in stand.prefills if request.header("x-request-id") == well["request_id"]]
    names = {engine.endpoint: f"prefill-{number}" for number, engine in enumerate(stand.prefillers, 1)}
    (prefiller,) = [engine for engine in stand.prefillers if prefill in engine.requests]
    assert well["level"] == "info"
    assert (well["prefiller"], well["decoder"]) == (names[prefiller.endpoint], "decode-1")
    assert (well["decision"], well["state"], well["status"]) == ("disaggregated", "responding", 200)
    assert well["path"] == "/v1/chat/completions"
    assert 0 < well["prefill_from_ms"] < well["prefill_to_ms"] < well["total_ms"]
    assert 0 < well["prefill_ms"] <= well["prefill_to_ms"] - well["prefill_from_ms"]
    assert well["queued_ms"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", well["timestamp"])
    assert "reason" not in well

    bypassed = lines.exchange("bypassed")
    assert (bypassed["decision"], bypassed["reason"], bypassed["status"]) == ("bypass", "path", 200)
    assert "prefiller" not in bypassed

    assert (lines.exchange("refused")["level"], lines.exchange("refused")["status"]) == ("info", 400)
    failed = lines.exchange("failed")
    assert (failed["level"], failed["decision"], failed["status"]) == ("warning", "refused", 503)
    outcomes = {name: lines.exchange(name).get("outcome") for name in ("well", "refused", "failed")}
    assert outcomes == {"well": None, "refused": "rejected_by_us", "failed": "rejected_by_us"}  # no access log here
    assert (failed["reason"], failed["failed_attempts"]) == ("prefill_unavailable", ["status_5xx", "status_5xx"])
    assert len(lines.of("exchange")) == 4


async def test_a_level_leaves_out_what_is_below_it() -> None:
    async with Stand.standing(_settings(level="warning"), process=True) as stand, stand.envoy("BUFFERED") as envoy:
        await through(envoy, headers=_headers("well"))
        for engine in stand.prefillers:
            engine.respond = lambda _: Answer(503)
        await refused(envoy, 503, "prefill_unavailable", headers=_headers("failed"))
        lines = Lines(await _output(stand))
    assert {line["level"] for line in lines.events} == {"warning"}
    assert [line["client_request_id"] for line in lines.of("exchange")] == ["failed"]


@pytest.mark.parametrize("verbosity", [None, "info"])
async def test_handshakes_that_fail_leave_grpcs_own_lines_only_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verbosity: str | None
) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    if verbosity:
        monkeypatch.setenv("GRPC_VERBOSITY", verbosity)
    files = issued(tmp_path)
    tls = {"certificate": str(files.certificate), "key": str(files.key)}
    settings = _settings() | {"grpc": {"listen": "127.0.0.1:0", "tls": tls}}
    async with Stand.standing(settings, process=True) as stand:
        reader, writer = await asyncio.open_connection(*stand.grpc_address.split(":"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), 10)  # it hangs up
        writer.close()
        output = await _output(stand)
    others = [line for line in output.splitlines() if not line.startswith("{")]
    assert any("Handshake failed" in line for line in others) if verbosity else others == []


HOSTILE: Final = (
    b'x" event="exchange" decision="disaggregated',
    b"\x85\xa0 after what other encodings take for a line's end",
    "line\u2028separator\u2029and \u202eright to left".encode(),
    b"\x9b2J\x9b31m and a\ttab",
    "emoji \N{PILE OF POO}, and a bad half: ".encode() + b"\xed\xa0\xbd",
    b"{'a': 1} %s %d {} {0}",
)


@pytest.mark.parametrize("form", ["json", "console"])
async def test_hostile_ids_and_paths_cannot_break_lines(form: str) -> None:
    async with Stand.standing(_settings(format=form), process=True) as stand, stand.envoy("BUFFERED") as envoy:
        for name in HOSTILE:
            await through(envoy, path="/v1/" + name.decode("latin-1"), headers=[*JSON, ("x-request-id", name)])
        await through(envoy, path="/" + "p" * 5000, headers=[*JSON, ("x-request-id", "i" * 5000)])
        output = await _output(stand)
    lines = [line for line in output.splitlines() if "exchange" in line and "bypass" in line]
    assert len(lines) == len(HOSTILE) + 1  # splitlines() breaks at all of Unicode's line ends
    assert all(character.isprintable() for line in output.split("\n") for character in line)
    if form == "json":
        events = [json.loads(line) for line in lines]
        assert "client_request_id" not in events[-1]  # absurdly long
        assert events.pop()["path"] == "/" + "p" * 255
        assert [event["client_request_id"] for event in events] == [name.decode("latin-1") for name in HOSTILE]
        assert {(event["event"], event["decision"], event["reason"]) for event in events} == {
            ("exchange", "bypass", "path")
        }


@pytest.mark.parametrize("form", ["json", "console"])
async def test_no_content_and_no_secret_is_logged(form: str) -> None:
    """Through a whole life: each way that a request can go, errors of engines that quote it, releases, the end."""
    planted = {
        "prompt": "PLANTED-prompt",
        "model": "PLANTED-model",
        "authorization": f"Bearer {CLIENT_KEY}",
        "cookie": "PLANTED-cookie",
        "query": "PLANTED-query",
        "params": "PLANTED-params",
        "answer": "PLANTED-answer",
        "engine": ENGINE_KEY,
        "ticket": TICKET_KEY,
    }
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": planted["prompt"]}]}).encode()
    headers = [*JSON, ("authorization", planted["authorization"]), ("cookie", planted["cookie"])]
    path = f"/v1/chat/completions?api_key={planted['query']}"
    settings = _settings(level="debug", format=form) | {"fleet": {"api_key": ENGINE_KEY}}

    def handed(request: Any) -> Answer:
        value = json.loads(StubEngine().respond(request).body)  # type: ignore[union-attr]
        value["kv_transfer_params"]["extra"] = planted["params"]
        value["choices"][0]["message"]["content"] = planted["answer"]
        return Answer.json(value)

    def quoting(status: int) -> Any:
        return lambda request: Answer(status, [("x-told", planted["answer"])], request.body)

    async with Stand.standing(settings, process=True) as stand, stand.envoy("BUFFERED") as envoy:

        async def send(content: bytes = body, to: str = path) -> None:
            await through(envoy, content, to, headers=headers)

        def engines(respond: Any) -> None:
            for engine in stand.prefillers:
                engine.respond = respond

        engines(handed)
        await send()
        await _reset(envoy, path, headers, body)
        await send(to=f"/v1/embeddings?key={planted['query']}")
        await send(body.replace(b'"m"', b'"PLANTED-model"'))
        await send(body[:-1])  # no JSON
        await send(body.replace(b'"messages"', b'"kv_transfer_params": {"a": "PLANTED-params"}, "messages"'))
        for status in (200, 302, 400, 401, 500):
            engines(quoting(status))
            await send()
        engines(lambda _: Answer(body=b'{"kv_transfer_params": {"do_remote_prefill": true, "a": "PLANTED-params"}}'))
        await send()
        for engine in stand.prefillers:
            await engine.refuse()
        await send()
        output = await _output(stand)

    assert output.count("disaggregated") >= 2
    assert "result=released" in output or '"result": "released"' in output
    assert [secret for secret in planted.values() if secret in output] == []
    assert re.findall(r"PLANTED|Bearer|sk-|secret", output) == []


async def _reset(envoy: ScriptedEnvoy, path: str, headers: Any, body: bytes) -> None:
    exchange = await envoy.request("POST", path, headers, body)
    await exchange.reset()


# ── one event to one line ─────────────────────────────────────────────────────────────────────────────────────────────


class Written:
    """What has gone to standard error since the last look."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self) -> str:
        return self._capsys.readouterr().err

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Written]:
    """The process' logging is put back afterwards."""
    root = logging.getLogger()
    before, level, configured = root.handlers[:], root.level, structlog.get_config()
    monkeypatch.setattr(logs, "log", structlog.get_logger())
    yield Written(capsys)
    structlog.configure(**configured)
    root.handlers[:] = before
    root.setLevel(level)


def _fail_with_locals() -> None:
    body = CLIENT_KEY
    raise ValueError(f"{len(body)} bytes")


def test_people_see_control_characters_as_such(written: Written) -> None:
    logs.configure(configsections.Log())
    logs.log.info("event", path="/\x1b[2J\r\n\u2028\u202e\x00é\U0001f4a9")
    (line,) = written.text().splitlines()
    assert re.sub(r" +", " ", line).endswith(r"event path=/\x1b[2J\r\n\u2028\u202e\x00é" + "\U0001f4a9")


@pytest.mark.parametrize("form", ["json", "console"])
def test_traces_show_no_variables(written: Written, form: Any) -> None:
    logs.configure(configsections.Log(format=form))
    try:
        _fail_with_locals()
    except ValueError:
        logs.log.exception("failed")
        logging.getLogger("library").exception("failed, too")
    text = written.text()
    assert text.count("ValueError: 16 bytes") == 2
    assert CLIENT_KEY not in text
    if form == "json":
        own, foreign = (json.loads(line) for line in text.splitlines())
        assert own["exception"].endswith("ValueError: 16 bytes")
        assert foreign["exception"].endswith("ValueError: 16 bytes")


def test_libraries_speak_json_too(written: Written) -> None:
    logs.configure(configsections.Log(format="json", level="debug"))
    logging.getLogger("grpc._cython").error("%s went\nwrong", "it")
    logging.getLogger("grpc._cython").info("chatter")
    (event,) = written.events()
    assert {key: event[key] for key in ("event", "level", "logger")} == {
        "event": "it went\nwrong",
        "level": "error",
        "logger": "grpc._cython",
    }


def test_an_error_level_silences_libraries_warnings(written: Written) -> None:
    logs.configure(configsections.Log(level="error"))
    logging.getLogger("library").warning("a warning")
    logging.getLogger("library").error("an error")
    (line,) = written.text().splitlines()
    assert re.search(r"error +\] an error +\[library\]$", line), line


def test_constants_are_in_every_line_of_ours(written: Written) -> None:
    logs.configure(configsections.Log(format="json"), worker=3)
    logs.log.info("one", empty=None)
    logs.log.warning("two", worker=4)
    events = written.events()
    assert [(event["event"], event["worker"]) for event in events] == [("one", 3), ("two", 4)]
    assert "empty" not in events[0]


async def test_events_from_several_tasks_keep_to_their_lines(written: Written) -> None:
    logs.configure(configsections.Log(format="json"))

    async def write(number: int) -> None:
        for _ in range(20):
            logs.log.info("event", number=number, text="x" * 2000)
            await asyncio.sleep(0)

    await asyncio.gather(*(write(number) for number in range(5)))
    assert sorted(event["number"] for event in written.events()) == sorted([*range(5)] * 20)


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    """Workers share their supervisor's standard error."""
    code = """
from extproc.configsections import Log
from extproc.telemetry import logs
logs.configure(Log(format="json"))
for number in range(2000):
    logs.log.info("event", number=number)
"""
    file = tmp_path / "log"
    with file.open("wb") as output:
        processes = [subprocess.Popen([sys.executable, "-u", "-c", code], stderr=output) for _ in range(2)]
        assert [process.wait(60) for process in processes] == [0, 0]
    numbers = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    assert sorted(numbers) == sorted([*range(2000), *range(2000)])
