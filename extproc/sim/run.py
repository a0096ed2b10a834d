"""The life of ``extproc sim``: start, say where, wait for a signal or for the engine's death."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import uvloop

from extproc.errors import ConfigError
from extproc.sim.config import SimConfig
from extproc.sim.failures import Failure
from extproc.sim.server import SimEngine


def run(options: dict[str, Any], failures: list[str]) -> None:
    """Raises ConfigError for values that make no engine; exits the process with 1 when the engine core dies."""
    try:
        config = SimConfig(**options)
        switches = [Failure.parse(text) for text in failures]
    except ValueError as error:
        raise ConfigError(f"extproc sim: {error}") from error
    try:
        died = uvloop.run(_serve(config, switches))
    except OSError as error:
        raise ConfigError(f"extproc sim: cannot listen: {error}") from error
    if died:
        sys.exit(1)


async def _serve(config: SimConfig, switches: list[Failure]) -> bool:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = SimEngine(config)
    for switch in switches:
        engine.failures.add(switch)
    async with engine:
        ready = {
            "ready": True,
            "role": config.role,
            "port": engine.port,
            "side_channel_port": engine.side_channel_port,
            "control_port": engine.control_port,
            "engine_id": engine.connector.engine_id,
        }
        print(json.dumps(ready), flush=True)
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(engine.died.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
    return engine.died.is_set()
