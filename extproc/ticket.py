"""Tickets: what must be released and where, small enough to travel with the request in Envoy's dynamic metadata.

A ticket comes back in Envoy's access log, to whichever replica gets it. Whoever can write to the log port must not be
able to make a replica contact hosts or free other requests' blocks: tickets are signed, and checked against the fleet.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    from extproc.config import Config

VERSION: Final = 1
MAX_CHARS: Final = 4096
_MAC_BYTES: Final = 16

Fault = Literal["oversize", "malformed", "forged", "version", "expired", "unknown_engine", "replayed"]


class TicketError(ValueError):
    """A ticket that must not be acted on. ``reason`` is a metric label."""

    def __init__(self, reason: Fault) -> None:
        super().__init__(reason)
        self.reason: Fault = reason


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One handoff's release. ``(prefiller, request_id)`` names the handoff."""

    version: int
    connector: str
    prefiller: str
    """The prefiller's ``ip:port``, as the fleet knows it."""
    request_id: str
    """``remote_request_id``: what the engine pins the blocks under."""
    issued_at: float
    """Unix seconds, of the prefill's answer."""
    lease_s: float
    """After this many seconds the prefiller has freed the blocks by itself."""
    data: Mapping[str, Any]
    """What the connector needs beside that."""
    trace: bytes = b""
    """The span that pinned the blocks (``Span.reference``), so that a release on any replica joins its trace."""

    @property
    def handoff_id(self) -> tuple[str, str]:
        return self.prefiller, self.request_id

    def expired(self, now: float) -> bool:
        """``now`` in Unix seconds."""
        return now >= self.issued_at + self.lease_s


_encoder = msgspec.msgpack.Encoder()
_decode = msgspec.msgpack.Decoder(Ticket).decode


class TicketSigner:
    """Seals tickets, and opens those that a signer with the same key has sealed."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.sha256(b"extproc ticket\0" + key).digest()

    def seal(self, ticket: Ticket) -> str:
        """The ticket as URL-safe text of a few hundred characters."""
        payload = _encoder.encode(ticket)
        return base64.urlsafe_b64encode(payload + self._mac(payload)).decode().rstrip("=")

    def open(self, text: str, *, now: float | None = None) -> Ticket:
        """Raises TicketError: ``oversize``, ``malformed``, ``forged``, ``version`` or ``expired``."""
        if len(text) > MAX_CHARS:
            raise TicketError("oversize")
        try:
            sealed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise TicketError("malformed") from None
        payload, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
        if not payload:
            raise TicketError("malformed")
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise TicketError("forged")
        try:
            ticket = _decode(payload)
        except msgspec.MsgspecError:
            raise TicketError("version") from None  # signed by us, so another version of us
        if ticket.version != VERSION:
            raise TicketError("version")
        if ticket.expired(time.time() if now is None else now):
            raise TicketError("expired")
        return ticket

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[:_MAC_BYTES]


def signer(config: Config) -> TicketSigner:
    """The signer of a configuration. Replicas with the same configuration open each other's tickets.

    Without ``release.ticket_key`` the key is derived from the engines' addresses and API keys: where the engines have
    no API keys, it is no better kept than the configuration.
    """
    if config.release.ticket_key:
        return TicketSigner(config.release.ticket_key.get_secret_value().encode())
    fleet = config.fleet
    names = [[engine.url for engine in fleet.prefill], [engine.url for engine in fleet.decode]]
    names.append([f"{entry.role} {entry.name}" for entry in fleet.dns])
    keys = [fleet.api_key, *(engine.api_key for engine in (*fleet.prefill, *fleet.decode))]
    keys += [entry.api_key for entry in fleet.dns]
    return TicketSigner(repr((names, [key.get_secret_value() if key else "" for key in keys])).encode())
