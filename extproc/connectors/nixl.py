"""vLLM's NixlConnector, pull mode: the prefill returns coordinates, the decoder fetches the blocks.

Read from vLLM 0.13 to 0.33. Without a truthy ``remote_block_ids``, or without any one of the other keys, a decoder's
scheduler asserts or waits for ever, and its engine dies when the client leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from extproc import sidechannel
from extproc.connectors.base import Connector, Handoff, ReleaseResult

if TYPE_CHECKING:
    from extproc.enginehttp import EngineAnswer
    from extproc.releaseways import ReleaseWays
    from extproc.ticket import Ticket

# No engine serves such a model.
_REJECTED: Final = b'{"model":"extproc-release","prompt":[0],"max_tokens":1,"kv_transfer_params":%b}'
_MAX_RANKS: Final = 1024
# What a rank of the plugin says when it has let go, or holds nothing (any more).
_NOT_PINNED: Final = (sidechannel.ACK, b"UNKNOWN")

_PREFILL_EDITS: Mapping[str, bytes | None] = {
    "kv_transfer_params": (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    )
}


class Nixl(Connector):
    name: ClassVar[str] = "nixl"
    cancel: ClassVar[Literal["disconnect", "finish"]] = "disconnect"

    def prefill_edits(self) -> Mapping[str, bytes | None]:
        return _PREFILL_EDITS

    def release_data(self, handoff: Handoff) -> Mapping[str, Any] | None:
        """The params as JSON text, but for the block ids: a decoder that rejects a request names the handoff and reads
        no block.

        One id per group keeps the shape; a long prompt has thousands of them.
        """
        groups = handoff.values["remote_block_ids"]
        shape = [group[:1] for group in groups] if isinstance(groups[0], list) else groups[:1]
        params = msgspec.json.encode({**handoff.values, "remote_block_ids": shape})
        return {"params": params.decode(), "tp_size": handoff.values.get("tp_size")}

    async def release(self, ticket: Ticket, ways: ReleaseWays) -> ReleaseResult:
        """By the plugin's own ZMQ port where the prefiller has one, else by a request that a decoder rejects.

        NIXL's own port is never touched: a foreign frame kills its listener. A decoder of vLLM >= 0.21 that refuses a
        request before admission (an unknown model: 404) tells the prefiller to free what the request's params name.
        """
        if await self._abort_by_plugin(ticket, ways):
            return ReleaseResult.RELEASED
        body = _REJECTED % ticket.data["params"].encode()
        result = ReleaseResult.UNREACHABLE
        asked = ways.ask_decoders(ticket.prefiller, "/v1/completions", body, engine_id=_engine_id(ticket))
        async with contextlib.aclosing(asked) as answers:
            async for answer in answers:
                if _rejected_as_meant(answer):
                    return ReleaseResult.RELEASED
                if answer.status < 500:
                    result = ReleaseResult.REFUSED
        return result

    async def _abort_by_plugin(self, ticket: Ticket, ways: ReleaseWays) -> bool:
        port = ways.abort_port(ticket.prefiller)
        if port is None:
            return False
        ranks = _ranks(ticket.data["tp_size"])
        addresses = [ways.side_channel(ticket.prefiller, None, port + rank) for rank in ranks]
        replies = await ways.ask_side_channels(
            [address for address in addresses if address], sidechannel.abort_request(ticket.request_id)
        )
        return len(replies) == len(ranks) and all(reply in _NOT_PINNED for reply in replies)


def _engine_id(ticket: Ticket) -> str | None:
    """The prefiller's, as decoders know it. Tickets hold the params as text."""
    try:
        engine_id = msgspec.json.decode(ticket.data["params"])["remote_engine_id"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
    return engine_id if isinstance(engine_id, str) else None


def _ranks(tp_size: object) -> range:
    return range(tp_size if isinstance(tp_size, int) and 0 < tp_size <= _MAX_RANKS else 1)


def _rejected_as_meant(answer: EngineAnswer) -> bool:
    """Whether this is vLLM's own 404 for an unknown model, not a proxy's or a missing route's."""
    if answer.status != 404:
        return False
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return isinstance(body, dict) and (isinstance(body.get("error"), dict) or body.get("object") == "error")
