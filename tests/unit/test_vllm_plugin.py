"""The release listener of the vLLM plugin on real ZMQ sockets, without vLLM: a fake worker keeps its two tables."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
import zmq
import zmq.asyncio

import extproc
from extproc.vllm_plugin import listener as protocol
from extproc.vllm_plugin.guard import IncompatibleVllmError, check_classes, check_worker
from extproc.vllm_plugin.leases import Leases, State
from extproc.vllm_plugin.listener import AbortListener

FAR = 1e12
"""The end of a lease that will not run out during a test, on ``time.perf_counter``."""


class FakeWorker:
    """The tables of vLLM's NIXL worker, with its own rule for what is freed: what is past its end at a step."""

    def __init__(self) -> None:
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()

    def start(self, request_id: str) -> None:
        self._reqs_to_process.add(request_id)

    def finish(self, request_id: str) -> None:
        self._reqs_to_send[request_id] = FAR

    def step(self, leases: Leases, heartbeats: tuple[str, ...] = ()) -> set[str]:
        """One engine step: the plugin's part, then heartbeats, then reaping. Returns the ids that were freed."""
        leases.apply()
        for request_id in heartbeats:
            if request_id in self._reqs_to_send:
                self._reqs_to_send[request_id] = max(self._reqs_to_send[request_id], FAR)
        over = {request_id for request_id, end in self._reqs_to_send.items() if time.perf_counter() >= end}
        for request_id in over:
            self._reqs_to_process.remove(request_id)
            del self._reqs_to_send[request_id]
        return over


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def leases(worker: FakeWorker) -> Leases:
    return Leases(worker)


@pytest.fixture
def listener(leases: Leases) -> Iterator[AbortListener]:
    listening = AbortListener(leases, "tcp://127.0.0.1:0", about={"vllm": "0.32.0", "rank": 0}, grace_s=0.1)
    listening.start()
    yield listening
    listening.stop()


class Client:
    """A REQ socket; :meth:`ask` fails after 5 s without an answer."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket

    async def ask(self, *frames: bytes) -> list[bytes]:
        async with asyncio.timeout(5):
            await self.socket.send_multipart(frames)
            return await self.socket.recv_multipart()

    async def abort(self, request_id: str | bytes) -> bytes:
        [answer] = await self.ask(msgspec.msgpack.encode((b"abort_request_msg", request_id)))
        return answer


class Connect(Protocol):
    def __call__(self, port: int, kind: int = zmq.REQ, host: str = "127.0.0.1") -> Client: ...


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes clients, and closes them after the test."""
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.IPV6, 1)
    sockets: list[zmq.asyncio.Socket] = []

    def connected(port: int, kind: int = zmq.REQ, host: str = "127.0.0.1") -> Client:
        sockets.append(context.socket(kind))
        sockets[-1].connect(f"tcp://{host}:{port}")
        return Client(sockets[-1])

    yield connected
    context.destroy(linger=0)


@pytest.fixture
def client(connect: Connect, listener: AbortListener) -> Client:
    return connect(listener.port)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # what is watched belongs to another thread
            await asyncio.sleep(0.001)


def lease(worker: FakeWorker, *request_ids: str) -> None:
    for request_id in request_ids:
        worker.start(request_id)
        worker.finish(request_id)


async def test_an_abort_frees_the_blocks_at_the_next_step(worker: FakeWorker, leases: Leases, client: Client) -> None:
    lease(worker, "chatcmpl-a-00000001", "chatcmpl-b-00000002")
    assert await client.abort("chatcmpl-a-00000001") == b"ACK"
    assert worker.step(leases) == {"chatcmpl-a-00000001"}
    assert worker._reqs_to_send == {"chatcmpl-b-00000002": FAR}
    assert worker.step(leases) == set()


async def test_the_frame_is_the_one_of_vllm_ascend(worker: FakeWorker, client: Client) -> None:
    lease(worker, "chatcmpl-abc-0123abcd")
    frame = bytes.fromhex("92c41161626f72745f726571756573745f6d7367b563686174636d706c2d6162632d3031323361626364")
    assert await client.ask(frame) == [b"ACK"]


@pytest.mark.parametrize("request_id", ["cmpl-x-0-01234567", b"cmpl-x-0-01234567"])
async def test_ids_may_be_text_or_bytes(worker: FakeWorker, client: Client, request_id: str | bytes) -> None:
    lease(worker, "cmpl-x-0-01234567")
    assert await client.abort(request_id) == b"ACK"


async def test_an_unknown_id_is_said_to_be_unknown(worker: FakeWorker, leases: Leases, client: Client) -> None:
    lease(worker, "known")
    assert await client.abort("stranger") == b"UNKNOWN"
    assert worker.step(leases) == set()


