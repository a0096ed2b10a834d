"""A decoder that refuses the first request it gets from a prefiller: the release by rejection comes late.

To notify the prefiller it has to shake hands with it first, which is done beside the engine's steps; the notification
waits for the next step. An idle decoder has none, until the next request.
"""

from __future__ import annotations

import pytest

from extproc.demo.vllm.launch import VllmEngine
from tests.vllm.conftest import Pair
from tests.vllm.two_step import COMPLETIONS, chat, completion, freed, post, prefill, words


async def test_a_second_refusal_brings_the_first_one_through(pair: Pair, abortable: VllmEngine) -> None:
    handoff = await prefill(abortable, chat(words(200, 10)))
    refused = completion("x", model="no-such-model", max_tokens=1, kv_transfer_params=handoff)
    assert (await post(pair.decode, COMPLETIONS, refused)).status_code == 404
    with pytest.raises(TimeoutError):
        await freed(abortable, timeout_s=2)
    assert await abortable.pinned_blocks() == len(handoff["remote_block_ids"][0])

    assert (await post(pair.decode, COMPLETIONS, refused)).status_code == 404
    assert await freed(abortable) < 1
