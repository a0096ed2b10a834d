from __future__ import annotations

import json
import random
from typing import Any

import pytest

from extproc import configsections
from extproc.fleet.fleet import Fleet
from extproc.jsonobject import JsonObject
from extproc.prefixes import BLOCK_BYTES, DecoderPrefixes, Prefix
from tests.support.fleet import fleet_of, named, spec, specs

SYSTEM = "You are a helpful assistant. " * 100  # 2900 bytes


def chat(*said: str, **more: Any) -> JsonObject:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(n, 1) if n % 2 else min(n, 2)], "content": text} for n, text in enumerate(said)]
    return JsonObject(json.dumps({"model": "m", "messages": messages, **more}).encode())


def prefix(*said: str, **more: Any) -> Prefix:
    found = Prefix.of(chat(*said, **more))
    assert found is not None
    return found


def shared(one: Prefix, other: Prefix) -> int:
    """How many blocks from the first on are the same."""
    count = 0
    for a, b in zip(one.blocks, other.blocks, strict=False):
        if a != b:
            break
        count += 1
    return count


# ---- a prompt's blocks ----


def test_whole_blocks_only_and_the_whole_size() -> None:
    body = JsonObject(b'{"prompt": "' + b"x" * 3000 + b'"}')
    found = Prefix.of(body)
    assert found is not None
    assert (len(found.blocks), found.size) == (2, 3002)  # with its quotes
    assert len(set(found.blocks)) == 2  # equal text at another place is another block


@pytest.mark.parametrize("body", [b'{"prompt": "short"}', b'{"model": "m"}', b"{}", b'{"messages": []}'])
def test_nothing_to_find_again(body: bytes) -> None:
    assert Prefix.of(JsonObject(body)) is None


def test_the_next_turn_begins_like_the_last() -> None:
    first = prefix(SYSTEM, "What is a KV block? " * 200)
    second = prefix(SYSTEM, "What is a KV block? " * 200, "A part of the cache. " * 50, "And what is a lease?")
    assert shared(first, second) == len(first.blocks)
    assert len(second.blocks) > len(first.blocks)
    other = prefix(SYSTEM, "Tell me a story. " * 200)
    assert shared(first, other) == 2  # the system prompt


def test_a_difference_early_on_makes_all_later_blocks_different() -> None:
    text = SYSTEM * 3
    one, other = prefix(text), prefix("!" + text[1:])
    assert one.blocks[0] != other.blocks[0]
    assert not set(one.blocks) & set(other.blocks)


@pytest.mark.parametrize(
    "beside",
    [
        {"model": "other"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"cache_salt": "tenant-2"},
        {"documents": [{"text": "d"}]},
    ],
)
def test_what_else_decides_about_the_tokens_keeps_prompts_apart(beside: dict[str, Any]) -> None:
    assert not set(prefix(SYSTEM).blocks) & set(prefix(SYSTEM, **beside).blocks)


def test_what_does_not_decide_about_them_does_not() -> None:
    assert prefix(SYSTEM) == prefix(SYSTEM, temperature=0.5, max_tokens=7, stream=True, user="u")


def test_a_huge_prompt_has_a_bounded_number_of_blocks() -> None:
    found = Prefix.of(JsonObject(b'{"prompt": "' + b"x" * (8 << 20) + b'"}'))
    assert found is not None
    assert (len(found.blocks), found.size) == (4096, (8 << 20) + 2)


# ---- what decoders have ----


@pytest.fixture
def fleet() -> Fleet:
    return fleet_of(*specs("decode", 3))


def test_a_decoder_has_what_it_served(fleet: Fleet) -> None:
    prefixes = DecoderPrefixes(fleet)
    one, two, _ = fleet.engines("decode")
    first = prefix(SYSTEM, "a" * 3000)
    second = prefix(SYSTEM, "a" * 3000, "b" * 3000, "c")
    assert prefixes.best(first, fleet.engines("decode")) == (None, 0.0)
    prefixes.note(two, first)
    expected = len(first.blocks) * BLOCK_BYTES / second.size
    assert 0.5 < expected < 0.7
    assert prefixes.cached_ratio(two, second) == expected
    assert prefixes.cached_ratio(one, second) == 0.0
    assert prefixes.best(second, fleet.engines("decode")) == (two, expected)
    assert prefixes.best(second, [one]) == (None, 0.0)
    prefixes.note(one, second)
    assert prefixes.best(second, fleet.engines("decode"))[0] is one


def test_only_what_comes_before_counts(fleet: Fleet) -> None:
    """A block of the middle is of no use when its predecessors are gone."""
    prefixes = DecoderPrefixes(fleet)
    (engine, *_) = fleet.engines("decode")
    whole = prefix(SYSTEM * 3)
    prefixes.note(engine, Prefix(whole.blocks[1:], whole.size))
    assert prefixes.cached_ratio(engine, whole) == 0.0


def test_the_oldest_is_forgotten_and_of_one_prompt_the_end_first(fleet: Fleet) -> None:
    prefixes = DecoderPrefixes(fleet, blocks_per_decoder=6)
    (engine, *_) = fleet.engines("decode")
    one, two, three = (
        Prefix(tuple(b"%s%d" % (name, n) for n in range(3)), 3 * BLOCK_BYTES) for name in (b"a", b"b", b"c")
    )
    for known in (one, two, one, three):
        prefixes.note(engine, known)
    assert [prefixes.cached_ratio(engine, known) for known in (one, two, three)] == [1.0, 0.0, 1.0]
    prefixes.note(engine, Prefix((b"d0",), BLOCK_BYTES))
    assert prefixes.cached_ratio(engine, one) == 2 / 3


def test_memory_is_bounded(fleet: Fleet) -> None:
    prefixes = DecoderPrefixes(fleet, blocks_per_decoder=100)
    chance = random.Random(1)
    for engine in fleet.engines("decode"):
        for _ in range(50):
            prefixes.note(engine, Prefix(tuple(chance.randbytes(16) for _ in range(30)), 30 * BLOCK_BYTES))
    assert {len(blocks) for blocks in prefixes._known.values()} == {100}


def test_engines_that_leave_or_die_are_forgotten(fleet: Fleet) -> None:
    prefixes = DecoderPrefixes(fleet)
    one, two, three = fleet.engines("decode")
    known = prefix(SYSTEM)
    for engine in (one, two, three):
        prefixes.note(engine, known)
    two.health.probed("ConnectError", 1)
    fleet.changed()
    two.health.probed("", 1)
    fleet.update("test", [spec("decode", 2), spec("decode", 3)])
    assert [prefixes.cached_ratio(engine, known) > 0 for engine in (one, two, three)] == [False, False, True]
    assert named(fleet, "decode-3") is three


def test_off_by_default() -> None:
    assert configsections.Routing().bypass_cached_ratio is None


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5])
def test_a_ratio_is_a_share(ratio: float) -> None:
    with pytest.raises(ValueError, match="bypass_cached_ratio"):
        configsections.Routing(bypass_cached_ratio=ratio)
