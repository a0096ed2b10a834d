"""The I/O that connectors release by: decoders over HTTP, side channels over ZMQ; only ever engines of the fleet."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from extproc import sidechannel
from extproc.enginehttp import EngineAnswer, EngineClient, EngineUnavailable
from extproc.fleet.engines import canonical
from extproc.telemetry.logs import log

if TYPE_CHECKING:
    from extproc.configsections import Release
    from extproc.fleet.engines import Engine
    from extproc.fleet.fleet import Fleet
    from extproc.sidechannel import SideChannels

_FIRST_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 2.0
# How long an endpoint of unknown kind may take to answer an abort before it is asked the other way.
_LEARNING_S: Final = 0.25
# A decoder refuses in some 10 ms. One that takes longer is not waited for alone.
_SLOW_S: Final = 0.2
_FOREIGN_HOSTS_TOLD: Final = 100
# A decoder that has to shake hands with a prefiller before it can tell it anything does so beside its engine's steps,
# and tells it at the next step: an idle one has none before the next request. A handshake takes some 0.2 s.
_REMINDERS_S: Final = (0.25, 1.0)
# Not too often: a prefiller logs an error for each notification of what it has freed.
_ACQUAINTED_S: Final = 600.0
_MAX_ACQUAINTED: Final = 10_000

AscendMessage = Literal["abort", "done"]


class Backoff:
    """Endpoints that did not answer, and when they may be asked again."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}

    def closed(self, endpoint: str) -> bool:
        """Whether to leave the endpoint alone for now."""
        return endpoint in self._failures and time.monotonic() < self._failures[endpoint][1]

    def note(self, endpoint: str, *, answered: bool) -> None:
        if answered:
            self._failures.pop(endpoint, None)
            return
        count = self._failures.get(endpoint, (0, 0.0))[0] + 1
        self._failures[endpoint] = count, time.monotonic() + min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**count)


