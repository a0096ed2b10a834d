"""vLLM Ascend's MooncakeConnectorV1 and MooncakeHybridConnector (pull), v0.18 and later.

The prefiller keeps the blocks for 480 s unless every rank that serves the request is told to let go, over ZMQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from extproc import sidechannel
from extproc.connectors.base import MAX_PORT, Connector, Handoff, ReleaseResult

if TYPE_CHECKING:
    from extproc.releaseways import ReleaseWays
    from extproc.ticket import Ticket

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

    def release_data(self, handoff: Handoff) -> Mapping[str, Any] | None:
        """None where the params are not vLLM Ascend's: their port may be NIXL's, and a foreign frame kills that."""
        if "remote_ptp_size" not in handoff.values:
            return None
        ports: dict[str, list[int]] = {}
        for host, port in rank_endpoints(handoff.values):
            ports.setdefault(host, []).append(port)
        return {"ports": ports}

    async def release(self, ticket: Ticket, ways: ReleaseWays) -> ReleaseResult:
        """Tell every rank; the scheduler frees only when all of them have reported. A rank that is told twice shrugs.

        Never for a request whose prefill has not returned: that would bring the engine down.
        """
        addresses = [
            ways.side_channel(ticket.prefiller, host, port)
            for host, ports in ticket.data["ports"].items()
            for port in ports
        ]
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
    host, base = values["remote_host"], values["remote_port"]
    found: dict[tuple[str, int], None] = {}
    mapping = values.get("remote_multi_nodes_meta_mapping")
    for key, entry in mapping.items() if isinstance(mapping, dict) else ():
        if not isinstance(entry, dict):
            continue
        port = _number(entry.get("handshake_port"))
        if not port and key.isdigit():
            port = base + _number(key)
        if 0 < port <= MAX_PORT:
            found[str(entry.get("host") or host), port] = None
    named = {port for _, port in found}
    ranks = max(1, _number(values.get("remote_ptp_size"))) * max(1, _number(values.get("remote_pcp_size")))
    for port in range(base, min(base + ranks, MAX_PORT + 1)):
        if port not in named:
            found[host, port] = None
    return list(found)


def _number(value: object) -> int:
    """A count or port, 0 where it is none."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value[:6])
    return value if isinstance(value, int) and value > 0 else 0
