"""Top-level edits of JSON text: exactly the named members change, every other byte stays."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from extproc.jsonobject import BadJson, JsonObject, NotAnObject, TooDeep, nests_deeper

# A slow machine is no failure.
_STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# ── texts of JSON objects, spelled in every way that RFC 8259 allows ─────────────────────────────────────────────────

_space = st.sampled_from(["", " ", "\t", "\r\n", " \n "])
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "/": "\\/", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _utf16_escape(character: str) -> str:
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02X}" for i in range(0, len(units), 2))


@st.composite
def _string_token(draw: st.DrawFn, value: str) -> str:
    """A JSON spelling of ``value``: each character plain where that is legal, or escaped in one of its ways."""
    escape_all = draw(st.integers(0, 3))
    spelled = []
    for position, character in enumerate(value):
        if escape_all == 1 or (escape_all == 2 and position % 2):
            spelled.append(_utf16_escape(character))
        elif character in '"\\' or character < " " or (escape_all == 3 and character in _SHORT_ESCAPES):
            spelled.append(_SHORT_ESCAPES.get(character) or _utf16_escape(character))
        else:
            spelled.append(character)
    return '"' + "".join(spelled) + '"'


_characters = st.characters(exclude_categories=["Cs"]) | st.sampled_from('"\\/\b\n{}[],: é☃𝄞')
_words = st.text(_characters, max_size=6)
_numbers = (
    st.integers(-(10**40), 10**40).map(str)
    | st.sampled_from(["-0", "0.10", "1E+5", "1e-07", "9007199254740993", "-0.0", "123456789012345678901234567890.50"])
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
)
_scalars = _numbers | st.sampled_from(["true", "false", "null"]) | _words.flatmap(_string_token)


@st.composite
def _array(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    pieces = [draw(_space) + item + draw(_space) for item in draw(st.lists(items, max_size=4))]
    return "[" + (",".join(pieces) or draw(_space)) + "]"


@st.composite
def _object(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    pieces = []
    for item in draw(st.lists(items, max_size=4)):
        key = draw(_words.flatmap(_string_token))
        pieces.append(draw(_space) + key + draw(_space) + ":" + draw(_space) + item + draw(_space))
    return "{" + (",".join(pieces) or draw(_space)) + "}"


_values = st.recursive(_scalars, lambda inner: _array(inner) | _object(inner), max_leaves=8)
_keys = st.sampled_from(["stream", "max_tokens", "a", "é", "", '"', "\\", "𝄞"]) | _words


@st.composite
def _objects(draw: st.DrawFn) -> str:
    members = []
    for key in draw(st.lists(_keys, max_size=6)):  # not unique: keys may repeat
        token = draw(_string_token(key))
        members.append(draw(_space) + token + draw(_space) + ":" + draw(_space) + draw(_values) + draw(_space))
    return draw(_space) + "{" + (",".join(members) or draw(_space)) + "}" + draw(_space)


_edits = st.dictionaries(_keys, st.none() | _values.map(str.encode), max_size=4)


# ── an independent reading of the text, by the parser of Python's json module ────────────────────────────────────────


def _members(text: str) -> list[tuple[str, str, str]]:
    """Each top-level member as (key, the key as spelled, the value as spelled)."""
    scan = json.JSONDecoder().raw_decode
    space = " \t\n\r"
    found: list[tuple[str, str, str]] = []

    def skip(at: int) -> int:
        while text[at] in space:
            at += 1
        return at

    at = skip(skip(0) + 1)
    while text[at] != "}":
        key, after_key = scanstring(text, at + 1)
        token = text[at:after_key]
        start = skip(skip(after_key) + 1)
        _, end = scan(text, start)
        found.append((key, token, text[start:end]))
        at = skip(end)
        if text[at] == ",":
            at = skip(at + 1)
    return found


@settings(_STEADY, max_examples=30)
@given(_objects())
def test_members_are_the_values_as_spelled_and_the_last_one_wins(text: str) -> None:
    parsed = JsonObject(text.encode())

    assert {key: parsed.raw(key) for key in parsed.members} == {key: value.encode() for key, _, value in _members(text)}


@settings(_STEADY, max_examples=60)
@given(_objects(), _edits)
@example('{"a":12,"a":1}', {"b": b"2"})
@example('{"a":1,"b":2,"a":1}', {"b": None})
@example('{"a\\u0062":1}', {"ab": None})
@example(" { } ", {"a": b"1"})
@example('{"a":1 , "b":2}', {"a": None, "b": None, "c": b"[]"})
@example('{"\\\\":1,"\\"":2}', {"\\": b"3"})
def test_edits_change_the_named_members_and_keep_every_other_one(text: str, edits: dict[str, bytes | None]) -> None:
    before = _members(text)

    parsed = JsonObject(text.encode())
    after = _members(parsed.edited(edits).decode())

    assert _members(parsed.edited(edits).decode()) == after
    expected = {key: value for key, _, value in before}  # the order of a key's first appearance, its last value
    for key, new in edits.items():
        if new is None:
            expected.pop(key, None)
        else:
            expected[key] = new.decode()
    assert [(key, value) for key, _, value in after] == list(expected.items())
    if len({key for key, _, _ in before}) == len(before):
        spelled = {key: token for key, token, _ in before}
        assert [token for key, token, _ in after if key in spelled] == [
            spelled[key] for key, _, _ in after if key in spelled
        ]


@settings(_STEADY, max_examples=30)
@given(_objects(), st.data())
def test_replacing_one_value_keeps_the_bytes_around_it(text: str, data: st.DataObject) -> None:
    members = _members(text)
    if not members or len({key for key, _, _ in members}) < len(members):
        return
    key, _, value = data.draw(st.sampled_from(members))
    marked = JsonObject(text.encode()).edited({key: b"\x00"}).decode()  # no JSON text contains a NUL

    assert marked.replace("\x00", value) == text
    assert JsonObject(text.encode()).edited({}) == text.encode()


def test_untouched_bytes_are_the_same_bytes() -> None:
    text = '{ "seed" : 9007199254740993 ,\n "prompt":"é☃\\u00e9\\/",\t"stream":true, "t":[0.70, {"z":1, "a":2}]}  '

    edited = JsonObject(text.encode()).edited({"stream": b"false", "kv_transfer_params": b'{"x":1}'})

    assert edited.decode() == (
        '{ "seed" : 9007199254740993 ,\n "prompt":"é☃\\u00e9\\/",\t"stream":false, "t":[0.70, {"z":1, "a":2}]'
        ',"kv_transfer_params":{"x":1}}  '
    )


@pytest.mark.parametrize(
    ("text", "edits", "expected"),
    [
        (b'{"a":1, "b":2, "c":3}', {"a": None}, b'{"b":2, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', {"b": None}, b'{"a":1, "c":3}'),
        (b'{"a":1, "b":2, "c":3}', {"c": None}, b'{"a":1, "b":2}'),
        (b'{"a":1}', {"a": None}, b"{}"),
        (b'{ "a":1 }', {"a": None, "b": b"2"}, b'{ "b":2 }'),
        (b"{}", {"a": b"1"}, b'{"a":1}'),
        (b"{}", {"a": None}, b"{}"),
        (b'{"a":1}', {"b": None}, b'{"a":1}'),
        (b'{"a":1,"a":2}', {"b": b"3"}, b'{"a":2,"b":3}'),
        (b'{"a":1,"b":3,"\\u0061":2}', {}, b'{"a":2,"b":3}'),
    ],
)
def test_small_edits(text: bytes, edits: dict[str, bytes | None], expected: bytes) -> None:
    assert JsonObject(text).edited(edits) == expected


# ── what is no JSON object ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", [b"[]", b"null", b"1", b'"{}"', b"true", b"1.5"])
def test_other_json_is_not_an_object(text: bytes) -> None:
    with pytest.raises(NotAnObject):
        JsonObject(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b'{"a":1',
        b'{"a":1}x',
        b'{"a":1}{"b":2}',
        b'{"a":1,}',
        b"{,}",
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":{"b":-Infinity}}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        '{"a":1}'.encode("utf-32"),
        b'{"\\ud800":1}',
        b'{"a":"\\ud800"}',
        b'{"\xed\xa0\x80":1}',
        b'{"\xff":1}',
        b'{"a":"line\nbreak"}',
        b'{"a":1}\x00',
        b"a=1&b=2",
    ],
)
def test_what_is_not_strict_json_is_refused(text: bytes) -> None:
    with pytest.raises(BadJson) as refusal:
        JsonObject(text)
    assert not isinstance(refusal.value, TooDeep)


@pytest.mark.parametrize("shape", [b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"a":' + b"[" * 100_000])
def test_absurd_nesting_is_refused_as_such(shape: bytes) -> None:
    with pytest.raises(TooDeep):
        JsonObject(shape)


def test_reasonable_nesting_is_kept() -> None:
    nested = b"[" * 400 + b"]" * 400

    assert JsonObject(b'{"a":' + nested + b',"b":1}').edited({"b": None}) == b'{"a":' + nested + b"}"


def test_hundreds_of_members_keep_their_order_and_their_values_bytes() -> None:
    text = b"{ " + b" , ".join(b'"k\\u0041%d" : 1.%d0' % (number, number) for number in range(1000)) + b" }"

    edited = JsonObject(text).edited({"kA1": None, "kA2": b"[]", "new": b"1"})

    expected = [f'"kA{number}":1.{number}0' for number in range(1000) if number != 1] + ['"new":1']
    expected[1] = '"kA2":[]'
    assert edited.decode() == "{" + ",".join(expected) + "}"


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@settings(_STEADY, max_examples=60)
@given(_objects())
@example('{"a":"[[[["}')
@example('{"\\\\":[{"\\"[":"\\\\\\"["}]}')
@example('{"a":[],"b":[[]],"c":"]]]]"}')
def test_levels_are_counted_outside_of_strings(text: str) -> None:
    depth = _depth(json.loads(text, object_pairs_hook=lambda pairs: {n: value for n, (_, value) in enumerate(pairs)}))

    assert [nests_deeper(text.encode(), levels) for levels in range(depth + 2)] == [True] * depth + [False, False]


@pytest.mark.parametrize("filler", [b'"', b'"[",', b'"\\"]",', b"1,", b'"' + b"x" * 5000 + b'",'])
def test_levels_are_counted_across_a_long_text(filler: bytes) -> None:
    items = filler * 3000 if filler != b'"' else b'"' + b"[" * 10_000 + b'",'
    text = b'{"a":[' + items + b'[[[]]]],"b":[' + items + b"1]}"

    assert json.loads(text)
    assert nests_deeper(text, 4)
    assert not nests_deeper(text, 5)


def test_integers_of_any_size_are_kept() -> None:
    digits = b"1" * 5000

    assert JsonObject(b'{"a":' + digits + b',"b":1}').edited({"b": b"2"}) == b'{"a":' + digits + b',"b":2}'


# ── cost ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _many_members(size: int) -> bytes:
    count = min(size // 12, 4096)
    return b"{" + b",".join(b'"k%d":"%s"' % (n, b"v" * (size // count - 11)) for n in range(count)) + b"}"


def _long_prompt(size: int) -> bytes:
    return json.dumps({"prompt": "x" * size, "stream": True}).encode()


def _key_of_quotes(size: int) -> bytes:
    return b'{"' + b'\\"' * (size // 2) + b'":1}'


def _key_of_backslashes(size: int) -> bytes:
    return b'{"' + b"\\\\" * (size // 2) + b'":1}'


def _space_everywhere(size: int) -> bytes:
    return b"{" + b" " * size + b'"a"' + b"\n" * size + b":" + b" " * size + b"1" + b" " * size + b"}"


def _same_key_again_and_again(size: int) -> bytes:
    return b"{" + b",".join([b'"a":[1,2]'] * (size // 10)) + b"}"


@pytest.mark.parametrize(
    "shape",
    [_many_members, _long_prompt, _key_of_quotes, _key_of_backslashes, _space_everywhere, _same_key_again_and_again],
)
def test_an_edit_costs_no_more_than_in_proportion_to_the_text(shape: Callable[[int], bytes]) -> None:
    def seconds(text: bytes) -> float:
        best = float("inf")
        for _ in range(5):
            started = time.process_time()
            JsonObject(text).edited({"stream": b"false", "max_tokens": b"1"})
            best = min(best, time.process_time() - started)
        return best

    small, large = seconds(shape(25_000)), seconds(shape(400_000))

    assert large < max(100 * small, 0.02)  # 16 times the text; a quadratic cost would be 256 times as high
