"""The handover itself: greedy text of prefill + decode is that of one engine alone, and the KV really moved."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Pair
from tests.vllm.two_step import CHAT, COMPLETIONS, Body, chat, completion, freed, post, prefill, text_of, words

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOKEN_IDS = [5 + (37 * i) % 380 for i in range(300)]

REQUESTS: dict[str, tuple[str, Body]] = {
    "chat, 1 word": (CHAT, chat(words(1, 1))),
    "chat, 5 words": (CHAT, chat(words(5, 2))),
    "chat, 60 words": (CHAT, chat(words(60, 3))),
    "chat, 180 words": (CHAT, chat(words(180, 4))),
    "streamed chat with usage": (CHAT, chat(words(40, 5), **USAGE)),
    "completions, text": (COMPLETIONS, completion(words(30, 6))),
    "completions, token ids": (COMPLETIONS, completion(TOKEN_IDS)),
    "streamed completions": (COMPLETIONS, completion(words(90, 7), **USAGE)),
}


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_text_is_that_of_one_engine_alone(pair: Pair, path: str, body: Body) -> None:
    moved = await pair.decode.metric("vllm:nixl_bytes_transferred_count")
    handoff = await prefill(pair.prefill, _without_stream_options(body), path)
    assert await pair.prefill.pinned_blocks() == len(handoff["remote_block_ids"][0])

    disaggregated = await post(pair.decode, path, body | {"kv_transfer_params": handoff})
    assert await freed(pair.prefill) < 1
    assert await pair.decode.metric("vllm:nixl_bytes_transferred_count") == moved + 1

    alone = await post(pair.prefill, path, body)  # no kv_transfer_params: its own answer
    assert text_of(disaggregated) == text_of(alone)
    assert len(text_of(alone)) >= 32  # one character a token at least: it wrote all it was asked for


async def test_text_comes_from_the_prefillers_kv(pair: Pair) -> None:
    """The equality above could not fail if the decoder prefilled by itself: with another prompt's KV it goes wrong."""
    ours, theirs = chat(words(60, 20)), chat(words(60, 21))
    handoff = await prefill(pair.prefill, theirs)
    mixed = await post(pair.decode, CHAT, ours | {"kv_transfer_params": handoff})
    alone = await post(pair.prefill, CHAT, ours)
    assert text_of(mixed) != text_of(alone)


def _without_stream_options(body: Body) -> Body:
    return {key: value for key, value in body.items() if key != "stream_options"}
