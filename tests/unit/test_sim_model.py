"""The simulated model and its block pool: pure rules, no engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.sim.blocks import BlockPool
from extproc.sim.config import SimConfig
from extproc.sim.request import Output, Status
from extproc.sim.text import Choice
from extproc.sim.tokens import EOS_ID, Detokenizer, Sampler, decode, encode, kv_block, prefixes, token_bytes


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert decode(encode(text)) == text


def test_a_lone_surrogate_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode("a\ud800b")


def test_the_tokenizer_takes_the_longest_piece() -> None:
    assert [token_bytes(token) for token in encode("The cache of")] == [b"The", b" cache", b" of"]


def test_a_character_shows_when_its_last_byte_is_there() -> None:
    detokenizer = Detokenizer()
    assert [detokenizer.add(byte) for byte in "☃!".encode()] == ["", "", "☃", "!"]


def test_an_unfinished_character_at_the_end_is_a_replacement() -> None:
    assert Detokenizer().add("☃".encode()[0], final=True) == "\ufffd"


def test_a_block_depends_on_the_weights_its_tokens_and_all_blocks_before() -> None:
    block = kv_block(0, b"", [1, 2])
    assert len(block) == 64
    assert block == kv_block(0, b"", [1, 2])
    assert len({block, kv_block(1, b"", [1, 2]), kv_block(0, b"x", [1, 2]), kv_block(0, b"", [2, 1])}) == 4


def test_prefixes_name_full_blocks_only() -> None:
    assert len(prefixes(range(7), 3)) == 2
    assert prefixes(range(7), 3) == prefixes(range(6), 3)
    assert prefixes(range(7), 3)[1] != prefixes([9, 1, 2, 3, 4, 5], 3)[1]


def test_the_sampler_is_a_function_of_the_blocks_it_sees() -> None:
    def text(*kv: bytes, **options: int) -> list[int]:
        sampler = Sampler(0, kv, eos_after=None, **options)
        return [sampler.at(step) for step in range(8)]

    assert text(b"a", b"b") == text(b"a", b"b")
    assert len({tuple(text(*kv)) for kv in ((b"a",), (b"b",), (b"a", b"b"))}) == 3
    assert text(b"a", choice=1) != text(b"a")
    assert text(b"a", sampling_seed=1) != text(b"a", sampling_seed=2)


def test_eos_comes_at_the_answers_length_unless_it_is_masked() -> None:
    sampler = Sampler(0, [b"a"], eos_after=2)
    assert [sampler.at(step) == EOS_ID for step in range(4)] == [False, False, True, True]
    assert sampler.at(2, allow_eos=False) != EOS_ID
    assert 32 <= Sampler(0, [b"a"], eos_after=None).length <= 287


def test_log_probabilities_fall_and_begin_with_the_chosen_token() -> None:
    sampler = Sampler(0, [b"a"], eos_after=None)
    ranked = sampler.logprobs(0, sampler.at(0), 3)
    assert ranked[0][0] == sampler.at(0)
    assert len({token for token, _ in ranked}) == 4
    assert sorted((value for _, value in ranked), reverse=True) == [value for _, value in ranked]


# -- the pool --------------------------------------------------------------------------------------------------------


def test_block_zero_is_never_handed_out_and_usage_ignores_it() -> None:
    pool = BlockPool(256, prefix_caching=True)
    assert pool.take([], 42) == list(range(1, 43))
    assert pool.usage == pytest.approx(42 / 255)
    assert pool.take([], 214) is None
    assert pool.used == 42


def test_a_freed_block_keeps_its_content_and_partial_ones_are_reused_first() -> None:
    pool = BlockPool(6, prefix_caching=True)
    blocks = pool.take([], 3)
    assert blocks == [1, 2, 3]
    for block, prefix in ((1, b"p1"), (2, b"p2"), (3, None)):
        pool.fill(block, bytes([block]), prefix=prefix)
    pool.release(blocks)
    assert [pool.content[block] for block in blocks] == [b"\1", b"\2", b"\3"]
    # The partial block comes first, then what was never used, then cached ones from the prompt's end.
    assert pool.take([], 5) == [3, 4, 5, 2, 1]
    assert pool.find([b"p1"]) == []


def test_a_cached_prefix_is_shared_and_counted_once() -> None:
    pool = BlockPool(6, prefix_caching=True)
    first = pool.take([], 2)
    assert first is not None
    pool.fill(first[0], b"x", prefix=b"p")
    found = pool.find([b"p", b"other"])
    assert found == [1]
    second = pool.take(found, 1)
    assert second == [1, 3]
    assert pool.used == 3
    pool.release(first)
    assert pool.used == 2
    pool.release(second)
    assert pool.used == 0


def test_reviving_a_cached_block_takes_it_from_the_free_ones() -> None:
    pool = BlockPool(3, prefix_caching=True)
    (block,) = pool.take([], 1) or []
    pool.fill(block, b"x", prefix=b"p")
    pool.release([block])
    assert pool.take([block], 2) is None
    assert pool.take([block], 1) == [block, 2]
    assert pool.free_count == 0


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(3, prefix_caching=False)
    pool.fill(1, b"x", prefix=b"p")
    assert pool.find([b"p"]) == []


# -- one choice ------------------------------------------------------------------------------------------------------


def feed(choice: Choice, text: str, *, last: Status | None = Status.LENGTH_CAPPED) -> list[str]:
    tokens = list(text.encode())
    outputs = [
        Output(token=token, status=last if index == len(tokens) - 1 else None) for index, token in enumerate(tokens)
    ]
    deltas = []
    for output in outputs:
        delta = choice.add(output)
        deltas.append(delta.text)
        if delta.finish_reason:
            break
    return deltas


def test_a_stop_string_is_cut_off_and_never_shown_in_part() -> None:
    choice = Choice(["END"], False, 0)
    assert "".join(feed(choice, "some ENDING")) == "some "
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("some ", "stop", "END")


def test_a_stop_string_can_be_kept() -> None:
    choice = Choice(["END"], True, 0)
    assert "".join(feed(choice, "some ENDING")) == "some END"


def test_text_that_was_held_back_comes_when_the_choice_ends_otherwise() -> None:
    choice = Choice(["END"], False, 0)
    assert feed(choice, "xEN") == ["", "", "xEN"]
    assert choice.finish_reason == "length"


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    choice = Choice(["b"], False, 0)
    feed(choice, "ab")
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", "b")


def test_min_tokens_keeps_stop_strings_quiet() -> None:
    choice = Choice(["a"], False, 2)
    feed(choice, "aaba")
    assert (choice.text, choice.finish_reason) == ("aab", "stop")


def test_eos_prints_nothing_but_counts() -> None:
    choice = Choice([], False, 0)
    choice.add(Output(token=ord("a")))
    choice.add(Output(token=EOS_ID, status=Status.STOPPED))
    assert (choice.text, len(choice.tokens), choice.finish_reason, choice.stop_reason) == ("a", 2, "stop", None)


# -- configuration ---------------------------------------------------------------------------------------------------


def test_a_context_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hold 96 tokens"):
        SimConfig(blocks=4, block_size=32, max_model_len=97)
    assert SimConfig(blocks=4, block_size=32, max_model_len=96).capacity_tokens == 96


@pytest.mark.parametrize(("connector", "lease"), [("nixl", 30.0), ("mooncake-ascend", 480.0)])
def test_each_connector_has_its_own_lease(connector: str, lease: float) -> None:
    assert SimConfig(connector=connector).lease == lease  # type: ignore[arg-type]
    assert SimConfig(connector=connector, lease_s=2).lease == 2  # type: ignore[arg-type]
