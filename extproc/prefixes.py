"""Which decoder has how much of a prompt cached: an estimate, from what this process has sent there.

Engines cache KV by blocks of tokens; known here are the bytes that clients sent. Equal beginnings of prompts, for the
same model, tools and template, are equal tokens. What a decoder generated is cached there too, but not seen here, so a
conversation's next turn counts with what its last turn asked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from extproc.fleet.engines import Engine
from extproc.fleet.fleet import Fleet
from extproc.jsonobject import JsonObject

BLOCK_BYTES: Final = 1024
_BLOCKS_PER_DECODER: Final = 4096
"""About a million tokens: more than most decoders keep, so that a decoder's memory is rarely the longer one."""
_DIGEST_BYTES: Final = 16

_PROMPTS: Final = ("messages", "prompt", "input")
# What else decides about a prompt's first tokens, or keeps caches apart.
_BESIDE_IT: Final = ("model", "tools", "documents", "chat_template", "chat_template_kwargs", "cache_salt")


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt's blocks, each hashed with all that comes before it, so that equal hashes are equal beginnings."""

    blocks: tuple[bytes, ...]
    size: int
    """Bytes of the whole prompt, the last, broken block included."""

    @classmethod
    def of(cls, body: JsonObject) -> Prefix | None:
        """Of a request's prompt as the client spelled it; None where it has none of at least one block."""
        prompt = next((body.members[key] for key in _PROMPTS if key in body.members), None)
        if prompt is None or len(prompt) < BLOCK_BYTES:
            return None
        beside = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for key in _BESIDE_IT:
            beside.update(b"%s\0%s\0" % (key.encode(), body.members.get(key, b"")))
        digest = beside.digest()
        view = memoryview(prompt)
        blocks = []
        for end in range(BLOCK_BYTES, min(len(prompt), BLOCK_BYTES * _BLOCKS_PER_DECODER) + 1, BLOCK_BYTES):
            digest = hashlib.blake2b(view[end - BLOCK_BYTES : end], digest_size=_DIGEST_BYTES, key=digest).digest()
            blocks.append(digest)
        return cls(tuple(blocks), len(prompt))


class DecoderPrefixes:
    """For each decoder the blocks of the prompts that it served last; bounded, and forgotten when it leaves or dies."""

    def __init__(self, fleet: Fleet, blocks_per_decoder: int = _BLOCKS_PER_DECODER) -> None:
        self._fleet = fleet
        self._room = blocks_per_decoder
        self._known: dict[Engine, OrderedDict[bytes, None]] = {}
        fleet.on_change(self._forget_the_dead)

    def note(self, decoder: Engine, prefix: Prefix) -> None:
        """A request with this prompt was completed there."""
        blocks = self._known.setdefault(decoder, OrderedDict())
        # From the end, so that of one prompt the beginning is forgotten last: without it the rest is worth nothing.
        for block in reversed(prefix.blocks):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._room:
            blocks.popitem(last=False)

    def cached_ratio(self, decoder: Engine, prefix: Prefix) -> float:
        """Which share of the prompt, 0 to 1, the decoder is expected to have."""
        blocks = self._known.get(decoder)
        if not blocks:
            return 0.0
        hits = 0
        for block in prefix.blocks:
            if block not in blocks:
                break
            hits += 1
        return hits * BLOCK_BYTES / prefix.size

    def best(self, prefix: Prefix, candidates: Iterable[Engine]) -> tuple[Engine | None, float]:
        """The candidate that has most of the prompt, the first of equals, and how much; None where none has any."""
        best, most = None, 0.0
        for engine in candidates:
            ratio = self.cached_ratio(engine, prefix)
            if ratio > most:
                best, most = engine, ratio
        return best, most

    def _forget_the_dead(self) -> None:
        """An engine that died has lost its cache; one that left is not asked any more."""
        alive = {engine for engine in self._fleet.engines("decode") if engine.health.probed_ok is not False}
        for engine in [engine for engine in self._known if engine not in alive]:
            del self._known[engine]
