"""The prefiller is killed after its answer: what the decoder's policy makes of it. Last, as it ends engines."""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from extproc.demo.vllm.launch import VllmEngine, running
from tests.vllm.conftest import Pair
from tests.vllm.gateway import VllmGateway
from tests.vllm.two_step import CHAT, chat, introduce, post, text_of, words

pytestmark = pytest.mark.asyncio(loop_scope="session")

# A decoder that knows the prefiller notices at once; the rest is for a busy machine.
NOTICED_WITHIN_S = 15.0


@pytest_asyncio.fixture(loop_scope="session")
async def other_pair(acquainted: Pair, vllm_directory: Path) -> AsyncIterator[Pair]:
    """A pair of its own whose decoder fails what it cannot read; the session's is stopped, for room."""
    await acquainted.prefill.stop()
    await acquainted.decode.stop()
    prefill = VllmEngine("prefill", name="prefill-killed", directory=vllm_directory)
    decode = VllmEngine("decode", name="decode-fail", directory=vllm_directory, load_failure_policy="fail")
    async with running(prefill, decode):
        await introduce(prefill, decode)
        yield Pair(prefill, decode)


async def test_recompute_answers_as_if_nothing_had_happened(acquainted: Pair) -> None:
    prefill, decode = acquainted.prefill, acquainted.decode
    body = chat(words(120, 700))
    alone = text_of(await post(prefill, CHAT, body))
    async with VllmGateway.started(prefill, decode) as gateway:
        with gateway.at_dispatch(lambda _: prefill.signal(signal.SIGKILL)):
            begun = time.monotonic()
            answer = await gateway.post(CHAT, body)
            taken = time.monotonic() - begun
        assert text_of(answer) == alone
        assert taken < NOTICED_WITHIN_S
        await gateway.settled()
        assert decode.running
        assert await decode.pinned_blocks() == 0
        # Nobody is left to prefill: that is an error of ours, soon.
        refused = await gateway.post(CHAT, body)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


async def test_fail_answers_500_and_the_decoder_lives(other_pair: Pair) -> None:
    prefill, decode = other_pair.prefill, other_pair.decode
    async with VllmGateway.started(prefill, decode) as gateway:
        with gateway.at_dispatch(lambda _: prefill.signal(signal.SIGKILL)):
            begun = time.monotonic()
            answer = await gateway.post(CHAT, chat(words(120, 701)))
            taken = time.monotonic() - begun
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert taken < NOTICED_WITHIN_S
        await gateway.settled(timeout_s=30)
        assert decode.running
        assert text_of(await post(decode, CHAT, chat("hello", max_tokens=2)))
        assert await decode.pinned_blocks() == 0
