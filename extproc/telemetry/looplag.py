"""How late the event loop is: everything that waits in this process waits at least so much longer."""

from __future__ import annotations

import asyncio
from typing import Final

from prometheus_client import Histogram

_INTERVAL_S: Final = 0.25


async def sample(lag: Histogram, interval_s: float = _INTERVAL_S) -> None:
    """Observe for ever how many seconds after its time a timer fires."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        lag.observe(max(0.0, loop.time() - due))
