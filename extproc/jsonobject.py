"""The top-level members of a JSON object, edited without touching any other byte.

Nothing but the keys that an edit names changes: numbers keep their spelling, keys their order, strings their escapes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_key = msgspec.json.Decoder(str).decode
_WHITESPACE: Final = b" \t\n\r"


class NotAnObject(ValueError):
    """The text is JSON, but not an object."""


class BadJson(ValueError):
    """The text is not JSON by RFC 8259. (Python's json module, which engines use, may still accept it.)"""


class TooDeep(BadJson):
    """The text nests deeper than the parser goes (about 1,000 levels)."""


class JsonObject:
    """A parsed JSON object: ``members`` maps each key to the bytes of its value (the last one, where a key repeats)."""

    __slots__ = ("_spans", "members", "text")

    def __init__(self, text: bytes) -> None:
        """Raises BadJson or NotAnObject. Values are checked for syntax, not for UTF-8."""
        try:
            self.members: dict[str, msgspec.Raw] = _decode_members(text)
        except msgspec.ValidationError as error:
            raise NotAnObject(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadJson(str(error)) from None
        except RecursionError:
            raise TooDeep("nested too deeply") from None
        self.text = text
        self._spans: list[tuple[str, int, int, int]] | bool | None = False

    def __contains__(self, key: str) -> bool:
        return key in self.members

    def raw(self, key: str) -> bytes | None:
        """The value's bytes as they stand in the text, or None where the key is absent."""
        value = self.members.get(key)
        return None if value is None else bytes(value)

    def edited(self, edits: Mapping[str, bytes | None]) -> bytes:
        """The text with some members replaced (bytes: the new value, added at the end where absent) or dropped (None).

        Where a key repeats in the text, each key is written once, with its last value, as engines read it.
        """
        if self._spans is False:
            self._spans = self._walk()
        if not self._spans:  # repeated keys, or no members at all
            return self._rebuilt(edits)
        view = memoryview(self.text)
        spans: list[tuple[str, int, int, int]] = self._spans  # type: ignore[assignment]
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
                parts += (b"," if kept else b"", json.dumps(key).encode(), b":", new)
                kept = True
        parts.append(view[end_before:])
        return b"".join(parts)

    def _rebuilt(self, edits: Mapping[str, bytes | None]) -> bytes:
        members: dict[str, bytes | msgspec.Raw | None] = {**self.members, **edits}
        return b"{" + b",".join(_member(key, value) for key, value in members.items() if value is not None) + b"}"

    def _walk(self) -> list[tuple[str, int, int, int]] | None:
        """Each member's (key, start, start of the value, end), or None where a key repeats.

        The decoder has already validated the text and knows every value's length, so a walk only steps over keys and
        values: its cost does not grow with the size of the values.
        """
        text, spans, seen = self.text, [], set()
        position = _skip(text, _skip(text, 0) + 1)
        while text[position] != 0x7D:  # }
            start = position
            closing = text.index(b'"', start + 1)
            while _escaped(text, closing):
                closing = text.index(b'"', closing + 1)
            token = text[start : closing + 1]
            key = _decode_key(token) if b"\\" in token else token[1:-1].decode()
            value_start = _skip(text, _skip(text, closing + 1) + 1)
            raw = bytes(self.members[key])
            end = value_start + len(raw)
            if key in seen or not text.startswith(raw, value_start):
                return None
            position = _skip(text, end)
            if text[position] not in b",}":
                return None
            seen.add(key)
            spans.append((key, start, value_start, end))
            if text[position] == 0x2C:  # ,
                position = _skip(text, position + 1)
        return spans


def _member(key: str, value: bytes | msgspec.Raw) -> bytes:
    return json.dumps(key).encode() + b":" + bytes(value)


def _skip(text: bytes, position: int) -> int:
    while text[position] in _WHITESPACE:
        position += 1
    return position


def _escaped(text: bytes, quote: int) -> bool:
    backslashes = 0
    while text[quote - 1 - backslashes] == 0x5C:
        backslashes += 1
    return backslashes % 2 == 1
