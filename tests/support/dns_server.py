"""A DNS server on loopback, over UDP and TCP, that answers, or fails, as a test wants.

::

    async with DnsServer() as server:
        server.set("engines.test", "A", "10.0.0.1", "10.0.0.2", ttl=30)
        server.fail("broken.test", "SERVFAIL")
        resolver = dns.asyncresolver.Resolver(configure=False)   # nameserver: server.address
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import TracebackType
from typing import Final, NamedTuple, Self, cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

_MOST_ALIASES: Final = 8
_WITHOUT_EDNS: Final = 512


class Query(NamedTuple):
    name: str
    kind: str
    over: str
    """``udp`` or ``tcp``."""


class DnsServer:
    """Authoritative for every name: one without records does not exist (NXDOMAIN); one that has others has no data.

    ``silent`` takes queries and answers none; answers that do not fit into a datagram are truncated.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.port = 0
        self.silent = False
        self.queries: list[Query] = []
        self._records: dict[dns.name.Name, dict[str, dns.rrset.RRset]] = {}
        self._failures: dict[tuple[dns.name.Name, str | None], dns.rcode.Rcode] = {}
        self._udp: asyncio.DatagramTransport | None = None
        self._tcp: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """``host:port``, an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    # ---- what it knows ----

    def set(self, name: str, kind: str, *values: str, ttl: int = 30) -> None:
        """Replace the records of that kind (A, AAAA, SRV, CNAME, …), given as in a zone file; none: remove them."""
        full = dns.name.from_text(name)
        known = self._records.setdefault(full, {})
        known.pop(kind, None)
        if values:
            known[kind] = dns.rrset.from_text_list(full, ttl, dns.rdataclass.IN, kind, list(values))
        if not known:
            del self._records[full]

    def fail(self, name: str, code: str | None = "SERVFAIL", *, kind: str | None = None) -> None:
        """Answer queries for that name (of that kind, or of any) with a response code; None: answer again."""
        key = dns.name.from_text(name), kind
        if code is None:
            self._failures.pop(key, None)
        else:
            self._failures[key] = dns.rcode.from_text(code)

    def asked(self, name: str, kind: str) -> int:
        """How many queries came for it."""
        return sum(query.name == f"{name.rstrip('.')}." and query.kind == kind for query in self.queries)

    def answer(self, query: dns.message.Message, over: str) -> dns.message.Message:
        question = query.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        self.queries.append(Query(question.name.to_text(), kind, over))
        response = dns.message.make_response(query, our_payload=1232)
        response.flags |= dns.flags.AA | dns.flags.RA
        failure = self._failures.get((question.name, kind), self._failures.get((question.name, None)))
        if failure is not None:
            response.set_rcode(failure)
            return response
        name = question.name
        for _ in range(_MOST_ALIASES):
            known = self._records.get(name)
            if known is None:
                response.set_rcode(dns.rcode.NXDOMAIN)
                return response
            if kind in known:
                response.answer.append(known[kind])
                return response
            if "CNAME" not in known:
                return response
            response.answer.append(known["CNAME"])
            name = known["CNAME"][0].target
        response.set_rcode(dns.rcode.SERVFAIL)
        return response

    # ---- serving ----

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        while self._udp is None:
            self._tcp = await asyncio.start_server(self._connected, self.host, 0, family=family)
            self.port = self._tcp.sockets[0].getsockname()[1]
            try:  # the same port, if it is free there too
                self._udp, _ = await loop.create_datagram_endpoint(
                    lambda: _Datagrams(self), local_addr=(self.host, self.port), family=family
                )
            except OSError:
                self._tcp.close()
                await self._tcp.wait_closed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._udp is not None:
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    size = int.from_bytes(await reader.readexactly(2), "big")
                    query = dns.message.from_wire(await reader.readexactly(size))
                    if self.silent:
                        continue
                    wire = self.answer(query, "tcp").to_wire()
                    writer.write(len(wire).to_bytes(2, "big") + wire)
                    await writer.drain()
        finally:
            self._connections.discard(task)
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if self._server.silent or self._transport is None:
            return
        query = dns.message.from_wire(data)
        limit = query.payload if query.edns >= 0 else _WITHOUT_EDNS
        wire = self._server.answer(query, "udp").to_wire(max_size=max(limit, _WITHOUT_EDNS), prefer_truncation=True)
        self._transport.sendto(wire, addr)
