"""The top-level members of a JSON object, edited without touching any other byte.

Nothing but the keys that an edit names changes: numbers keep their spelling, keys their order, strings their escapes.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import accumulate
from typing import Final

import msgspec

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode

_KEY: Final = re.compile(rb'[ \t\n\r]*+("(?:[^"\\]++|\\.)*+")[ \t\n\r]*+:[ \t\n\r]*+')
_SEPARATOR: Final = re.compile(rb"[ \t\n\r]*+([,}])")

# A request with more is refused: to read and to edit one costs much more than its bytes would suggest.
_MAX_MEMBERS: Final = 4096

# No request has that many either; beyond it, bytes between the members are given up for speed.
_MAX_MEMBERS_WALKED: Final = 256

_BRACKETS: Final = b"[{]}"
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(_BRACKETS))
_OPENS, _CLOSES = b"\x01", b"\xff"  # +1 and -1 as signed bytes
_STEPS: Final = bytes.maketrans(_BRACKETS, 2 * _OPENS + 2 * _CLOSES)
_BLOCK_BYTES: Final = 4096

_Span = tuple[str, int, int, int]
"""A member's key, and the offsets of its start, of its value, and of its end."""


class NotAnObject(ValueError):
    """The text is JSON, but not an object."""


class BadJson(ValueError):
    """The text is not JSON in UTF-8, or escapes half a surrogate pair.

    Engines parse with Python's json module, which takes more: NaN, lone surrogates, a BOM, UTF-16 and UTF-32.
    """


class TooDeep(BadJson):
    """The text nests deeper than the interpreter's recursion limit allows (about 1,000 levels)."""


def nests_deeper(text: bytes, levels: int) -> bool:
    """Whether valid JSON in UTF-8 nests deeper than that; ``{}`` is one level. Costs next to nothing for most texts."""
    if text.count(b"[") + text.count(b"{") <= levels:
        return False
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # then every quote begins or ends a string
    depth, inside = 0, 0
    for start in range(0, len(text), _BLOCK_BYTES):
        parts = text[start : start + _BLOCK_BYTES].split(b'"')
        steps = b"".join(parts[inside::2]).translate(_STEPS, _NOT_BRACKETS)
        inside ^= (len(parts) - 1) & 1
        opened = steps.count(_OPENS)
        if depth + opened > levels and max(accumulate(array("b", steps), initial=depth)) > levels:
            return True
        depth += opened - (len(steps) - opened)
    return False


class TooManyMembers(BadJson):
    """The object has more than 4,096 members."""


class JsonObject:
    """A parsed JSON object: ``members`` maps each key to the text of its value (the last one, where a key repeats)."""

    __slots__ = ("_spans", "members", "text")

    def __init__(self, text: bytes) -> None:
        """Raises BadJson (TooDeep, TooManyMembers) or NotAnObject. Keys must be UTF-8; in values only the
        syntax is checked."""
        try:
            self.members: dict[str, msgspec.Raw] = _decode_members(text)
        except msgspec.ValidationError as error:
            raise NotAnObject(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadJson(str(error)) from None
        except RecursionError:
            raise TooDeep("nested too deeply") from None
        if len(self.members) > _MAX_MEMBERS:
            raise TooManyMembers(f"more than {_MAX_MEMBERS} members")
        self.text = text
        self._spans: list[_Span] | None = None

    def __contains__(self, key: str) -> bool:
        return key in self.members

    def raw(self, key: str) -> bytes | None:
        """The value's bytes as they stand in the text, or None where the key is absent."""
        value = self.members.get(key)
        return None if value is None else bytes(value)

    def edited(self, edits: Mapping[str, bytes | None]) -> bytes:
        """The text with some members replaced (bytes: the new value, added at the end where absent) or dropped (None).

        Where a key repeats in the text, each key is written once, with its last value, as engines read it; such a text
        keeps the bytes of its values only, as does one with hundreds of members.
        """
        if self._spans is None:
            self._spans = self._walk()
        if not self._spans:
            return self._rebuilt(edits)
        view, spans = memoryview(self.text), self._spans
        parts: list[bytes | memoryview] = [view[: spans[0][1]]]
        kept = False
        end_before = spans[0][1]
        for key, start, value_start, end in spans:
            new = edits.get(key, view)
            if new is not None:
                if kept:
                    parts.append(view[end_before:start])  # the comma and the white space around it
                if new is view:
                    parts.append(view[start:end])
                else:
                    parts += (view[start:value_start], new)
                kept = True
            end_before = end
        for key, new in edits.items():
            if new is not None and key not in self.members:
                parts += (b"," if kept else b"", _encode(key), b":", new)
                kept = True
        parts.append(view[end_before:])
        return b"".join(parts)

    def _rebuilt(self, edits: Mapping[str, bytes | None]) -> bytes:
        members = dict(self.members)
        for key, new in edits.items():
            if new is None:
                members.pop(key, None)
            else:
                members[key] = msgspec.Raw(new)
        return _encode(members)

    def _walk(self) -> list[_Span]:
        """Where each member stands in the text; empty where a key repeats, or where there are too many.

        The decoder has already validated the text and knows every value's length, so a walk only steps over keys and
        values.
        """
        if len(self.members) > _MAX_MEMBERS_WALKED:
            return []
        text, spans, seen = self.text, list[_Span](), set[str]()
        position, last = text.index(b"{") + 1, not self.members
        while not last:
            found = _KEY.match(text, position)
            assert found is not None  # as the decoder has found
            token = found[1]
            key = _decode_key(token) if b"\\" in token else token[1:-1].decode()
            value_start = found.end()
            raw = bytes(self.members[key])
            end = value_start + len(raw)
            if key in seen or not text.startswith(raw, value_start):
                return []
            separator = _SEPARATOR.match(text, end)
            if separator is None:  # a repeated key's last value happens to begin like this one: 1, 12
                return []
            seen.add(key)
            spans.append((key, found.start(1), value_start, end))
            position, last = separator.end(), separator[1] == b"}"
        return spans
