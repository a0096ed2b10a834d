"""The simulated model: a fixed tokenizer, KV block contents, and the next token as a pure function of them.

``text → token ids``
    Greedy longest match over a fixed vocabulary of 256 bytes and a few hundred pieces, so any text round-trips.
``token ids → KV block``
    64 bytes that depend on the weights (``seed``), on every token of the block and on the block before it.
``KV blocks, step → token``
    The sampler sees the KV blocks alone. Whoever holds other blocks gets other text.
"""

from __future__ import annotations

import codecs
import re
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

_PIECES = (
    "a all also an and any are as at back be been block but by cache call can client come could count day decode "
    "did do down each engine envoy even every far find first flow for from gate get give go good great had half "
    "hand has have he head her here high him his hold home house how if in into is it its just keep key kind know "
    "land large last layer left lend less let life light like line list little load long look made make man many "
    "map may me mean might mind model more most move much must my name near need never new next no not now number "
    "of off old on once one only open or other our out over own page part path peer place plain point port prefill "
    "put rank read real request rest right road room route run said same say see send sent set she should show side "
    "small so some soon step still stop stream such take tell than that the their them then there these they thing "
    "think this those thought three through time to token too tree turn two under until up us use value very wait "
    "want was water way we week well went were what when where which while who why will wire with word work world "
    "would write year you your café naïve über Ω → 日本 語 ☃ "
).split()
_FRAGMENTS = (
    *(
        "The quick brown fox jumps over the lazy dog Hello system user assistant er in th an re on at en nd ti es "
        "or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea ra ce li ch ll be ma "
        "si om ur . , ! ? : ; "
    ).split(),
    "\n\n",
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_PRINTED = tuple(" " + piece for piece in _PIECES)
VOCABULARY: tuple[bytes, ...] = (
    *(bytes([byte]) for byte in range(256)),
    *dict.fromkeys(piece.encode() for piece in (*_PRINTED, *_FRAGMENTS) if len(piece.encode()) > 1),
)
EOS_ID = len(VOCABULARY) + SPECIALS.index("<|im_end|>")
LONGEST_PIECE = max(map(len, VOCABULARY))
_ID_OF = {piece: number for number, piece in enumerate(VOCABULARY)}
_SPECIAL_ID = {name: len(VOCABULARY) + index for index, name in enumerate(SPECIALS)}
_GENERATED = tuple(_ID_OF[piece.encode()] for piece in _PRINTED)


def _longest(pieces: Iterable[bytes]) -> bytes:
    """A pattern for the longest of some pieces, as a tree of their bytes: tried one by one, they would take ages."""
    tails: dict[bytes, list[bytes]] = {}
    for piece in pieces:
        tails.setdefault(piece[:1], []).append(piece[1:])
    branches = []
    for head, rest in sorted(tails.items()):
        longer = [tail for tail in rest if tail]
        end = b"?" if len(longer) < len(rest) else b""
        branches.append(re.escape(head) + (b"(?:" + _longest(longer) + b")" + end if longer else b""))
    return b"|".join(branches)


_TOKEN = re.compile(_longest(VOCABULARY[256:]) + b"|.", re.DOTALL)


def encode(text: str) -> list[int]:
    """Token ids of a text. Raises UnicodeEncodeError for lone surrogates, which JSON can carry and UTF-8 cannot."""
    return [_ID_OF[piece] for piece in _TOKEN.findall(text.encode())]


def special(name: str) -> int:
    return _SPECIAL_ID[name]


def token_bytes(token: int) -> bytes:
    """What a token adds to the text; special and unknown tokens add nothing."""
    return VOCABULARY[token] if 0 <= token < len(VOCABULARY) else b""


def decode(tokens: Iterable[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


class Detokenizer:
    """Token by token to text. A token that ends inside a character yields an empty string, as vLLM's stream does."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int, *, final: bool = False) -> str:
        return self._decoder.decode(token_bytes(token), final)


def kv_block(seed: int | str, previous: bytes, tokens: Sequence[int]) -> bytes:
    """The content of one KV block: 64 bytes. ``previous`` is that of the block before it, empty for the first."""
    return blake2b(previous + array("q", tokens).tobytes(), key=str(seed).encode(), digest_size=64).digest()


def prefixes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """For each full block of a prompt, a name for the prompt up to its end."""
    names: list[bytes] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        names.append(kv_block("prefix", names[-1] if names else b"", tokens[start : start + block_size]))
    return names


class Sampler:
    """The tokens that follow a prompt: a pure function of the weights, the prompt's KV blocks and the step.

    ``sampling_seed`` is the request's ``seed`` and ``choice`` the index among ``n``; both are ignored when greedy.
    ``eos_after`` is SimConfig's.
    """

    def __init__(
        self,
        seed: int,
        kv: Iterable[bytes],
        *,
        sampling_seed: int | None = None,
        choice: int = 0,
        eos_after: int | None,
    ) -> None:
        digest = blake2b(key=str(seed).encode(), digest_size=32)
        for content in kv:
            digest.update(content)
        if sampling_seed is not None or choice:
            digest.update(f"{sampling_seed}/{choice}".encode())
        self._state = digest.digest()
        self.length = eos_after if eos_after is not None else 32 + self._state[0]

    def at(self, step: int, *, allow_eos: bool = True) -> int:
        """The token at a step (0 is the first)."""
        if allow_eos and step >= self.length:
            return EOS_ID
        drawn = blake2b(self._state, salt=step.to_bytes(8, "little"), digest_size=8).digest()
        return _GENERATED[int.from_bytes(drawn, "little") % len(_GENERATED)]

    def logprobs(self, step: int, token: int, count: int) -> list[tuple[int, float]]:
        """The chosen token and ``count`` others with their log probabilities, best first."""
        best = -0.05 - self._state[step % 32] / 256
        others = (candidate for candidate in _GENERATED if candidate != token)
        return [(candidate, best - 0.5 * rank) for rank, candidate in enumerate((token, *islice(others, count)))]
