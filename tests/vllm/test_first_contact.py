"""A decoder that refuses the first request it gets from a prefiller: the release by rejection comes late.

To notify the prefiller it has to shake hands with it first, which is done beside the engine's steps; the notification
waits for the next step. An idle decoder has none, until the next request.
"""

from __future__ import annotations

import pytest

from extproc.demo.vllm.launch import VllmEngine
from tests.support.simulated import until
from tests.vllm.conftest import Pair
from tests.vllm.gateway import Gate, VllmGateway
from tests.vllm.two_step import CHAT, COMPLETIONS, chat, completion, freed, post, prefill, words


@pytest.mark.asyncio(loop_scope="session")
async def test_the_service_has_the_blocks_freed_all_the_same(new_pair: Pair) -> None:
    """It reminds a decoder that may never have met the prefiller, without waiting for another request."""
    async with (
        Gate(new_pair.decode) as gate,
        VllmGateway.started(new_pair.prefill, new_pair.decode, decode_urls=[gate.url]) as gateway,
    ):
        with gateway.at_dispatch(lambda _: gate.shut()):
            answer = await gateway.post(CHAT, chat(words(200, 12)))
        assert answer.status_code == 503
        await until(lambda: gateway.accounts.pending == 1)
        await gate.open()
        await until(lambda: gateway.accounts.pending == 0)
        # The reminders come after 0.25 s and 1 s; a handshake takes 0.2 s where the machine is not busy.
        assert await freed(new_pair.prefill, timeout_s=10) < 5
        assert gateway.counted("extproc_releases_total") == {"released": 1}
        assert await gateway.transfers() == 0


async def test_a_second_refusal_brings_the_first_one_through(pair: Pair, abortable: VllmEngine) -> None:
    handoff = await prefill(abortable, chat(words(200, 10)))
    refused = completion("x", model="no-such-model", max_tokens=1, kv_transfer_params=handoff)
    assert (await post(pair.decode, COMPLETIONS, refused)).status_code == 404
    with pytest.raises(TimeoutError):
        await freed(abortable, timeout_s=2)
    assert await abortable.pinned_blocks() == len(handoff["remote_block_ids"][0])

    assert (await post(pair.decode, COMPLETIONS, refused)).status_code == 404
    assert await freed(abortable) < 1
