"""From tokens to the text of one choice: incremental decoding, stop strings, log probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from extproc.sim.request import Output, Status
from extproc.sim.tokens import EOS_ID, Detokenizer, decode, token_bytes


@dataclass(frozen=True)
class Delta:
    """What one token adds. ``tokens`` and ``logprobs`` belong to it even where ``text`` is held back or empty."""

    text: str
    token: int
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[tuple[int, float]] | None


@dataclass
class Choice:
    """One choice of an answer as it grows."""

    stop: list[str]
    keep_stop: bool
    min_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _sent: int = 0
    _detokenizer: Detokenizer = field(default_factory=Detokenizer)

    def add(self, output: Output) -> Delta:
        """Take one token. A stop string ends the choice before the engine does: then ``finish_reason`` is "stop"."""
        self.tokens.append(output.token)
        if output.logprobs is not None:
            self.logprobs.append(output.logprobs)
        before = len(self.text)
        last = output.status is not None
        self.text += self._detokenizer.add(output.token, final=last)
        if output.status is not None:
            self.finish_reason = output.status.value
            self.stop_reason = output.stop_reason
        if output.status is not Status.STOPPED and len(self.tokens) > self.min_tokens:
            self._look_for_stop(before)
        held = 0 if self.finish_reason or not self.stop or self.keep_stop else max(map(len, self.stop)) - 1
        end = max(self._sent, len(self.text) - held)
        delta = Delta(self.text[self._sent : end], output.token, self.finish_reason, self.stop_reason, output.logprobs)
        self._sent = end
        return delta

    def _look_for_stop(self, before: int) -> None:
        for stop in self.stop:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                self.text = self.text[: at + len(stop) if self.keep_stop else at]
                self.finish_reason, self.stop_reason = Status.STOPPED.value, stop
                return


def _named(token: int) -> tuple[str, list[int]]:
    text = "<|im_end|>" if token == EOS_ID else decode([token])
    return text, list(text.encode() if token == EOS_ID else token_bytes(token))


def chat_logprobs(steps: list[list[tuple[int, float]]], top: int) -> dict[str, Any]:
    """OpenAI's chat shape: one entry for each token, with ``top`` alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = _named(token)
        return {"token": text, "logprob": logprob, "bytes": raw}

    return {
        "content": [
            {**entry(*ranked[0]), "top_logprobs": [entry(*candidate) for candidate in ranked[:top]]} for ranked in steps
        ]
    }


def completion_logprobs(steps: list[list[tuple[int, float | None]]], offset: int) -> dict[str, Any]:
    """OpenAI's older shape: parallel lists. ``offset`` is the first token's place in the text."""
    offsets, tokens = [], []
    for ranked in steps:
        text, _ = _named(ranked[0][0])
        offsets.append(offset)
        tokens.append(text)
        offset += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [ranked[0][1] for ranked in steps],
        "tokens": tokens,
        "top_logprobs": [
            None if ranked[0][1] is None else {_named(token)[0]: logprob for token, logprob in ranked}
            for ranked in steps
        ],
    }
