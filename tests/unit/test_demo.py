"""What the demo says of its scenarios, and the status it ends with."""

from __future__ import annotations

import asyncio
import io
import json
import shlex
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from extproc.demo import run
from extproc.demo.scenarios import Scenario, ScenarioFailed, Shown
from extproc.demo.stack import EngineKind, Stack

Run = Callable[[Stack, httpx.AsyncClient], Awaitable[Shown]]


async def works(_: Stack, __: httpx.AsyncClient) -> Shown:
    record = {
        "prefiller": "prefill-1",
        "prefill_ms": 12.5,
        "decoder": "decode-1",
        "ended_ms": 40.0,
        "outcome": "completed",
    }
    return Shown("a chat", record, "same text")


def raises(error: Exception) -> Run:
    async def scenario(_: Stack, __: httpx.AsyncClient) -> Shown:
        raise error

    return scenario


async def shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *scenarios: Scenario, kind: EngineKind = "sim"
) -> tuple[int, str]:
    """The exit status and what was printed."""
    monkeypatch.setattr(run, "SCENARIOS", scenarios)
    stack = Stack(tmp_path, kind=kind)
    stack.url, stack.admin_url = "http://127.0.0.1:1", "http://127.0.0.1:2"
    output = io.StringIO()
    status = await run._show(Console(file=output, width=110), stack, once=True)
    return status, output.getvalue()


async def test_all_as_it_should_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, text = await shown(monkeypatch, tmp_path, Scenario("a chat", works), Scenario("another", works))
    assert status == 0
    assert text.splitlines()[-1] == "all as it should be"
    assert (text.count("✓ same text"), text.count("12.5 ms"), text.count("✗")) == (2, 2, 0)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ScenarioFailed("the answer [/] differs"), "✗ the answer [/] differs"),
        (httpx.ConnectError("no connection"), "✗ no connection"),
        (TimeoutError(), "✗ TimeoutError"),
    ],
)
async def test_one_failure_among_successes_is_the_demos(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str
) -> None:
    scenarios = (Scenario("first", works), Scenario("the middle one", raises(error)), Scenario("last", works))
    status, text = await shown(monkeypatch, tmp_path, *scenarios)
    assert status == 1
    assert text.splitlines()[-1] == "something is wrong: see ✗ above"
    assert (text.count("✓ same text"), text.count(said)) == (2, 1)
    assert "the middle one" in text


async def test_what_needs_simulated_engines_is_left_out_with_real_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    switch = Scenario("a switch", raises(ScenarioFailed("there is no such switch")), simulated_only=True)
    assert (await shown(monkeypatch, tmp_path, switch, Scenario("a chat", works), kind="vllm"))[0] == 0
    assert (await shown(monkeypatch, tmp_path, switch, Scenario("a chat", works)))[0] == 1


def test_times_that_are_not_known_have_no_unit() -> None:
    left = {"prefiller": "prefill-2", "decoder": "decode-1", "ended_ms": 8.8, "outcome": "client_reset"}
    assert run._row(Shown("hang up", left, "free"))[1:] == ["prefill-2", "decode-1", "–", "8.8 ms", "client_reset"]


def test_what_is_wrong_with_the_settings_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("extproc.processes.Process.start", no_process)
    monkeypatch.setenv("EXTPROC_FLEET__LEASE_S", "-1")
    with pytest.raises(SystemExit) as ended:
        run.run(once=True, kind="sim")
    assert ended.value.code == 1
    assert capsys.readouterr().out == (
        "environment variable EXTPROC_FLEET__LEASE_S: fleet.lease_s: Input should be greater than 0\n"
    )


async def test_what_it_offers_to_try_can_be_pasted(tmp_path: Path) -> None:
    """However narrow the terminal is."""
    stack = Stack(tmp_path)
    stack.url, stack.admin_url = "http://127.0.0.1:1", "http://127.0.0.1:2"
    output = io.StringIO()
    staying = asyncio.create_task(run._stay(Console(file=output, width=40), stack))
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGTERM)
    await staying
    command, _, rest = output.getvalue().partition("  curl ")[2].partition("\n\n")
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["-N", "http://127.0.0.1:1/v1/chat/completions"]
    assert "\n" not in words[-1]
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": "hello"}]
    assert "http://127.0.0.1:2/\n" in rest