async def test_a_second_abort_is_unknown_once_the_blocks_are_free(
    worker: FakeWorker, leases: Leases, client: Client
) -> None:
    lease(worker, "a")
    assert await client.abort("a") == b"ACK"
    assert await client.abort("a") == b"ACK"  # no step yet
    assert worker.step(leases) == {"a"}
    assert await client.abort("a") == b"UNKNOWN"


async def test_a_running_request_is_left_alone(worker: FakeWorker, leases: Leases, client: Client) -> None:
    worker.start("busy")
    started = time.monotonic()
    assert await client.abort("busy") == b"RUNNING"
    assert time.monotonic() - started >= 0.1  # it was given the grace time to finish
    assert worker.step(leases) == set()
    worker.finish("busy")  # the answer was final: finishing later does not end the lease
    assert worker.step(leases) == set()
    assert worker._reqs_to_send == {"busy": FAR}


async def test_an_abort_that_overtakes_the_end_of_its_request_waits_for_it(
    worker: FakeWorker, leases: Leases, connect: Connect
) -> None:
    patient = AbortListener(leases, "tcp://127.0.0.1:0", grace_s=30)
    patient.start()
    try:
        worker.start("ending")
        early = asyncio.create_task(connect(patient.port).abort("ending"))
        other = connect(patient.port)
        assert await other.abort("stranger") == b"UNKNOWN"  # nobody else waits
        worker.finish("ending")
        assert await early == b"ACK"
        assert worker.step(leases) == {"ending"}
    finally:
        patient.stop()


async def test_an_abort_whose_request_is_freed_in_the_grace_time_is_unknown(
    worker: FakeWorker, leases: Leases, connect: Connect
) -> None:
    patient = AbortListener(leases, "tcp://127.0.0.1:0", grace_s=30)
    patient.start()
    try:
        worker.start("cancelled")
        early = asyncio.create_task(connect(patient.port).abort("cancelled"))
        await until(lambda: patient._held != [])
        worker._reqs_to_process.remove("cancelled")
        assert await early == b"UNKNOWN"
    finally:
        patient.stop()


def test_a_heartbeat_cannot_revive_an_aborted_lease(worker: FakeWorker, leases: Leases) -> None:
    lease(worker, "a")
    assert leases.end("a") is State.LEASED
    assert worker.step(leases, heartbeats=("a",)) == set()  # read after the end was set, in the same step
    assert worker.step(leases) == {"a"}


async def test_a_ping_names_the_protocol_and_the_engine(client: Client) -> None:
    [answer] = await client.ask(msgspec.msgpack.encode((b"ping_msg",)))
    assert msgspec.msgpack.decode(answer) == [b"PONG", {"protocol": 1, "vllm": "0.32.0", "rank": 0}]


JUNK = {
    "no msgpack": b"\xc1",
    "text": b"abort please",
    "half an array": bytes.fromhex("92c411"),
    "a number": msgspec.msgpack.encode(7),
    "a map": msgspec.msgpack.encode({"abort_request_msg": "a"}),
    "an empty array": msgspec.msgpack.encode([]),
    "another side channel's message": msgspec.msgpack.encode((b"get_meta_msg", 0, 0)),
    "done_recving": msgspec.msgpack.encode((b"done_recving_msg", "a", None)),
    "no id": msgspec.msgpack.encode((b"abort_request_msg",)),
    "an empty id": msgspec.msgpack.encode((b"abort_request_msg", "")),
    "a null id": msgspec.msgpack.encode((b"abort_request_msg", None)),
    "a list of ids": msgspec.msgpack.encode((b"abort_request_msg", ["a"])),
    "an id that is not UTF-8": msgspec.msgpack.encode((b"abort_request_msg", b"\xff\xfe")),
    "deep nesting": b"\x91" * 10_000 + b"\xc0",
    "an extension type": bytes.fromhex("91d40501"),
}


@pytest.mark.parametrize("frame", JUNK.values(), ids=JUNK.keys())
async def test_junk_gets_an_error_and_kills_nothing(
    worker: FakeWorker, leases: Leases, client: Client, listener: AbortListener, frame: bytes
) -> None:
    lease(worker, "a")
    [answer] = await client.ask(frame)
    assert answer.startswith(b"ERROR ")
    assert worker.step(leases) == set()
    assert listener.alive
    assert await client.abort("a") == b"ACK"


@pytest.mark.parametrize("frames", [[b"a", b"b"], [b""], [b"", b"", b""]])
async def test_anything_but_one_frame_gets_an_error(client: Client, worker: FakeWorker, frames: list[bytes]) -> None:
    lease(worker, "a")
    assert await client.ask(*frames) == [b"ERROR expected one frame"]
    assert await client.abort("a") == b"ACK"


