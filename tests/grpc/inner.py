"""The service without sockets: streams driven message by message, engines that answer as they are told.

Property tests and the fuzzer use it: thousands of exchanges in a second, and everything they leave can be counted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import grpc
import structlog

from extproc import ticket
from extproc.config import build
from extproc.endings import Endings
from extproc.enginehttp import Call, EngineAnswer, EngineClient, EngineUnavailable
from extproc.fleet import engines
from extproc.fleet.fleet import Fleet, policies
from extproc.pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from extproc.pb.envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from extproc.prefill import Prefiller
from extproc.release import ReleaseService
from extproc.releaseways import ReleaseWays
from extproc.service import ExternalProcessor, Service
from extproc.sidechannel import SideChannels
from extproc.telemetry.metrics import Metrics
from extproc.telemetry.recent import Recent
from extproc.telemetry.tracing import Tracing

Behaviour = Literal["ok", "refuses", "fails", "no params", "gone", "hangs", "late"]
BEHAVIOURS: Final[tuple[Behaviour, ...]] = ("ok", "refuses", "fails", "no params", "gone", "hangs", "late")
End = Literal["half-close", "cancel"]
Answered = tuple[ext_proc.ProcessingRequest, list[ext_proc.ProcessingResponse]]
"""A message, and the replies that came before the next one was read."""

_KINDS: Final = re.compile(r"(request|response)_(headers|body|trailers)")
_NOT_FOUND: Final = EngineAnswer(404, (), b'{"error":{"message":"The model does not exist.","code":404}}')


class FakeEngines:
    """Stands in for the HTTP client. ``behaviours`` is how prefills go, one after the other; then all are ``ok``."""

    def __init__(self) -> None:
        self.behaviours: Iterator[Behaviour] = iter(())
        self.prefills: list[bytes] = []
        self.pinned: set[str] = set()
        """Ids of handoffs that were given out."""
        self.released: set[str] = set()
        """Of these, decoders were asked to have the blocks freed; of some again a little later."""

    async def post(
        self,
        url: str,
        body: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        *,
        timeout_s: float | None,
        call: Call | None = None,
    ) -> EngineAnswer:
        if b"extproc-release" in body:
            self.released.add(json.loads(body)["kv_transfer_params"]["remote_request_id"])
            return _NOT_FOUND
        self.prefills.append(body)
        behaviour = next(self.behaviours, "ok")
        if behaviour == "late":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        elif behaviour == "hangs":
            await asyncio.Event().wait()
        elif behaviour == "gone":
            raise EngineUnavailable("disconnected", "gone")
        elif behaviour == "refuses":
            return EngineAnswer(422, (("content-type", "application/json"), ("connection", "close")), b"{}")
        elif behaviour == "fails":
            return EngineAnswer(500, (), b"")
        elif behaviour == "no params":
            return EngineAnswer(200, (), b'{"kv_transfer_params":null}')
        return EngineAnswer(200, (), self._hand_over(dict(headers)[b"x-request-id"].decode()))

    def _hand_over(self, request_id: str) -> bytes:
        self.pinned.add(request_id)
        params = {
            "do_remote_prefill": True,
            "remote_block_ids": [[1]],
            "remote_engine_id": "e",
            "remote_request_id": request_id,
            "remote_host": "10.0.0.1",
            "remote_port": 1,
        }
        return json.dumps({"kv_transfer_params": params}).encode()


class Context:
    """gRPC's, for one stream. Replies are kept by the message that was read last."""

    def __init__(self, messages: Iterable[ext_proc.ProcessingRequest], end: End, pauses: int) -> None:
        self._messages = iter(messages)
        self._end = end
        self._pauses = pauses
        self.replies: list[Answered] = []
        self.task: asyncio.Task[None] | None = None

    _numbers = itertools.count()

    def peer(self) -> str:
        return f"ipv4:10.9.9.9:{next(self._numbers)}"

    async def read(self) -> Any:
        for _ in range(self._pauses):
            await asyncio.sleep(0)
        message = next(self._messages, None)
        if message is None:
            if self._end == "cancel":
                assert self.task is not None
                self.task.cancel()
                await asyncio.sleep(0)
            return grpc.aio.EOF
        self.replies.append((message, []))
        return message

    async def write(self, reply: ext_proc.ProcessingResponse) -> None:
        reply.SerializeToString()  # what cannot be sent must fail here, as it would in gRPC
        await asyncio.sleep(0)
        self.replies[-1][1].append(reply)


