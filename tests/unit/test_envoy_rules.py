"""What a service must not do fails in the scripted Envoy, with what a real Envoy would have made of it."""

from __future__ import annotations

import pytest

from tests.support.envoy_rules import ProtocolViolation
from tests.support.scripted_envoy import Mode, ScriptedEnvoy
from tests.support.scripted_service import (
    BODY,
    chunk,
    on_body,
    on_headers,
    on_response,
    overriding,
    play,
    scripted,
    serving,
)
from tests.support.violations import BUFFERED_VIOLATIONS, FULL_DUPLEX_VIOLATIONS, HEADERS, TIMEOUT, Violation


class TestViolations:
    async def check(self, mode: Mode, violation: Violation) -> None:
        # Where a reply is missing, only its time limit tells; elsewhere none should run out.
        limit_s = 1.0 if violation.details == TIMEOUT else 10.0
        with pytest.raises(ProtocolViolation, match=violation.problem) as caught:
            await play(violation.script, mode, message_timeout_s=limit_s, max_message_timeout_s=60.0)
        assert (caught.value.status, caught.value.details) == (violation.status, violation.details)

    @pytest.mark.parametrize("name", BUFFERED_VIOLATIONS)
    async def test_buffered(self, name: str) -> None:
        await self.check("BUFFERED", BUFFERED_VIOLATIONS[name])

    @pytest.mark.parametrize("name", FULL_DUPLEX_VIOLATIONS)
    async def test_full_duplex(self, name: str) -> None:
        await self.check("FULL_DUPLEX_STREAMED", FULL_DUPLEX_VIOLATIONS[name])

    async def test_end_of_stream_before_trailers(self) -> None:
        script = {"request_body": [chunk(b"abc", end=True)]}
        with pytest.raises(ProtocolViolation, match="end_of_stream in a body that has trailers"):
            await play(script, "FULL_DUPLEX_STREAMED", trailers=[("x-t", "1")])

    async def test_mode_override_not_allowed(self) -> None:
        script = {HEADERS: [overriding(on_headers(), request_body_mode="NONE")]}
        with pytest.raises(ProtocolViolation, match="which the filter does not allow"):
            await play(script, allow_mode_override=False)

    async def test_reply_ahead_of_its_message(self) -> None:
        async with (
            serving(scripted({"request_body": [on_body(), on_response()]})) as (target, _),
            ScriptedEnvoy(target) as envoy,
        ):
            exchange = await envoy.request(body=BODY)
            await exchange.stream.arrived(3)
            with pytest.raises(ProtocolViolation, match="a reply although no message waits for one"):
                await exchange.response()
