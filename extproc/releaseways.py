"""The I/O that connectors release by: decoders over HTTP, side channels over ZMQ; only ever engines of the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

from extproc import sidechannel
from extproc.enginehttp import EngineAnswer, EngineClient, EngineUnavailable

if TYPE_CHECKING:
    from extproc.config import Release
    from extproc.fleet.engines import Engine
    from extproc.fleet.fleet import Fleet
    from extproc.sidechannel import SideChannels

_FIRST_BACKOFF_S: Final = 0.1
_MAX_BACKOFF_S: Final = 2.0
# How long an endpoint of unknown kind may take to answer an abort before it is asked the other way.
_LEARNING_S: Final = 0.25

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
        if host is not None and host not in (engine.address, engine.host, *engine.side_channel_hosts):
            return None
        return sidechannel.endpoint(host or engine.address, port)

    async def ask_decoders(self, path: str, body: bytes) -> AsyncIterator[EngineAnswer]:
        """POST to one decoder after the other, those first that answered last time; yields each answer."""
        decoders = self._fleet.preferences("decode")
        for engine in sorted(decoders, key=lambda engine: self._backoff.closed(engine.url)):
            headers = [(b"content-type", b"application/json"), (b"accept-encoding", b"identity")]
            if engine.api_key:
                headers.append((b"authorization", b"Bearer " + engine.api_key.encode()))
            try:
                answer = await self._client.post(engine.url + path, body, headers, timeout_s=self._settings.timeout_s)
            except EngineUnavailable:
                self._backoff.note(engine.url, answered=False)
            else:
                self._backoff.note(engine.url, answered=True)
                yield answer

    async def ask_side_channels(self, addresses: Sequence[str], payload: bytes) -> list[bytes | None]:
        """Send to all at once; a reply, or None, for each."""
        return await asyncio.gather(*(self._ask(address, payload, self._settings.timeout_s) for address in addresses))

    async def release_on_ascend(self, addresses: Sequence[str], request_id: str) -> list[bytes | None]:
        """Tell each rank in the way it understands; a reply, or None, for each."""
        return await asyncio.gather(*(self._release_on_rank(address, request_id) for address in addresses))

    async def _release_on_rank(self, address: str, request_id: str) -> bytes | None:
        """Stock listeners do not answer an abort. What an endpoint understands is learnt once."""
        message = self._ascend_messages.get(address)
        if self._settings.ascend_message != "auto":
            message = self._settings.ascend_message
        if message == "abort":
            return await self._ask(address, sidechannel.abort_request(request_id), self._settings.timeout_s)
        if message is None and not self._backoff.closed(address):
            patience = min(_LEARNING_S, self._settings.timeout_s)
            reply = await self._channels.request(address, sidechannel.abort_request(request_id), timeout_s=patience)
            if reply is not None:
                self._ascend_messages[address] = "abort"
                return reply
        reply = await self._ask(address, sidechannel.done_receiving(request_id), self._settings.timeout_s)
        if reply is not None and message is None:
            self._ascend_messages[address] = "done"
        return reply

    async def _ask(self, address: str, payload: bytes, timeout_s: float) -> bytes | None:
        if self._backoff.closed(address):
            return None
        reply = await self._channels.request(address, payload, timeout_s=timeout_s)
        self._backoff.note(address, answered=reply is not None)
        return reply
