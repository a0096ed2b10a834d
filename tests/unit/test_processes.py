import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from extproc import processes
from extproc.errors import ConfigError
from extproc.processes import Process, ProcessError, envoy_process, find_envoy, free_port

PYTHON = sys.executable

# Prints its child's pid; both ignore SIGTERM when told to.
PARENT_OF_ONE = """
import signal, subprocess, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("child", child.pid, flush=True)
time.sleep(300)
"""

TINY_ENVOY = """
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: hello
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: hello
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: /}, direct_response: {status: 204}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: nobody
    load_assignment:
      cluster_name: nobody
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: "::1", port_value: 1}}}
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 2}}}
"""


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def gone(pid: int) -> None:
    await until(lambda: not alive(pid))


def child_pid(process: Process) -> int:
    assert process.ready_line is not None
    return int(process.ready_line.split()[1])


async def test_output_of_both_streams_goes_to_the_log_and_a_line_makes_it_ready(tmp_path: Path) -> None:
    script = "import sys, time; print('noise', file=sys.stderr); print('ready on 7', flush=True); time.sleep(300)"
    async with Process([PYTHON, "-c", script], log=tmp_path / "a" / "log", ready=re.compile("^ready on")) as process:
        assert process.ready_line == "ready on 7"
        assert process.running
        assert process.returncode is None
        assert process.output() == "noise\nready on 7\n"
    assert not process.running
    assert process.returncode == -signal.SIGTERM


async def test_a_line_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    script = "import time; print('ready', end='', flush=True); time.sleep(300)"
    process = Process([PYTHON, "-c", script], log=tmp_path / "log", ready=re.compile("ready"), ready_timeout_s=0.5)
    with pytest.raises(ProcessError, match=r"not ready after 0\.5 s:\nready"):
        await process.start()
    assert process.returncode == -signal.SIGTERM


