"""vLLM Ascend's MooncakeConnectorV1 and MooncakeHybridConnector (pull), v0.18 and later.

The prefiller keeps the blocks for 480 s unless every rank that serves the request is told to let go, over ZMQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from extproc import sidechannel
from extproc.connectors.base import Connector, Handoff, ReleaseResult

if TYPE_CHECKING:
    from extproc.releaseways import ReleaseWays
    from extproc.ticket import Ticket

_MAX_PORT: Final = 65535

_PREFILL_EDITS: Mapping[str, bytes | None] = {
    # One token must be generated: a prefill that stops at once (EOS) drops its blocks, and hands nothing over.
    "min_tokens": b"1",
    "kv_transfer_params": (
        b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
        b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
    ),
}


class MooncakeAscend(Connector):
    name: ClassVar[str] = "mooncake-ascend"
    # A prefill that is cancelled in its last step stays pinned under an id that nobody has learnt.
    cancel: ClassVar[Literal["disconnect", "finish"]] = "finish"

    def prefill_edits(self) -> Mapping[str, bytes | None]:
        return _PREFILL_EDITS

    def required(self) -> tuple[str, ...]:
        return ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")

    def release_data(self, handoff: Handoff) -> Mapping[str, Any] | None:
        return {"endpoints": rank_endpoints(handoff.values)}

    async def release(self, ticket: Ticket, ways: ReleaseWays) -> ReleaseResult:
        """Tell every rank; the scheduler frees only when all of them have reported. A rank that is told twice shrugs.

        Never for a request whose prefill has not returned: that would bring the engine down.
        """
        addresses = [ways.side_channel(ticket.prefiller, host, port) for host, port in ticket.data["endpoints"]]
        if not addresses or None in addresses:
            return ReleaseResult.REFUSED  # a host that is not the fleet's
        replies = await ways.release_on_ascend([address for address in addresses if address], ticket.request_id)
        if any(reply is None for reply in replies):
            return ReleaseResult.UNREACHABLE
        return ReleaseResult.RELEASED if all(reply == sidechannel.ACK for reply in replies) else ReleaseResult.REFUSED


def rank_endpoints(values: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(host, port) of every rank's listener, from one response's params, without repeats.

    Mapping entries with a ``handshake_port`` name it (their keys count from the engine's base port, so for a
    data-parallel rank above 0 ``remote_port + key`` would be another rank's); entries without are offsets from
    ``remote_port``. The plain offsets of this rank's own tensor-parallel group are always added.
    """
    host, base = str(values["remote_host"]), int(values["remote_port"])
    found: dict[tuple[str, int], None] = {}
    mapping = values.get("remote_multi_nodes_meta_mapping")
    for key, entry in mapping.items() if isinstance(mapping, dict) else ():
        if not isinstance(entry, dict):
            continue
        port = entry.get("handshake_port")
        if port is None and str(key).isdigit():
            port = base + int(key)
        if isinstance(port, int) and 0 < port <= _MAX_PORT:
            found[str(entry.get("host") or host), port] = None
    named = {port for _, port in found}
    ranks = int(values.get("remote_ptp_size") or 1) * int(values.get("remote_pcp_size") or 1)
    for offset in range(ranks):
        if base + offset not in named and base + offset <= _MAX_PORT:
            found[host, base + offset] = None
    return list(found)
