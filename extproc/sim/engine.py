"""The engine core: admission, prefill, decode, and the KV blocks that a request holds. No HTTP and no sockets here.

A request waits for a running slot and for the blocks of its whole prompt, in order of arrival. A prefill for another
engine leaves its blocks pinned; they count as used until they are pulled, released, or their lease ends.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from extproc.sim.blocks import BlockPool
from extproc.sim.config import SimConfig
from extproc.sim.metrics import Metrics
from extproc.sim.request import EngineDead, EngineRequest, Output, Status
from extproc.sim.tokens import EOS_ID, Sampler, kv_block, prefixes

logger = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The prompt's KV could not be pulled from the prefiller."""


class Load(enum.Enum):
    """Where an admitted request's KV comes from."""

    COMPUTED = "prefilled here"
    PULLED = "pulled from a prefiller"
    NEVER = "expected, but nobody asked for it"


class KvConnector(Protocol):
    """How an engine moves KV blocks: vLLM's connector, its scheduler and worker halves in one."""

    def queued(self, request: EngineRequest) -> None:
        """A request entered the waiting queue."""

    def scheduled(self, request: EngineRequest) -> Load:
        """A request got its blocks: where does its KV come from? Raises AssertionError where the real one does."""

    async def load(self, request: EngineRequest, blocks: list[int]) -> None:
        """Fill ``blocks``, the last ones of the prompt, from the prefiller. Raises LoadFailed."""

    def finished(self, request: EngineRequest, status: Status) -> tuple[float | None, dict[str, Any] | None]:
        """A request ended: for how many seconds its blocks stay pinned, and what the answer tells the decoder."""

    def expired(self, request_id: str) -> None:
        """A pin's time is up; its blocks are being freed."""


@dataclass
class Pin:
    """Blocks that a finished prefill holds for its decoder. ``expires`` is loop time."""

    blocks: list[int]
    expires: float
    timer: asyncio.TimerHandle