async def test_a_url_that_answers_200_makes_it_ready(tmp_path: Path) -> None:
    port = free_port()
    command = [PYTHON, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    url = f"http://127.0.0.1:{port}/"
    async with Process(command, log=tmp_path / "log", ready=url, cwd=tmp_path), httpx.AsyncClient() as client:
        assert (await client.get(url)).status_code == 200


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_callable_makes_it_ready(tmp_path: Path, asynchronous: bool) -> None:
    mark = tmp_path / "mark"

    async def later() -> bool:
        return mark.exists()

    script = "import os, pathlib, time; pathlib.Path(os.environ['MARK']).touch(); time.sleep(300)"
    ready = later if asynchronous else mark.exists
    async with Process([PYTHON, "-c", script], log=tmp_path / "log", ready=ready, env={"MARK": str(mark)}):
        assert mark.exists()


async def test_death_before_ready_is_told_at_once_with_the_end_of_the_log(tmp_path: Path) -> None:
    script = "import sys; [print(n) for n in range(100)]; sys.exit('no such model')"
    process = Process([PYTHON, "-c", script], log=tmp_path / "log", name="prefill-1", ready=lambda: False)
    async with asyncio.timeout(10):  # far below ready_timeout_s
        with pytest.raises(ProcessError) as raised:
            await process.start()
    text = str(raised.value).splitlines()
    assert text[0] == "prefill-1 ended with status 1 before it was ready:"
    assert text[1:] == [*(str(n) for n in range(76, 100)), "no such model"]


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no such program: no-such-program"):
        await Process(["no-such-program"], log=tmp_path / "log").start()


async def test_stop_ends_the_children_too_and_may_be_repeated(tmp_path: Path) -> None:
    process = Process([PYTHON, "-c", PARENT_OF_ONE], log=tmp_path / "log", ready=re.compile("child"))
    await process.start()
    child = child_pid(process)
    assert alive(child)
    await process.stop()
    await gone(child)
    await process.stop()


async def test_a_command_that_ignores_sigterm_is_killed_after_the_bound(tmp_path: Path) -> None:
    command = [PYTHON, "-c", PARENT_OF_ONE, "stubborn"]
    process = Process(command, log=tmp_path / "log", ready=re.compile("child"), stop_timeout_s=0.2)
    async with process:
        child = child_pid(process)
    assert process.returncode == -signal.SIGKILL
    await gone(child)


async def test_children_of_a_command_that_crashed_are_ended(tmp_path: Path) -> None:
    async with Process([PYTHON, "-c", PARENT_OF_ONE], log=tmp_path / "log", ready=re.compile("child")) as process:
        child = child_pid(process)
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait(10) == -signal.SIGKILL
        await gone(child)


async def test_an_exception_and_a_cancelled_start_leave_nothing(tmp_path: Path) -> None:
    process = Process([PYTHON, "-c", PARENT_OF_ONE], log=tmp_path / "log", ready=re.compile("child"))

    async def fail() -> None:
        async with process:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await gone(child_pid(process))

    waiting = Process([PYTHON, "-c", PARENT_OF_ONE], log=tmp_path / "other", ready=lambda: False)
    start = asyncio.create_task(waiting.start())
    await until(lambda: re.search(r"child \d+\n", waiting.output()) is not None)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert waiting.returncode == -signal.SIGTERM
    await gone(int(waiting.output().split()[1]))


async def test_restarted_the_log_goes_on_and_the_output_is_the_last_runs(tmp_path: Path) -> None:
    script = "import os, time; print('run', os.getpid(), flush=True); time.sleep(300)"
    process = Process([PYTHON, "-c", script], log=tmp_path / "log", ready=re.compile("run"))
    async with process:
        first = process.pid
    async with process:
        assert process.output() == f"run {process.pid}\n"
        assert process.log.read_text() == f"run {first}\nrun {process.pid}\n"
        with pytest.raises(ProcessError, match="running already"):
            await process.start()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
async def test_killed_parents_leave_no_process(tmp_path: Path) -> None:
    script = f"""
import asyncio, re, signal, os, pathlib, sys
from extproc.processes import Process
async def main():
    process = Process([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(300)"],
                      log=pathlib.Path({str(tmp_path / "log")!r}), ready=re.compile("up"))
    await process.start()
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    run = await asyncio.to_thread(subprocess.run, [PYTHON, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.returncode == -signal.SIGKILL
    await gone(int(run.stdout))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_free_port_can_be_bound(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        port = free_port(host)
        listener.bind((host, port))
        assert listener.getsockname()[1] == port > 0


@pytest.mark.skipif(processes._first_ephemeral_port() <= 10_000, reason="no ports below those of connections")
def test_outgoing_connections_do_not_get_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ephemeral = client.getsockname()[1]
    assert max(free_port() for _ in range(200)) < min(ephemeral, 49152)


def test_envoy_is_found_on_path_then_beside_the_interpreter_else_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "envoy").write_text("#!/bin/sh\n")
        (tmp_path / folder / "envoy").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "two" / "python"))
    assert find_envoy() == str(tmp_path / "one" / "envoy")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_envoy() == str(tmp_path / "two" / "envoy")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"pip install 'extproc\[demo\]'"):
        find_envoy()


@pytest.mark.envoy
async def test_a_real_envoy_on_ports_of_its_own_choice(tmp_path: Path) -> None:
    async with envoy_process(TINY_ENVOY, directory=tmp_path, concurrency=1) as envoy, httpx.AsyncClient() as client:
        listener = (await envoy.listeners())["hello"]
        assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", listener)
        assert (await client.get(f"http://{listener}/")).status_code == 204
        assert await envoy.clusters() == {"nobody": {"[::1]:1": True, "127.0.0.1:2": True}}
        requests = await envoy.stats(r"^http\.hello\.downstream_rq_(total|2xx)$")
        assert requests == {"http.hello.downstream_rq_total": 1, "http.hello.downstream_rq_2xx": 1}
    assert envoy.returncode == 0
    assert (tmp_path / "envoy.yaml").read_text() == TINY_ENVOY


@pytest.mark.envoy
async def test_an_envoy_that_refuses_its_bootstrap_says_why_and_leaves_no_files() -> None:
    envoy = envoy_process("admin: {}\nno_such_field: 1\n")
    with pytest.raises(ProcessError, match="no_such_field"):
        await envoy.start()
    assert not envoy.directory.exists()
