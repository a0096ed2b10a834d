"""A file that hangs whoever opens it, as one of a network file system whose server is gone does."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def hanging(path: Path) -> AsyncIterator[asyncio.Event]:
    """For as long as this is open, at most the kernel's ``fs.lease-break-time`` (45 s). The event: somebody hangs.

    The kernel makes others wait for the holder of a lease, and tells the holder by SIGIO.
    """
    loop = asyncio.get_running_loop()
    hangs = asyncio.Event()
    loop.add_signal_handler(signal.SIGIO, hangs.set)
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield hangs
    finally:
        os.close(file)
        loop.remove_signal_handler(signal.SIGIO)