async def test_a_dealer_is_answered_after_a_delimiter(
    connect: Connect, listener: AbortListener, worker: FakeWorker
) -> None:
    lease(worker, "a", "b")
    dealer = connect(listener.port, zmq.DEALER)
    abort_a, abort_b = (msgspec.msgpack.encode((b"abort_request_msg", request_id)) for request_id in "ab")
    assert await dealer.ask(b"", abort_a) == [b"", b"ACK"]
    assert await dealer.ask(abort_b) == [b"", b"ACK"]  # without one of its own, as vLLM Ascend's listener does


def test_an_oversized_frame_closes_only_its_own_connection(listener: AbortListener, worker: FakeWorker) -> None:
    lease(worker, "a")
    with zmq.Context() as context, context.socket(zmq.REQ) as rude, context.socket(zmq.REQ) as polite:
        rude.linger = polite.linger = 0
        with rude.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            for client in (rude, polite):
                client.connect(f"tcp://127.0.0.1:{listener.port}")
            rude.send(b"\0" * (protocol.MAX_FRAME_BYTES + 1))
            assert monitor.poll(5000) == zmq.POLLIN
            rude.disable_monitor()
        polite.send(msgspec.msgpack.encode((b"abort_request_msg", "a")))
        assert polite.poll(5000) == zmq.POLLIN
        assert polite.recv() == b"ACK"


@pytest.mark.parametrize("junk", [b"GET /health HTTP/1.1\r\nHost: prefill\r\n\r\n", b"\xff" + bytes(200), b"\0" * 100])
async def test_raw_bytes_on_the_port_kill_nothing(
    client: Client, listener: AbortListener, worker: FakeWorker, junk: bytes
) -> None:
    lease(worker, "a")
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.settimeout(5)
        assert stranger.recv(1) == b"\xff"  # ZMQ's greeting: it is connected
        stranger.sendall(junk)
        assert await client.abort("a") == b"ACK"
    assert await client.abort("stranger") == b"UNKNOWN"


async def test_many_clients_at_once(
    connect: Connect, listener: AbortListener, worker: FakeWorker, leases: Leases
) -> None:
    """Aborts, strangers, running ids and junk from 40 sockets while the engine steps: each gets its right answer."""
    engine_stops = threading.Event()
    freed: list[str] = []

    def engine() -> None:
        while not engine_stops.is_set():
            freed.extend(worker.step(leases))
            time.sleep(0.001)  # a step takes time, and leaves the GIL

    mine = {number: [f"cmpl-{number}-{i}" for i in range(20)] for number in range(40)}
    lease(worker, *(request_id for ids in mine.values() for request_id in ids))
    worker.start("busy")

    async def talk(number: int) -> None:
        client = connect(listener.port)
        for request_id in mine[number]:
            assert await client.abort(request_id) == b"ACK"
            assert await client.abort(f"stranger-{number}") == b"UNKNOWN"
            assert (await client.ask(b"\xc1" * (number + 1)))[0].startswith(b"ERROR ")
        assert await client.abort("busy") == b"RUNNING"

    stepping = threading.Thread(target=engine)
    stepping.start()
    try:
        await asyncio.gather(*(talk(number) for number in mine))
        await until(lambda: worker._reqs_to_send == {})
    finally:
        engine_stops.set()
        stepping.join()
    assert sorted(freed) == sorted(request_id for ids in mine.values() for request_id in ids)
    assert worker._reqs_to_process == {"busy"}


async def test_a_client_that_never_reads_blocks_nobody(
    connect: Connect, listener: AbortListener, client: Client, worker: FakeWorker
) -> None:
    lease(worker, "a")
    deaf = connect(listener.port, zmq.DEALER)
    for _ in range(5000):
        await deaf.socket.send_multipart([b"", b"junk"])
    assert await client.abort("a") == b"ACK"


