"""One generation request as the engine sees it, and what it gives back."""

from __future__ import annotations

import asyncio
import enum
import secrets
from dataclasses import dataclass, field
from typing import Any

from extproc.sim.tokens import Sampler


class EngineDead(Exception):
    """The engine core is gone; the server follows it."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class Status(enum.Enum):
    """Why a request ended, in the words of vLLM's scheduler."""

    LENGTH_CAPPED = "length"
    STOPPED = "stop"
    ABORTED = "abort"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What shapes a generation. ``max_tokens`` is already resolved; ``logprobs`` counts alternatives."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """One token of one request. ``logprobs`` holds (token, log probability), the chosen token first."""

    token: int
    status: Status | None = None
    stop_reason: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    logprobs: list[tuple[int, float]] | None = None


@dataclass(eq=False, kw_only=True)
class EngineRequest:
    id: str
    prompt: list[int]
    sampling: Sampling
    kv_transfer_params: dict[str, Any] | None = None
    choice: int = 0

    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache or pulled, when generation began."""
    pulled: bool = False
    """The prompt's KV came from a prefiller."""
    leaks: bool = False
    """Its blocks wait for a transfer that nobody started, so they are never given back."""
    sampler: Sampler | None = None
    phase: str = "waiting"
    """waiting, loading, prefill, decode, done"""
    task: asyncio.Task[None] | None = None
    outputs: OutputQueue = field(default_factory=asyncio.Queue)
    """Shared by the requests of one HTTP request, which are told apart by ``index``."""
    index: int = 0

    @property
    def is_remote_decode(self) -> bool:
        """The prefill leg: this engine's blocks are for another engine."""
        return bool(self.kv_transfer_params and self.kv_transfer_params.get("do_remote_decode"))

    def emit(self, output: Output | EngineDead) -> None:
        self.outputs.put_nowait((self.index, output))


OutputQueue = asyncio.Queue[tuple[int, Output | EngineDead]]


def internal_id(external: str) -> str:
    """vLLM adds eight random hex digits to the id of each engine request."""
    return f"{external}-{secrets.token_hex(4)}"
