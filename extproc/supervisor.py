"""Several worker processes: each a whole service on ports of its own, restarted when it crashes.

Worker ``i`` listens on the configured ports plus ``i``; Envoy's cluster lists all of them, so its round robin spreads
streams evenly (one shared port would not: Envoy opens one HTTP/2 connection a thread, which goes to one process whole).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Final

from extproc.config import Config, split_listen
from extproc.telemetry import logs
from extproc.telemetry.logs import log

_FIRST_PAUSE_S: Final = 0.2
_MAX_PAUSE_S: Final = 10.0
_STABLE_S: Final = 10.0
"""A worker that has lived so long is restarted at once."""


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


def run(config: Config, file: Path) -> None:
    """Run all workers until SIGTERM or SIGINT, and then until each has drained."""
    logs.configure(config.log)
    asyncio.run(_supervise(config, file))


async def _supervise(config: Config, file: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await asyncio.gather(*(_keep(config, file, worker, stop) for worker in range(config.grpc.workers)))


async def _keep(config: Config, file: Path, worker: int, stop: asyncio.Event) -> None:
    """One worker, again and again."""
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(file), "--worker", str(worker)]
    pause = _FIRST_PAUSE_S
    while not stop.is_set():
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
        log.info("worker started", worker=worker, pid=process.pid)
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ended.done():
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), config.life.drain_s + 5)
            if not ended.done():
                process.kill()
            await ended
            return
        pause = _FIRST_PAUSE_S if time.monotonic() - started >= _STABLE_S else min(_MAX_PAUSE_S, pause * 2)
        log.error("worker ended", worker=worker, status=process.returncode, restart_in_s=pause)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause)