async def test_waiting_aborts_are_limited(
    connect: Connect, worker: FakeWorker, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_HELD", 2)
    patient = AbortListener(leases, "tcp://127.0.0.1:0", grace_s=30)
    patient.start()
    try:
        worker.start("busy")
        held = [asyncio.create_task(connect(patient.port).abort("busy")) for _ in range(2)]
        await until(lambda: len(patient._held) == 2)
        assert await connect(patient.port).abort("busy") == b"RUNNING"
        worker.finish("busy")
        assert await asyncio.gather(*held) == [b"ACK", b"ACK"]
    finally:
        patient.stop()


def test_stop_frees_the_port_and_ends_the_thread(leases: Leases) -> None:
    first = AbortListener(leases, "tcp://127.0.0.1:0")
    first.start()
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        AbortListener(leases, f"tcp://127.0.0.1:{first.port}")
    first.stop()
    first.stop()
    assert not first.alive
    again = AbortListener(leases, f"tcp://127.0.0.1:{first.port}")
    again.stop()


async def test_it_listens_on_ipv6(leases: Leases, connect: Connect) -> None:
    listening = AbortListener(leases, "tcp://[::1]:0")
    listening.start()
    try:
        assert await connect(listening.port, host="[::1]").abort("a") == b"UNKNOWN"
    finally:
        listening.stop()


def test_the_package_needs_nothing_but_zmq_and_msgspec() -> None:
    """What an engine imports must not pull in the rest of this package: gRPC, pydantic … are not in its environment."""
    program = """
import sys
from extproc.vllm_plugin import guard, leases, listener
loaded = {name.partition(".")[0] for name in sys.modules if not name.startswith("_")}
print(*sorted(loaded - sys.stdlib_module_names))
print(*sorted(name for name in sys.modules if name.startswith("extproc")))
"""
    root = Path(extproc.__file__).parents[1]
    output = subprocess.run([sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True)
    third_party, own = (line.split() for line in output.stdout.splitlines())
    assert set(third_party) & {"grpc", "google", "httpx", "pydantic", "structlog", "prometheus_client"} == set()
    assert {"extproc", "zmq", "msgspec"} <= set(third_party)
    plugin = ["extproc.vllm_plugin", *(f"extproc.vllm_plugin.{name}" for name in ("guard", "leases", "listener"))]
    assert own == ["extproc", *plugin]


# The guard, against classes that have the names it looks for, and against variations.


class Worker:
    def __init__(self) -> None:
        self._reqs_to_send: dict[str, float] = {}
        self._reqs_to_process: set[str] = set()

    def get_transfer_results(self) -> Any:
        done: set[str] = set()
        self._reap_expired_send_leases(done)
        return done

    def _reap_expired_send_leases(self, done: set[str]) -> None:
        expired = [request_id for request_id, end in self._reqs_to_send.items() if time.perf_counter() >= end]
        self._reqs_to_process.difference_update(expired)

    def start_load_kv(self, metadata: Any) -> None:
        self._reqs_to_process.update(metadata.reqs_in_batch)
        self._reqs_to_send.update(metadata.reqs_to_send)


class Connector:
    connector_scheduler: Any = None
    connector_worker: Any = None

    def get_transfer_results(self, finished: set[str]) -> Any:
        return self.connector_worker.get_transfer_results()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.connector_scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        return self.connector_scheduler.request_finished(request, block_ids)

    def shutdown(self) -> None:
        pass


def test_the_guard_accepts_what_it_knows() -> None:
    check_classes("0.32.0", Connector, Worker)
    check_worker("0.32.0", Worker())


def test_the_guard_refuses_a_worker_that_reaps_elsewhere() -> None:
    class Later(Worker):
        def get_transfer_results(self) -> Any:
            return set()

        def _reap_expired_send_leases(self, done: set[str]) -> None:
            del self._reqs_to_send["x"]

    with pytest.raises(IncompatibleVllmError) as refused:
        check_classes("0.40.0", Connector, Later)
    assert refused.value.differences == [
        "Later.get_transfer_results() does not use _reap_expired_send_leases",
        "Later._reap_expired_send_leases() does not use _reqs_to_process, perf_counter",
    ]
    assert str(refused.value).startswith("extproc.vllm_plugin does not fit vLLM 0.40.0 (verified: 0.32.0): Later.")


def test_the_guard_refuses_a_connector_without_the_methods() -> None:
    class Older:
        def request_finished(self) -> None:
            pass

    with pytest.raises(IncompatibleVllmError) as refused:
        check_classes("0.20.0", Older, Worker)
    assert refused.value.differences == [
        "Older has no get_transfer_results()",
        "Older.request_finished() does not use connector_scheduler",
        "Older has no request_finished_all_groups()",
        "Older has no shutdown()",
    ]


def test_the_guard_refuses_tables_of_another_kind() -> None:
    worker = Worker()
    worker._reqs_to_send = []  # type: ignore[assignment]
    del worker._reqs_to_process
    with pytest.raises(IncompatibleVllmError) as refused:
        check_worker("0.32.0", worker)
    assert refused.value.differences == [
        "the worker's _reqs_to_send is list, not dict",
        "the worker's _reqs_to_process is NoneType, not set",
    ]


def test_the_connector_says_what_is_missing_where_there_is_no_vllm() -> None:
    with pytest.raises(IncompatibleVllmError, match="No module named 'vllm'"):
        __import__("extproc.vllm_plugin.nixl")