class ReleaseWays:
    """What a connector's ``release`` may use."""

    def __init__(self, settings: Release, fleet: Fleet, client: EngineClient, channels: SideChannels) -> None:
        self._settings = settings
        self._fleet = fleet
        self._client = client
        self._channels = channels
        self._backoff = Backoff()
        self._ascend_messages: dict[str, AscendMessage] = {}
        self._foreign_hosts: set[str] = set()
        self._acquainted: dict[tuple[str, str], float] = {}
        self._reminders: set[asyncio.Task[None]] = set()
        fleet.on_change(self._forget_engines_gone)

    def prefiller(self, endpoint: str) -> Engine | None:
        """The fleet's prefiller at ``ip:port``."""
        return self._fleet.prefiller_at(endpoint)

    def abort_port(self, prefiller: str) -> int | None:
        """The port of extproc's vLLM plugin on this prefiller, where it has one."""
        engine = self.prefiller(prefiller)
        return engine.abort_port if engine else None

    def side_channel(self, prefiller: str, host: str | None, port: int) -> str | None:
        """The ZMQ address of a prefiller's side channel; None where ``host`` does not belong to that prefiller."""
        engine = self.prefiller(prefiller)
        if engine is None or engine.address is None:
            return None
        host = canonical(host or "") or host
        if host is not None and host not in _hosts(engine):
            if host not in self._foreign_hosts and len(self._foreign_hosts) < _FOREIGN_HOSTS_TOLD:
                self._foreign_hosts.add(host)
                hint = "if it is one of its hosts, list it in side_channel_hosts"
                log.warning("prefiller names a host that is not its own", engine=engine.name, host=host, hint=hint)
            return None
        return sidechannel.endpoint(host or engine.address, port)

    def _forget_engines_gone(self) -> None:
        """Close the sockets of engines that have left the fleet; a late release may still open one again."""
        hosts = {host for engine in self._fleet.engines("prefill") for host in _hosts(engine)}
        for address in self._channels.addresses:
            host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            if host not in hosts:
                self._channels.forget(address)
                self._ascend_messages.pop(address, None)

    async def ask_decoders(
        self, prefiller: str, path: str, body: bytes, *, engine_id: str | None = None
    ) -> AsyncGenerator[EngineAnswer]:
        """POST to decoders that this prefiller hands over to until the caller has had enough; yields their answers.

        The next one is asked when the one before has failed, has not given what the caller wants, or is slow: a
        decoder that hangs may be the reason for the release. Close the iterator to end the calls that still run.

        With the prefiller's ``engine_id``, a decoder that answers is asked again in the background, unless that was
        done lately: it may never have met this engine.
        """

        async def ask(decoder: Engine) -> EngineAnswer | None:
            answer = await self._post(decoder, path, body)
            if answer is not None and engine_id is not None:
                self._remind(decoder, path, body, engine_id)
            return answer

        decoders = deque(self._decoders_for(prefiller))
        calls: set[asyncio.Task[EngineAnswer | None]] = set()
        try:
            while decoders or calls:
                if decoders:
                    calls.add(asyncio.create_task(ask(decoders.popleft()), name="release by decode"))
                done, calls = await asyncio.wait(
                    calls, timeout=_SLOW_S if decoders else None, return_when=asyncio.FIRST_COMPLETED
                )
                for call in done:
                    if (answer := call.result()) is not None:
                        yield answer
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _remind(self, decoder: Engine, path: str, body: bytes, engine_id: str) -> None:
        pair = decoder.url, engine_id
        if time.monotonic() < self._acquainted.get(pair, 0.0):
            return

        async def remind() -> None:
            asked_at = time.monotonic()
            for after_s in _REMINDERS_S:
                await asyncio.sleep(asked_at + after_s - time.monotonic())
                if await self._post(decoder, path, body) is None:
                    return
            if len(self._acquainted) >= _MAX_ACQUAINTED:
                self._acquainted.clear()
            self._acquainted[pair] = time.monotonic() + _ACQUAINTED_S

        task = asyncio.create_task(remind(), name="release reminder")
        self._reminders.add(task)
        task.add_done_callback(self._reminders.discard)

    async def flush(self, deadline: float) -> None:
        """Finish by ``deadline`` (``time.monotonic()``) what runs in the background; what is left is dropped."""
        while self._reminders and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._reminders), timeout=remaining)
        for task in self._reminders:
            task.cancel()
        await asyncio.gather(*self._reminders, return_exceptions=True)

    def _decoders_for(self, prefiller: str) -> list[Engine]:
        """All that could do it, those first that should answer at once. A draining or full decoder can say no, too."""
        pairing = engine.pairing if (engine := self.prefiller(prefiller)) else None
        now = time.monotonic()
        decoders = [e for e in self._fleet.engines("decode") if e.address is not None and e.pairing == pairing]
        random.shuffle(decoders)
        return sorted(
            decoders,
            key=lambda e: (self._backoff.closed(e.url), e.health.probed_ok is False, e.health.ejected(now)),
        )

    async def _post(self, engine: Engine, path: str, body: bytes) -> EngineAnswer | None:
        headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
        if engine.api_key:
            headers.append((b"authorization", b"Bearer " + engine.api_key.encode()))
        try:
            answer = await self._client.post(engine.url + path, body, headers, timeout_s=self._settings.timeout_s)
        except EngineUnavailable:
            self._backoff.note(engine.url, answered=False)
            return None
        self._backoff.note(engine.url, answered=True)
        return answer

    async def ask_side_channels(self, addresses: Sequence[str], payload: bytes) -> list[bytes | None]:
        """Send to all at once; a reply, or None, for each."""
        return await asyncio.gather(*(self._ask(address, payload, self._settings.timeout_s) for address in addresses))

    async def release_on_ascend(self, addresses: Sequence[str], request_id: str) -> list[bytes | None]:
        """Tell each rank in the way it understands; a reply, or None, for each."""
        return await asyncio.gather(*(self._release_on_rank(address, request_id) for address in addresses))

    async def _release_on_rank(self, address: str, request_id: str) -> bytes | None:
        """Stock listeners do not answer an abort. What an endpoint understands is learnt, and forgotten with it."""
        learning = self._settings.ascend_message == "auto"
        message = self._ascend_messages.get(address) if learning else self._settings.ascend_message
        abort, done = sidechannel.abort_request(request_id), sidechannel.done_receiving(request_id)
        if learning and message is None and not self._backoff.closed(address):
            patience = min(_LEARNING_S, self._settings.timeout_s)
            reply = await self._channels.request(address, abort, timeout_s=patience)
            if reply is not None:
                self._ascend_messages[address] = "abort"
                return reply
        reply = await self._ask(address, abort if message == "abort" else done, self._settings.timeout_s)
        if learning and reply is None:
            self._ascend_messages.pop(address, None)  # another release may be running there by now
        elif learning and message is None:
            self._ascend_messages[address] = "done"
        return reply

    async def _ask(self, address: str, payload: bytes, timeout_s: float) -> bytes | None:
        if self._backoff.closed(address):
            return None
        reply = await self._channels.request(address, payload, timeout_s=timeout_s)
        self._backoff.note(address, answered=reply is not None)
        return reply


def _hosts(engine: Engine) -> tuple[str | None, ...]:
    further = (canonical(host) or host for host in engine.side_channel_hosts)
    return engine.address, engine.host, *further
