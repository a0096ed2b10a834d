"""The supervisor of workers, with processes that are quicker than a service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc import supervisor
from extproc.config import Config, build
from extproc.errors import ConfigError
from extproc.supervisor import Supervisor, check_ports, for_worker, shifted
from tests.support.gateway import until


def _config(**sections: Any) -> Config:
    return build({"fleet": {"decode": [{"url": "http://127.0.0.1:9"}]}, **sections})


# ── ports ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("listen", "worker", "expected"),
    [
        ("0.0.0.0:9002", 0, "0.0.0.0:9002"),
        ("0.0.0.0:9002", 3, "0.0.0.0:9005"),
        ("[::1]:9002", 1, "[::1]:9003"),
        ("gateway.internal:80", 2, "gateway.internal:82"),
        ("127.0.0.1:0", 2, "127.0.0.1:0"),
    ],
)
def test_each_worker_has_ports_of_its_own(listen: str, worker: int, expected: str) -> None:
    assert shifted(listen, worker) == expected


def test_a_workers_configuration_differs_in_its_ports_alone() -> None:
    config = _config(grpc={"workers": 2}, admin={"listen": "127.0.0.1:9100"}, prefill={"attempts": 3})
    second = for_worker(config, 1)
    assert (second.grpc.listen, second.admin.listen) == ("0.0.0.0:9003", "127.0.0.1:9101")
    grpc = second.grpc.model_copy(update={"listen": config.grpc.listen})
    assert second.model_copy(update={"grpc": grpc, "admin": config.admin}) == config
    assert for_worker(_config(admin={"listen": None}), 1).admin.listen is None


@pytest.mark.parametrize(
    ("grpc", "admin", "workers", "problem"),
    [
        ("0.0.0.0:9002", "127.0.0.1:9003", 1, None),
        ("0.0.0.0:9002", "127.0.0.1:9102", 64, None),
        ("0.0.0.0:9002", None, 8, None),
        ("0.0.0.0:9002", "127.0.0.1:9004", 2, None),
        ("127.0.0.1:0", "127.0.0.1:0", 4, None),
        ("0.0.0.0:9002", "127.0.0.1:9003", 2, "ports 9002 to 9003 for gRPC and 9003 to 9004 for admin.listen"),
        ("0.0.0.0:9003", "[::1]:9002", 2, "set admin.listen to [::1]:9103, say"),
        ("0.0.0.0:65530", "127.0.0.1:9003", 7, "7 workers need as many ports from 65530 on"),
        ("0.0.0.0:65530", "127.0.0.1:65531", 2, "set admin.listen to 127.0.0.1:65430, say"),
    ],
)
def test_workers_ports_must_not_overlap(grpc: str, admin: str | None, workers: int, problem: str | None) -> None:
    config = _config(grpc={"listen": grpc, "workers": workers}, admin={"listen": admin})
    if problem is None:
        check_ports(config)
    else:
        with pytest.raises(ConfigError) as fault:
            check_ports(config)
        assert str(fault.value).startswith("grpc.workers: ")
        assert problem in str(fault.value)


# ── lives ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

_WORKER = """
import os, signal, sys, time
name, said = sys.argv[1], sys.argv[2]
{setup}
with open(said, "a") as file:
    file.write(f"{{name}} {{os.getpid()}}\\n")
{body}
"""


class Workers:
    """Scripts in place of services; each says its number and its process id once it runs."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / "said"
        self._said.touch()
        self._folder = folder

    def command(self, body: str = "signal.pause()", setup: str = "") -> Callable[[int], Sequence[str]]:
        script = self._folder / "worker.py"
        script.write_text(_WORKER.format(body=body, setup=setup))
        return lambda worker: [sys.executable, "-S", str(script), str(worker), str(self._said)]

    def pids(self, worker: int) -> list[int]:
        """Of all its lives so far."""
        lines = [line.split() for line in self._said.read_text().splitlines()]
        return [int(pid) for number, pid in lines if int(number) == worker]

    async def started(self, worker: int, times: int = 1) -> int:
        await until(lambda: len(self.pids(worker)) >= times, 20)
        return self.pids(worker)[times - 1]


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return Workers(tmp_path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_worker_comes_back_and_the_others_go_on(workers: Workers) -> None:
    running = asyncio.create_task(Supervisor(2, workers.command(), drain_s=5).run())
    first, second = await workers.started(0), await workers.started(1)
    os.kill(first, signal.SIGKILL)
    again = await workers.started(0, times=2)
    assert again != first
    assert workers.pids(1) == [second]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert [_alive(pid) for pid in (first, second, again)] == [False] * 3


async def test_workers_that_keep_crashing_are_restarted_more_and_more_slowly(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Log:
        def info(self, _: str, **__: Any) -> None:
            pass

        def error(self, event: str, *, worker: int, status: int, restart_in_s: float) -> None:
            assert (event, worker, status) == ("worker ended", 0, 3)
            pauses.append(restart_in_s)

    monkeypatch.setattr(supervisor, "log", Log())
    monkeypatch.setattr(supervisor, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "_MAX_PAUSE_S", 0.05)
    running = asyncio.create_task(Supervisor(1, workers.command("sys.exit(3)"), drain_s=5).run())
    await until(lambda: len(pauses) >= 5, 30)
    os.kill(os.getpid(), signal.SIGINT)
    assert await running == 0
    assert pauses[:5] == [0.02, 0.04, 0.05, 0.05, 0.05]


async def test_a_worker_that_cannot_use_its_configuration_ends_all(workers: Workers) -> None:
    command = workers.command("sys.exit(2) if name == '1' else signal.pause()")
    assert await asyncio.wait_for(Supervisor(2, command, drain_s=5).run(), 20) == 2
    assert workers.pids(1) != []
    assert not any(_alive(pid) for worker in (0, 1) for pid in workers.pids(worker))


async def test_a_configuration_that_was_good_once_is_tried_again(workers: Workers) -> None:
    """A file that is being edited, a port that is still taken: the other workers have to go on."""
    body = "sys.exit(2) if open(said).read().count(name + ' ') == 2 else signal.pause()"
    running = asyncio.create_task(Supervisor(1, workers.command(body), drain_s=5).run())
    os.kill(await workers.started(0), signal.SIGKILL)
    await workers.started(0, times=3)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0


_DRAINS = "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))"


async def test_one_signal_lets_workers_drain_a_second_one_ends_them(workers: Workers) -> None:
    body = "signal.pause()\nopen(said + '.draining', 'w').close()\nwhile True: signal.pause()"
    running = asyncio.create_task(Supervisor(1, workers.command(body, _DRAINS), drain_s=60).run())
    pid = await workers.started(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: Path(f"{workers._said}.draining").exists())
    assert _alive(pid)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 0
    assert not _alive(pid)


async def test_a_worker_that_does_not_end_is_killed(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_KILL_AFTER_S", 0.1)
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    running = asyncio.create_task(Supervisor(1, workers.command("while True: signal.pause()", deaf), drain_s=0.1).run())
    pid = await workers.started(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 0
    assert not _alive(pid)


_SUPERVISOR = """
import asyncio, os, sys
from extproc.supervisor import Supervisor

def command(worker):
    return [sys.executable, sys.argv[1], str(worker), sys.argv[2], str(os.getpid())]

asyncio.run(Supervisor(2, command, drain_s=5).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes of their parent's death")
async def test_workers_end_with_a_supervisor_that_was_killed(workers: Workers, tmp_path: Path) -> None:
    script = str(workers.command(setup="from extproc.supervisor import end_with\nend_with(int(sys.argv[3]))")(0)[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SUPERVISOR, script, str(tmp_path / "said"), stderr=asyncio.subprocess.DEVNULL
    )
    pids = [await workers.started(worker) for worker in (0, 1)]
    process.kill()
    await process.wait()
    await until(lambda: not any(_running(pid) for pid in pids))


def _running(pid: int) -> bool:
    """Unlike :func:`_alive`, which counts those that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells processes of their parent's death")
@pytest.mark.parametrize(("parent", "status"), [(lambda: os.getpid(), 0), (lambda: os.getpid() + 1, 1)])
async def test_a_worker_whose_supervisor_has_died_already_does_not_begin(
    parent: Callable[[], int], status: int
) -> None:
    code = f"from extproc.supervisor import end_with; end_with({parent()})"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == status
