"""A decoder that refuses a request tells the prefiller, which frees the blocks: the release on stock pair."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Pair
from tests.vllm.two_step import CHAT, COMPLETIONS, Body, chat, completion, freed, post, prefill, words

REFUSALS: dict[str, tuple[Body, int]] = {
    "unknown model": ({"model": "no-such-model"}, 404),
    "more tokens than the context holds": ({"max_tokens": 100_000}, 400),
    "no token": ({"max_tokens": 0}, 400),
    "temperature below zero": ({"temperature": -1}, 400),
}


@pytest.mark.parametrize(("refused", "status"), REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refused_decode_frees_the_blocks(pair: Pair, refused: Body, status: int) -> None:
    body = chat(words(200, 30))
    handoff = await prefill(pair.prefill, body)
    assert await pair.prefill.pinned_blocks() == len(handoff["remote_block_ids"][0]) > 10
    answer = await post(pair.decode, CHAT, body | {"kv_transfer_params": handoff} | refused)
    assert answer.status_code == status
    assert await freed(pair.prefill) < 1


async def test_a_short_body_for_an_unknown_model_is_enough(pair: Pair) -> None:
    """Neither the prompt nor the path of the original request is needed."""
    handoff = await prefill(pair.prefill, chat(words(200, 31)))
    body = completion("x", model="no-such-model", max_tokens=1, kv_transfer_params=handoff)
    answer = await post(pair.decode, COMPLETIONS, body)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert await freed(pair.prefill) < 1


async def test_a_body_that_fails_the_schema_frees_nothing(pair: Pair) -> None:
    """So a client's own malformed request is no release: one has to be sent for it."""
    body = chat(words(200, 32))
    handoff = await prefill(pair.prefill, body)
    pinned = await pair.prefill.pinned_blocks()
    answer = await post(pair.decode, CHAT, body | {"kv_transfer_params": handoff, "max_tokens": "many"})
    assert answer.status_code == 400
    with pytest.raises(TimeoutError):
        await freed(pair.prefill, timeout_s=1)
    assert await pair.prefill.pinned_blocks() == pinned
    await post(pair.decode, CHAT, body | {"kv_transfer_params": handoff, "model": "no-such-model"})
    assert await freed(pair.prefill) < 1


async def test_the_same_handoff_may_be_released_twice(pair: Pair) -> None:
    handoff = await prefill(pair.prefill, chat(words(200, 33)))
    refused = completion("x", model="no-such-model", kv_transfer_params=handoff)
    for _ in range(2):
        assert (await post(pair.decode, COMPLETIONS, refused)).status_code == 404
        assert await freed(pair.prefill) < 1
