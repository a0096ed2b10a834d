"""The pool of KV blocks: who holds which, what is in them, and which can be found again by their prefix.

Rules of vLLM's block pool that show outside: block 0 is never handed out; usage is counted without it; a freed block
keeps its content until it is handed out again; a full block can be found by its prefix and is recycled last, a partial
one first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, total: int, *, prefix_caching: bool) -> None:
        self.total = total
        self.content: list[bytes] = [bytes(64)] * total
        self.free_count = total - 1
        self._references = [0] * total
        self._prefix_caching = prefix_caching
        self._partial: deque[int] = deque(range(total - 1, 0, -1))
        """Free blocks without a prefix; the last is handed out first."""
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        """Free blocks with a prefix; the oldest is handed out first, and only when no other is left."""
        self._by_prefix: dict[bytes, int] = {}
        self._prefix_of: dict[int, bytes] = {}

    @property
    def usage(self) -> float:
        """From 0 to 1, as ``vllm:kv_cache_usage_perc`` counts it."""
        return 1.0 - self.free_count / (self.total - 1)

    @property
    def used(self) -> int:
        return self.total - 1 - self.free_count

    def find(self, prefixes: Sequence[bytes]) -> list[int]:
        """The longest run of cached blocks for a prompt's block prefixes. Nothing is taken yet."""
        found = []
        for prefix in prefixes:
            block = self._by_prefix.get(prefix)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, cached: Sequence[int], fresh: int) -> list[int] | None:
        """Hold ``cached`` blocks and ``fresh`` new ones; None, and nothing taken, when there are not enough."""
        revived = sum(self._references[block] == 0 for block in cached)
        if revived + fresh > self.free_count:
            return None
        for block in cached:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1
        self.free_count -= revived + fresh
        return [*cached, *(self._fresh() for _ in range(fresh))]

    def _fresh(self) -> int:
        if self._partial:
            block = self._partial.pop()
        else:
            block, prefix = self._cached.popitem(last=False)
            del self._by_prefix[prefix], self._prefix_of[block]
        self._references[block] = 1
        return block

    def fill(self, block: int, content: bytes, *, prefix: bytes | None = None) -> None:
        """Write a block. A full block is filed under its ``prefix``, unless another block already is."""
        self.content[block] = content
        if (
            prefix is not None
            and self._prefix_caching
            and prefix not in self._by_prefix
            and block not in self._prefix_of
        ):
            self._by_prefix[prefix] = block
            self._prefix_of[block] = prefix

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks up, last block of a request first, as vLLM does. Their content stays until they are reused."""
        partial = []
        for block in reversed(list(blocks)):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self.free_count += 1
            prefix = self._prefix_of.get(block)
            if prefix is None:
                partial.append(block)
            else:
                self._cached[block] = prefix
        self._partial.extend(reversed(partial))