@dataclass
class Inner:
    """Made by :meth:`made`, inside a running loop; :meth:`aclose` it."""

    service: Service
    engines: FakeEngines
    releases: ReleaseService
    fleet: Fleet
    metrics: Metrics
    prefiller: Prefiller
    channels: SideChannels

    @classmethod
    def made(cls, **settings: Any) -> Inner:
        values = {
            "fleet": {
                "prefill": [{"url": f"http://10.0.0.{number}:8000"} for number in (1, 2)],
                "decode": [{"url": f"http://10.0.1.{number}:8000"} for number in (1, 2)],
                "outlier": {"consecutive": 1_000_000},
            },
            "release": {"settle_s": 0.001},
            **settings,
        }
        config = build(values)
        metrics, recent, tracing = Metrics(), Recent(), Tracing(config.tracing)
        fleet = Fleet(config.fleet, policies(config))
        fleet.update("configuration", engines.specs(config.fleet, config.fleet))
        fakes, channels = FakeEngines(), SideChannels()
        client = cast(EngineClient, fakes)
        ways = ReleaseWays(config.release, fleet, client, channels)
        releases = ReleaseService(config.release, ways, metrics, recent, tracing)
        endings = Endings(config.release, ticket.signer(config), ways, fleet, releases, metrics, recent)
        prefiller = Prefiller(config, fleet, client, metrics, endings.never_dispatched, tracing)
        service = Service(config, fleet, prefiller, endings, metrics, recent, tracing)
        return cls(service, fakes, releases, fleet, metrics, prefiller, channels)

    async def aclose(self) -> None:
        await self.channels.aclose()

    async def drive(
        self,
        messages: Iterable[ext_proc.ProcessingRequest],
        behaviours: Iterable[Behaviour] = (),
        *,
        end: End = "half-close",
        pauses: int = 0,
        cancel_after: int | None = None,
    ) -> list[Answered]:
        """One stream.

        ``cancel_after`` turns of the loop the stream is reset, wherever it is.
        """
        self.engines.behaviours = iter(behaviours)
        context = Context(messages, end, pauses)
        context.task = asyncio.create_task(ExternalProcessor(self.service).Process(None, context))
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            context.task.cancel()
        await asyncio.wait({context.task})
        if not context.task.cancelled():
            context.task.result()
        return context.replies

    async def settled(self, within_s: float = 5.0) -> None:
        """Wait until nothing of any exchange is left. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            while self.left():
                await asyncio.sleep(0.001)

    def left(self) -> dict[str, Any]:
        """What is still held, by whom."""
        held = {
            "streams": self.service.in_flight,
            "load": [engine.inflight or engine.reserved_tokens for engine in self.fleet.engines()],
            "handoffs": _value(self.metrics.handoffs_open),
            "releases": self.releases.accounts.pending,
            "abandoned": len(self.prefiller._abandoned),
            "fallbacks": self.service._fallbacks,
        }
        return {name: value for name, value in held.items() if (any(value) if isinstance(value, list) else value)}


def _value(gauge: Any) -> float:
    (sample,) = [sample for metric in gauge.collect() for sample in metric.samples]
    return float(sample.value)


def members(replies: Iterable[ext_proc.ProcessingResponse]) -> list[str]:
    """What the replies answer, but for those that ask for more time."""
    return [reply.WhichOneof("response") or "" for reply in replies if not reply.HasField("override_message_timeout")]


def check_replies(exchanges: Sequence[Answered]) -> None:
    """One reply of its phase for each message, until the request is answered; none only while a body is streamed."""
    answered, streamed, held, begun = False, False, False, False
    for message, replies in exchanges:
        kind, got = message.WhichOneof("request"), members(replies)
        if not begun and message.HasField("protocol_config"):
            streamed = message.protocol_config.request_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        begun = begun or kind in ("request_headers", "response_headers")
        held = held and kind != "response_headers"  # Envoy has answered by itself
        assert all(kind_ == "immediate_response" or _KINDS.fullmatch(kind_) for kind_ in got)
        if answered or not kind:
            assert got == []
        elif "immediate_response" in got:
            assert got == ["immediate_response"]
            answered = True
        elif kind == "request_headers" and not got:
            assert streamed  # and, where it comes twice, held back already
            held = True
        elif held and kind in ("request_body", "request_trailers") and not got:
            assert kind == "request_body"
            assert not message.request_body.end_of_stream
        elif held and got[0] == "request_headers":
            held = False
            ends = ["request_trailers"] if kind == "request_trailers" else []
            assert got[1:] == ["request_body"] * (len(got) - 1 - len(ends)) + ends
            assert len(got) > 1 + len(ends)
        elif kind.endswith("_body") and len(got) > 1:
            assert set(got) == {kind}
            assert len(getattr(message, kind).body) > 62_000
        else:
            assert got == [kind]


def raise_what_fails_inside() -> None:
    """Instead of logging it; all other log lines are dropped: one for each of thousands of exchanges helps nobody."""
    structlog.configure(processors=[_raise_failures])


def _raise_failures(_logger: Any, _method: str, entry: Any) -> Any:
    if entry.get("exc_info"):
        raise AssertionError(f"failed inside: {entry}")
    raise structlog.DropEvent
