"""The end of a service whose requests outlast its drain: late prefills are released, and none stays pinned."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.grpc.stand import CHAT, CHAT_BODY, JSON, Stand
from tests.support.engines import Answer, answer_prefill
from tests.support.gateway import until
from tests.support.hangingfile import hanging
from tests.support.scripted_envoy import Mode


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_what_a_late_prefill_hands_over_is_released_before_the_end(mode: Mode) -> None:
    """Its exchange is given up shortly before the deadline; the answer comes when nobody waits for it any more."""
    async with Stand.standing({"life": {"drain_s": 1.0, "notice_s": 0.0}}, prefill=1, decode=1) as stand:
        assert stand.server is not None
        service = stand.server.service
        given_up = asyncio.Event()

        async def late(request: Any) -> Answer:
            await given_up.wait()
            return answer_prefill(request)

        stand.prefillers[0].respond = late
        async with stand.envoy(mode) as envoy:
            prefilling = asyncio.create_task(envoy.request("POST", CHAT, JSON, CHAT_BODY))
            await stand.prefillers[0].wait_for(1)
            stopping = asyncio.create_task(stand.server.__aexit__(None, None, None))
            await until(lambda: service.in_flight == 0)
            given_up.set()
            await stopping
            await asyncio.gather(prefilling, return_exceptions=True)
        assert stand.server.releases.accounts.ended["released"] == 1
        assert len(stand.decoders[0].releases) == 1


async def test_a_fleet_file_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml.safe_dump({"decode": []}))
    settings = {"life": {"drain_s": 1.0, "notice_s": 0.0}, "fleet": {"file": str(file)}}
    async with hanging(file) as hangs, Stand.standing(settings, process=True) as stand:
        await hangs.wait()
        process = stand.instances[0].process
        process.signal(signal.SIGTERM)
        assert await process.wait(timeout_s=10) == 0
        assert "stopped" in process.output()


async def test_a_fleet_file_that_is_a_pipe_does_not_keep_the_process(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    os.mkfifo(file)
    settings = {"life": {"drain_s": 1.0, "notice_s": 0.0}, "fleet": {"file": str(file)}}
    async with Stand.standing(settings, process=True) as stand:
        process = stand.instances[0].process
        await until(lambda: "not a regular file" in process.output())
        process.signal(signal.SIGTERM)
        assert await process.wait(timeout_s=10) == 0
