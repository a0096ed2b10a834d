"""What a connector has to say about the two legs of a request."""

from __future__ import annotations

import enum
import functools
import ipaddress
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec

from extproc.jsonobject import BadJson, JsonObject, NotAnObject

if TYPE_CHECKING:
    from extproc.fleet.engines import Engine
    from extproc.outcomes import Ending
    from extproc.releaseways import ReleaseWays
    from extproc.ticket import Ticket


MAX_PORT: Final = 65535
MAX_PARAMS_BYTES: Final = 959 * 1024
"""Of a handoff: more than a prompt of a million tokens needs. The largest body with these must fit into a message."""


class UnusableHandoff(Exception):
    """A prefill answered 200 without params that a decoder could use. The text is a short reason for metrics."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill returned: the engine's ``kv_transfer_params``, byte for byte, and who made it.

    Single use: a decoder that gets it twice, or after the lease, answers 200 with wrong text.
    """

    connector: Connector
    prefiller: Engine
    params: bytes
    remote_request_id: str
    """The id under which the prefiller pins the blocks (vLLM >= 0.13: ``kv_transfer_params.remote_request_id``)."""
    values: Mapping[str, Any] = field(repr=False)
    made_at: float
    """``time.monotonic()`` of the prefill's answer, from which the lease counts."""
    trace: bytes = b""
    """The prefill attempt's span (``Span.reference``), for the release's."""

    def expired(self, now: float) -> bool:
        """Whether the prefiller may have recycled the blocks by ``now`` (``time.monotonic()``)."""
        return now - self.made_at >= self.prefiller.lease_s


class ReleaseResult(enum.StrEnum):
    """How one try to free a handoff's blocks ended."""

    RELEASED = "released"
    REFUSED = "refused"
    """An engine answered, but not as one that frees the blocks."""
    UNREACHABLE = "unreachable"
    """No answer; worth another try."""


class Connector(ABC):
    """One way to move KV blocks between engines."""

    name: ClassVar[str]
    cancel: ClassVar[Literal["disconnect", "finish"]]
    """What is safe when a client leaves during the prefill: closing the HTTP call, or letting it finish first."""

    @abstractmethod
    def prefill_edits(self) -> Mapping[str, bytes | None]:
        """Members of the prefill body: JSON text to set, None to drop."""

    @abstractmethod
    def release_data(self, handoff: Handoff) -> Mapping[str, Any] | None:
        """What :meth:`release` needs beside the handoff's id, as it goes into a ticket (a few hundred bytes).

        None where nothing but the engine's timer frees the blocks.
        """

    @abstractmethod
    async def release(self, ticket: Ticket, ways: ReleaseWays) -> ReleaseResult:
        """One try to make the prefiller free the blocks. Idempotent."""

    def leaves_pinned(self, ending: Ending) -> bool:
        """Whether a dispatched request that ended like this may have left its blocks pinned.

        To release blocks that the decoder has already had freed is harmless, so doubt is answered with yes.
        """
        return not ending.kv_read

    def handoff(self, prefiller: Engine, answer: bytes, now: float) -> Handoff:
        """Read a prefill's 200 answer (a JSON body). Raises UnusableHandoff.

        Only the keys without which a decoder hangs or dies are looked at; the params go on verbatim, unknown keys
        included, but for an address that no decoder can reach.
        """
        try:
            raw = JsonObject(answer).raw("kv_transfer_params")
        except (BadJson, NotAnObject):
            raise UnusableHandoff("not_json") from None
        if raw is None or raw == b"null":
            raise UnusableHandoff("no_params")
        if len(raw) > MAX_PARAMS_BYTES:
            raise UnusableHandoff("params_too_large")
        try:
            params = JsonObject(raw)
            values: dict[str, Any] = msgspec.json.decode(raw)
        except (BadJson, NotAnObject, msgspec.MsgspecError, RecursionError):
            raise UnusableHandoff("bad_params") from None
        if values.get("do_remote_prefill") is not True:
            raise UnusableHandoff("not_remote")
        address = self._reachable_host(prefiller, values)
        if address != values.get("remote_host"):
            raw = params.edited({"remote_host": json.dumps(address).encode()})
            values["remote_host"] = address
        for key, fits in _REQUIRED.items():
            if values.get(key) in (None, ""):
                raise UnusableHandoff(f"missing_{key}")
            if not fits(values[key]):
                raise UnusableHandoff(f"bad_{key}")
        return Handoff(
            connector=self,
            prefiller=prefiller,
            params=raw,
            remote_request_id=values["remote_request_id"],
            values=values,
            made_at=now,
        )

    def _reachable_host(self, prefiller: Engine, values: Mapping[str, Any]) -> Any:
        """``remote_host`` as the decoder should see it: the prefiller's own address where it named none of use.

        A multi-node map or a host list names the hosts itself and is left alone.
        """
        host = values.get("remote_host")
        if values.get("remote_multi_nodes_meta_mapping") or values.get("remote_hosts"):
            return host
        return prefiller.address if not isinstance(host, str) or _unreachable(host) else host


@functools.lru_cache(1024)
def _unreachable(host: str) -> bool:
    """Whether a host means nothing to other machines."""
    name = host.strip("[]").rstrip(".").lower()
    if name in _OWN_NAMES:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False  # a name: the engines know it
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def _holds_blocks(value: object) -> bool:
    """``[1, 2]``, or since vLLM 0.18 a list for each group of layers: ``[[1, 2], []]``. Some block must be there."""
    if not isinstance(value, list):
        return False
    groups = value if any(isinstance(group, list) for group in value) else [value]
    return all(isinstance(group, list) for group in groups) and any(groups)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_port(value: object) -> bool:
    return isinstance(value, int) and 0 < value <= MAX_PORT


_OWN_NAMES: Final = ("", "localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")

_REQUIRED: Final[Mapping[str, Callable[[object], bool]]] = {
    "remote_block_ids": _holds_blocks,
    "remote_engine_id": _is_text,
    "remote_request_id": _is_text,
    "remote_host": _is_text,
    "remote_port": _is_port,
}