class Engine:
    def __init__(self, config: SimConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.pool = BlockPool(config.blocks, prefix_caching=config.prefix_caching)
        self.connector: KvConnector
        self.pins: dict[str, Pin] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.death: str | None = None
        """Why the engine core died."""
        self.on_death: Callable[[], None] = lambda: None
        self._waiting: deque[tuple[EngineRequest, asyncio.Future[None]]] = deque()
        self._slots = config.max_num_seqs
        self._compute = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return sum(request.phase in ("prefill", "decode") for request in self.requests.values())

    @property
    def waiting(self) -> int:
        return sum(request.phase in ("waiting", "loading") for request in self.requests.values())

    @property
    def is_stepping(self) -> bool:
        """An engine steps while it has requests, or blocks pinned for somebody. Its workers act at steps only."""
        return bool(self.requests or self.pins)

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its outputs come through its queue. Raises EngineDead."""
        if self.death:
            raise EngineDead
        self.requests[request.id] = request
        request.task = asyncio.create_task(self._run(request), name=f"sim {request.id}")
        self._tasks.add(request.task)
        request.task.add_done_callback(self._tasks.discard)

    def abort(self, request: EngineRequest) -> None:
        """End a request that nobody waits for any more. A no-op once it has ended."""
        if request.task is not None and request.id in self.requests:
            request.task.cancel()

    async def _run(self, request: EngineRequest) -> None:
        status: Status | None = None
        try:
            self.connector.queued(request)
            while status is None:
                await self._admit(request)
                status = await self._generate(request)
        except asyncio.CancelledError:
            if not self.death:
                self._end(request, Status.ABORTED)
        except EngineDead:
            pass
        except LoadFailed:
            self._end(request, Status.ERROR)
            request.emit(Output(token=EOS_ID, status=Status.ERROR))
        except AssertionError as error:
            self.die(f"AssertionError: {error}")

    async def _admit(self, request: EngineRequest) -> None:
        """Wait for a running slot and for the blocks of all tokens so far."""
        request.phase = "waiting"
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((request, admitted))
        self._schedule()
        try:
            await admitted
        except asyncio.CancelledError:
            if (request, admitted) in self._waiting:
                self._waiting.remove((request, admitted))
            raise

    def _schedule(self) -> None:
        while self._waiting and self._slots:
            request, admitted = self._waiting[0]
            tokens = [*request.prompt, *request.generated]
            # The last token is always computed: its logits are what sampling needs.
            cached = self.pool.find(prefixes(tokens[:-1], self.config.block_size))
            blocks = self.pool.take(cached, math.ceil(len(tokens) / self.config.block_size) - len(cached))
            if blocks is None:
                return
            self._waiting.popleft()
            if admitted.cancelled():
                self.pool.release(blocks)
                continue
            self._slots -= 1
            request.blocks = blocks
            request.cached_tokens = len(cached) * self.config.block_size
            request.phase = "prefill"
            admitted.set_result(None)

    def _give_back(self, request: EngineRequest, *, keep_blocks: bool) -> None:
        if request.phase != "waiting":
            self._slots += 1
        if not keep_blocks:
            self.pool.release(request.blocks)
            request.blocks = []
        self._schedule()

    # -- prefill and decode --------------------------------------------------------------------------------------

    async def _generate(self, request: EngineRequest) -> Status | None:
        """From admission to the end, or None when the request was preempted and has to be admitted again."""
        source = self.connector.scheduled(request)
        self.metrics.prefix_cache(len(request.prompt), request.cached_tokens)
        if source is Load.COMPUTED:
            await self._prefill(request)
        elif source is Load.PULLED:
            await self._load(request)
        else:
            request.phase = "loading"
            request.leaks = True
            await asyncio.get_running_loop().create_future()
        prompt_blocks = request.blocks[: math.ceil(len(request.prompt) / self.config.block_size)]
        if request.sampler is None:
            request.sampler = Sampler(
                self.config.seed,
                (self.pool.content[block] for block in prompt_blocks),
                sampling_seed=request.sampling.seed,
                choice=request.choice,
                eos_after=self.config.eos_after,
            )
        request.phase = "decode"
        return await self._decode(request)

    async def _prefill(self, request: EngineRequest) -> None:
        tokens = [*request.prompt, *request.generated]
        async with self._compute:
            await asyncio.sleep((len(tokens) - request.cached_tokens) * self.config.prefill_us_per_token / 1e6)
        self._fill(request, tokens, request.cached_tokens // self.config.block_size)

    async def _load(self, request: EngineRequest) -> None:
        size = self.config.block_size
        first = request.cached_tokens // size
        request.phase = "loading"
        # A cancelled pull is not called back: it writes into these blocks until it is done.
        pull = asyncio.ensure_future(self.connector.load(request, request.blocks[first:]))
        try:
            await asyncio.shield(pull)
        except asyncio.CancelledError:
            if self.death:
                pull.cancel()
            else:
                await asyncio.wait([pull])
                pull.exception()
            raise
        except LoadFailed as failure:
            if self.config.load_failure_policy == "fail":
                raise
            logger.warning("%s: %s; the prompt is computed here", request.id, failure)
            request.phase = "prefill"
            await self._prefill(request)
            return
        names = prefixes(request.prompt, size)
        for index in range(first, len(request.blocks)):
            # Filed under the prompt that was asked for, whatever was pulled, as vLLM does.
            self.pool.fill(
                request.blocks[index],
                self.pool.content[request.blocks[index]],
                prefix=names[index] if index < len(names) else None,
            )
        request.pulled = True
        request.cached_tokens = len(request.prompt)
        request.phase = "decode"
        await self._step(time.monotonic())

    def _fill(self, request: EngineRequest, tokens: list[int], first: int) -> None:
        size = self.config.block_size
        names = prefixes(tokens, size)
        for index in range(first, len(request.blocks)):
            previous = self.pool.content[request.blocks[index - 1]] if index else b""
            content = kv_block(self.config.seed, previous, tokens[index * size : (index + 1) * size])
            self.pool.fill(request.blocks[index], content, prefix=names[index] if index < len(names) else None)

    async def _step(self, since: float) -> float:
        """One decode step that began at ``since``; returns when the next one begins."""
        due = since + self.config.decode_ms_per_token / 1e3
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        return due

    async def _decode(self, request: EngineRequest) -> Status | None:
        assert request.sampler is not None
        sampling, size = request.sampling, self.config.block_size
        due = time.monotonic()
        while True:
            step = len(request.generated)
            may_stop = step >= sampling.min_tokens
            token = request.sampler.at(step, allow_eos=may_stop and not sampling.ignore_eos)
            request.generated.append(token)
            status: Status | None = None
            stop_reason: int | None = None
            if token == EOS_ID:
                status = Status.STOPPED
            elif may_stop and token in sampling.stop_token_ids:
                status, stop_reason = Status.STOPPED, token
            elif len(request.generated) >= sampling.max_tokens:
                status = Status.LENGTH_CAPPED
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = request.sampler.logprobs(step, token, sampling.logprobs)
            params = None if status is None else self._end(request, status)
            request.emit(
                Output(
                    token=token, status=status, stop_reason=stop_reason, kv_transfer_params=params, logprobs=logprobs
                )
            )
            self.metrics.generated(1)
            if status is not None:
                return status
            # The token just sampled gets its KV in the next step, which is when it may need another block.
            if len(request.prompt) + len(request.generated) > len(request.blocks) * size:
                more = self.pool.take([], 1)
                if more is None:
                    self.metrics.preempted()
                    self._give_back(request, keep_blocks=False)
                    return None
                request.blocks += more
            due = await self._step(due)
            computed = len(request.prompt) + len(request.generated)
            if computed % size == 0:
                self._fill(request, [*request.prompt, *request.generated], computed // size - 1)

    def _end(self, request: EngineRequest, status: Status) -> dict[str, Any] | None:
        """Free or pin what a request holds; returns the answer's ``kv_transfer_params``."""
        del self.requests[request.id]
        try:
            ttl, params = self.connector.finished(request, status)
        except AssertionError as error:
            self.die(f"AssertionError: {error}")
            raise EngineDead from None
        pinned = ttl is not None and bool(request.blocks)
        if pinned:
            assert ttl is not None
            self.pin(request.id, request.blocks, ttl)
        self._give_back(request, keep_blocks=pinned or request.leaks)
        request.phase = "done"
        self.metrics.finished(status, len(request.prompt))
        return params

    # -- pinned blocks -------------------------------------------------------------------------------------------

    def pin(self, request_id: str, blocks: list[int], ttl: float) -> None:
        loop = asyncio.get_running_loop()
        expires = loop.time() + ttl
        self.pins[request_id] = Pin(blocks, expires, loop.call_at(expires, self._expire, request_id))

    def extend(self, request_id: str, ttl: float) -> None:
        """A heartbeat: the pin lasts at least ``ttl`` seconds from now."""
        pin = self.pins.get(request_id)
        loop = asyncio.get_running_loop()
        if pin is not None and (expires := loop.time() + ttl) > pin.expires:
            pin.timer.cancel()
            pin.expires, pin.timer = expires, loop.call_at(expires, self._expire, request_id)

    def sent(self, request_id: str) -> None:
        """All workers report that a request's blocks are no longer needed.

        The real scheduler asserts that it knows the request and that the request has finished; else the core dies.
        """
        pin = self.pins.pop(request_id, None)
        if pin is None:
            state = "is_finished()" if request_id in self.requests else "req_id in self.requests"
            self.die(f"AssertionError: {state}, for {request_id}")
            return
        pin.timer.cancel()
        self.pool.release(pin.blocks)
        self._schedule()

    def _expire(self, request_id: str) -> None:
        logger.warning("Releasing expired KV blocks for request %s", request_id)
        pin = self.pins.pop(request_id)
        self.connector.expired(request_id)
        self.pool.release(pin.blocks)
        self._schedule()

    # -- life ----------------------------------------------------------------------------------------------------

    def die(self, reason: str) -> None:
        """The core is gone: every request ends with EngineDead, nothing new is accepted."""
        if self.death:
            return
        self.death = reason
        logger.error("the engine core died: %s", reason)
        self.stop()
        self.on_death()

    def stop(self) -> None:
        """End everything, without the courtesies that a finished request gets."""
        self.death = self.death or "stopped"
        for pin in self.pins.values():
            pin.timer.cancel()
        for request in list(self.requests.values()):
            request.emit(EngineDead())
            if request.task is not None:
                request.task.cancel()
        self.requests.clear()
        self._waiting.clear()

    async def stopped(self) -> None:
        """After ``stop()``: wait until nothing runs any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
