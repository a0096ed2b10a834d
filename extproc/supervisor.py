"""Several worker processes: each a whole service on ports of its own, restarted when it crashes.

Worker ``i`` listens on the configured ports plus ``i``; Envoy's cluster lists all of them, so its round robin spreads
streams evenly (one shared port would not: Envoy opens one HTTP/2 connection a thread, which goes to one process whole).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from extproc.config import Config
from extproc.configtypes import split_listen
from extproc.errors import ConfigError
from extproc.telemetry import logs
from extproc.telemetry.logs import log

CONFIG_STATUS: Final = 2
"""What a process ends with that cannot use its configuration."""

_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 10.0
_STABLE_S: Final = 10.0
"""A worker that has lived so long is restarted without a longer pause."""
_KILL_AFTER_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1


def shifted(listen: str, worker: int) -> str:
    """The listen address of a worker. Port 0 stays 0."""
    host, port = split_listen(listen)
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port + worker if port else 0}"


def for_worker(config: Config, worker: int) -> Config:
    """The configuration of one worker."""
    grpc = config.grpc.model_copy(update={"listen": shifted(config.grpc.listen, worker)})
    admin = config.admin
    if admin.listen:
        admin = admin.model_copy(update={"listen": shifted(admin.listen, worker)})
    return config.model_copy(update={"grpc": grpc, "admin": admin})


def check_ports(config: Config) -> None:
    """Raises ConfigError where workers' gRPC and admin ports get into each other's way, or run out."""
    workers, first = config.grpc.workers, split_listen(config.grpc.listen)[1]
    admin = split_listen(config.admin.listen)[1] if config.admin.listen else 0
    if max(first, admin) + workers - 1 > 65535:
        raise ConfigError(f"grpc.workers: {workers} workers need as many ports from {max(first, admin)} on")
    if workers > 1 and first and admin and abs(first - admin) < workers:
        host = config.admin.listen.rpartition(":")[0] if config.admin.listen else ""
        free = first + 100 if first + 100 + workers <= 65536 else first - 100
        raise ConfigError(
            f"grpc.workers: {workers} workers use the ports {first} to {first + workers - 1} for gRPC and {admin} to "
            f"{admin + workers - 1} for admin.listen, which overlap; set admin.listen to {host}:{free}, say"
        )


def run(config: Config, file: Path) -> None:
    """Run all workers until SIGTERM or SIGINT, and then until each has drained. A second signal ends them at once.

    Exits the process with status 2 where a worker finds at its start that it cannot use the configuration. Raises
    ConfigError.
    """
    check_ports(config)
    logs.configure(config.log)

    def command(worker: int) -> list[str]:
        options = ["--config", str(file), "--worker", str(worker), "--supervisor", str(os.getpid())]
        return [sys.executable, "-m", "extproc", "serve", *options]

    sys.exit(asyncio.run(Supervisor(config.grpc.workers, command, drain_s=config.life.drain_s).run()))


def end_with(supervisor: int) -> None:
    """Have the kernel send this process, a worker, SIGTERM when its supervisor dies, however that happens (Linux).

    Otherwise a worker would keep its port from the next supervisor's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != supervisor:
            sys.exit(1)


class Supervisor:
    """Keeps ``workers`` processes running; ``command`` gives each one's command line."""

    def __init__(self, workers: int, command: Callable[[int], Sequence[str]], *, drain_s: float) -> None:
        self._workers = workers
        self._command = command
        self._patience_s = drain_s + _KILL_AFTER_S
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """The exit status: 0 once all have ended on a signal, 2 where the configuration is at fault."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        return max(await asyncio.gather(*(self._keep(worker) for worker in range(self._workers))))

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._terminate()  # which a worker that is draining takes for its end
        self._stop.set()

    def _terminate(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    async def _keep(self, worker: int) -> int:
        """One worker, again and again."""
        pause = _FIRST_PAUSE_S
        starts = 0
        while not self._stop.is_set():
            started = time.monotonic()
            starts += 1
            status = await self._run(worker)
            if self._stop.is_set():
                break
            if starts == 1 and status == CONFIG_STATUS:
                self._stop.set()  # it has said why; trying again would not help
                return CONFIG_STATUS
            pause = _FIRST_PAUSE_S if time.monotonic() - started >= _STABLE_S else min(_MAX_PAUSE_S, pause * 2)
            log.error("worker ended", worker=worker, status=status, restart_in_s=pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stop.wait()
        return 0

    async def _run(self, worker: int) -> int:
        """One life of a worker; its exit status, negative for a signal."""
        # A session of its own: Ctrl-C in the terminal reaches us alone, and workers drain as we tell them.
        process = await asyncio.create_subprocess_exec(*self._command(worker), start_new_session=True)
        self._running[worker] = process
        log.info("worker started", worker=worker, pid=process.pid)
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            _, late = await asyncio.wait({ended}, timeout=self._patience_s)
            if late:
                process.kill()
        status = await ended
        del self._running[worker]
        return status
