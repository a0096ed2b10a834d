"""Everything that goes wrong in production at once, for a while; then nothing may be left (``make soak``: longer)."""

from __future__ import annotations

import os
from typing import Final

import pytest

from bench.soak import soak

pytestmark = [pytest.mark.envoy, pytest.mark.timeout(400)]

SECONDS: Final = float(os.environ.get("EXTPROC_SOAK_S", "15"))


async def test_nothing_is_left_of_clients_that_hang_up_and_processes_that_come_and_go() -> None:
    report = await soak(SECONDS)

    assert report.faults_found() == []
    assert [held.settled for held in report.after] == [True, True]
    assert report.pinned == 0
    assert report.faults["drain"] > 0
    assert report.faults["restart service"] > 0
    assert report.requests["complete 200"] > 50
    assert report.requests["hang-up"] > 10
    assert report.releases["requested"] == report.releases["released"] > 0
