"""The Mooncake connector of vLLM Ascend: a listener for each rank, DONE messages, one long timer, and its sharp edges.

A rank frees nothing by itself. It reports an id once, if it tracks the id, and the blocks are freed when all ranks
have reported. A prefill is tracked from the moment it is scheduled, so a report for a running one, or for one that was
aborted (it stays tracked for ever), reaches a scheduler that asserts the opposite: the engine core dies.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from extproc.sim.engine import Engine, Load, LoadFailed
from extproc.sim.nixl import GET_META_MSG, tcp
from extproc.sim.request import EngineRequest, Status
from extproc.sim.transfer import DataPort, RemoteAgent, TransferError

logger = logging.getLogger(__name__)

DONE_RECVING_MSG = b"done_recving_msg"
ABORT_REQUEST_MSG = b"abort_request_msg"
ACK = b"ACK"

REQUIRED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_DONE_TRIES = 3


class AgentMetadata(msgspec.Struct, omit_defaults=True):
    """The part of MooncakeAgentMetadata that a simulated peer needs. ``te_rpc_port`` is the data port."""

    engine_id: str
    te_rpc_port: int
    block_size: int
    num_blocks: int
    local_ip: str = ""
    side_channel_port: int = 0
    handshake_port: int = 0


class AscendConnector:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.config
        self.engine_id = "0"
        self.side_channel_port = 0
        self.listener_alive = False
        self.listener_messages = 0
        self._context = zmq.asyncio.Context()
        self._data = DataPort(self.engine_id, engine.pool, lambda _: None)
        self._tracked: list[set[str]] = [set() for _ in range(self.config.tp)]
        self._reported: dict[str, set[int]] = {}
        self._done_counts: dict[tuple[int, str], int] = {}
        self._agents: dict[tuple[str, int], RemoteAgent] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        host = self.config.advertised_host
        await self._data.start(host)
        sockets = self._bind(host)
        self.listener_alive = True
        for rank, socket in enumerate(sockets):
            self._spawn(self._listen(rank, socket))

    def _bind(self, host: str) -> list[zmq.asyncio.Socket]:
        """One ROUTER for each rank on consecutive ports. A base port of 0 looks for a free run of them."""
        if self.config.side_channel_port:
            self.side_channel_port = self.config.side_channel_port
            return self._bind_from(host, self.side_channel_port)
        for _ in range(100):
            base = random.randrange(20_000, 60_000 - self.config.tp)
            try:
                sockets = self._bind_from(host, base)
            except zmq.ZMQError:
                continue
            self.side_channel_port = base
            return sockets
        raise OSError(f"no {self.config.tp} consecutive free ports on {host}")

    def _bind_from(self, host: str, base: int) -> list[zmq.asyncio.Socket]:
        sockets: list[zmq.asyncio.Socket] = []
        try:
            for rank in range(self.config.tp):
                socket = self._context.socket(zmq.ROUTER)
                sockets.append(socket)
                socket.linger = 0
                socket.setsockopt(zmq.IPV6, ":" in host)
                socket.bind(tcp(host, base + rank))
        except zmq.ZMQError:
            for socket in sockets:
                socket.close()
            raise
        return sockets

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- side channel --------------------------------------------------------------------------------------------

    async def _listen(self, rank: int, socket: zmq.asyncio.Socket) -> None:
        """Survives anything; what it does not understand gets no reply."""
        metadata = msgspec.msgpack.encode(
            AgentMetadata(
                engine_id=self.engine_id,
                te_rpc_port=self._data.port,
                block_size=self.config.block_size,
                num_blocks=self.config.blocks,
                local_ip=self.config.advertised_host,
                side_channel_port=self.side_channel_port,
                handshake_port=self.side_channel_port + rank,
            )
        )
        try:
            while True:
                identity, *frames = await socket.recv_multipart()
                self.listener_messages += 1
                payload = [frame for frame in frames if frame]
                try:
                    (frame,) = payload
                    message = msgspec.msgpack.decode(frame)
                    reply = metadata if message[0] == GET_META_MSG else self._handle(rank, message)
                except (ValueError, LookupError, TypeError, msgspec.MsgspecError) as error:
                    logger.error("rank %d: %r while processing a message", rank, error)
                    continue
                if reply is not None:
                    await socket.send_multipart([identity, b"", reply])
        finally:
            socket.close()

    def _handle(self, rank: int, message: Any) -> bytes | None:
        if message[0] == DONE_RECVING_MSG:
            request_id, counts = message[1], message[2]
            if counts:
                key = rank, request_id
                self._done_counts[key] = self._done_counts.get(key, 0) + 1
                if self._done_counts[key] >= counts[self.side_channel_port + rank]["num"]:
                    self._report(rank, request_id)
                    del self._done_counts[key]
            else:
                self._report(rank, request_id)
            return ACK
        if message[0] == ABORT_REQUEST_MSG and self.config.ascend_abort:
            self._report(rank, message[1])
            return ACK
        logger.error("rank %d: unexpected message type %r", rank, message[0])
        return None

    def _report(self, rank: int, request_id: str) -> None:
        if request_id not in self._tracked[rank]:
            logger.warning("rank %d: %s is not in the requests to process", rank, request_id)
            return
        self._tracked[rank].discard(request_id)
        reported = self._reported.setdefault(request_id, set())
        reported.add(rank)
        if len(reported) == self.config.tp:
            del self._reported[request_id]
            self.engine.sent(request_id)

    # -- the prefiller's side ------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, status: Status) -> tuple[float | None, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params:
            return None, None
        if params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
            if self.config.ascend_reject_notify:
                self._spawn(self._report_done(params))
            return None, None
        if not request.is_remote_decode or status is not Status.LENGTH_CAPPED:
            return None, None
        prompt_blocks = math.ceil(len(request.prompt) / self.config.block_size)
        host, port = self.config.advertised_host, self.side_channel_port
        hybrid = self.config.ascend_variant == "hybrid"
        mapping: dict[str, dict[str, Any]] = {}
        for rank in range(self.config.tp):
            entry = {"host": host, "engine_id": self.engine_id}
            mapping[str(rank)] = entry if hybrid else {**entry, "handshake_port": port + rank}
        answer: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [request.blocks[:prompt_blocks]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.id,
            "remote_host": host,
            "remote_port": port,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_ptp_size": self.config.tp,
            "last_token_id": request.generated[-1],
            "remote_multi_nodes_meta_mapping": mapping,
            "num_prompt_blocks": prompt_blocks,
            "remote_block_size": self.config.block_size,
        }
        if hybrid:
            for key in ("remote_pcp_size", "remote_dcp_size", "remote_block_size"):
                del answer[key]
        return self.config.lease, answer

    def expired(self, request_id: str) -> None:
        logger.error("Force freed expired request: %s", request_id)
        self._reported.pop(request_id, None)
        for tracked in self._tracked:
            tracked.discard(request_id)

    # -- the decoder's side --------------------------------------------------------------------------------------

    def queued(self, request: EngineRequest) -> None:
        """Nothing to do: this connector has no heartbeats."""

    def scheduled(self, request: EngineRequest) -> Load:
        params = request.kv_transfer_params
        if not params:
            return Load.COMPUTED
        if params.get("do_remote_decode"):
            for tracked in self._tracked:
                tracked.add(request.id)
        if not params.get("do_remote_prefill"):
            return Load.COMPUTED
        assert params.get("remote_block_ids"), "num_external_tokens == 0"
        params["do_remote_prefill"] = False
        return Load.PULLED if all(key in params for key in REQUIRED) else Load.NEVER

    async def load(self, request: EngineRequest, blocks: list[int]) -> None:
        params = request.kv_transfer_params
        assert params is not None
        try:
            agent = await self._agent(params)
            remote: list[int] = params["remote_block_ids"][0]
            if len(blocks) > len(remote):
                raise TransferError(f"{len(blocks)} blocks wanted, {len(remote)} offered")
            contents = await agent.read(remote[len(remote) - len(blocks) :])
        except (TransferError, TypeError, LookupError) as error:
            # A prefiller that comes back on the same ports has another transfer engine.
            if (gone := self._agents.pop(listeners(params)[0], None)) is not None:
                await gone.close()
            raise LoadFailed(str(error)) from error
        for block, content in zip(blocks, contents, strict=True):
            self.engine.pool.fill(block, content)
        await self._report_done(params)

    def rejected(self, params: dict[str, Any]) -> None:
        """The API server refused a decode request. Releases before vllm-project/vllm-ascend#14142 tell nobody."""
        if params.get("do_remote_prefill") and self.config.ascend_reject_notify:
            self._spawn(self._report_done(params))

    async def _agent(self, params: dict[str, Any]) -> RemoteAgent:
        host, port = listeners(params)[0]
        if (host, port) not in self._agents:
            reply = await self._ask(host, port, (GET_META_MSG, ""), self.config.handshake_timeout_s)
            try:
                metadata = msgspec.msgpack.decode(reply, type=AgentMetadata)
            except msgspec.MsgspecError as error:
                raise TransferError(f"handshake with {host}:{port}: {error!r}") from error
            if (host, port) not in self._agents:  # another pull may have asked meanwhile
                self._agents[host, port] = RemoteAgent(
                    metadata.engine_id, host, metadata.te_rpc_port, timeout_s=self.config.handshake_timeout_s
                )
        return self._agents[host, port]

    async def _report_done(self, params: dict[str, Any]) -> None:
        """Tell every rank of the prefiller that its blocks are no longer needed."""

        async def one(host: str, port: int) -> None:
            for _ in range(_DONE_TRIES):
                try:
                    await self._ask(host, port, (DONE_RECVING_MSG, params["remote_request_id"], None), 1.0)
                    return
                except TransferError as error:
                    logger.warning("%s", error)

        await asyncio.gather(*(one(host, port) for host, port in listeners(params)))

    async def _ask(self, host: str, port: int, message: tuple[Any, ...], timeout_s: float) -> bytes:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        try:
            socket.setsockopt(zmq.IPV6, ":" in host)
            socket.connect(tcp(host, port))
            async with asyncio.timeout(timeout_s):
                await socket.send(msgspec.msgpack.encode(message))
                return bytes(await socket.recv())
        except (zmq.ZMQError, TimeoutError) as error:
            raise TransferError(f"{message[0]!r} to {host}:{port}: {error!r}") from error
        finally:
            socket.close()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for agent in self._agents.values():
            await agent.close()
        await self._data.stop()
        self._context.destroy(linger=0)


def listeners(params: dict[str, Any]) -> list[tuple[str, int]]:
    """The side-channel address of each rank that a prefill's params name."""
    mapping = params.get("remote_multi_nodes_meta_mapping") or {}
    if mapping:
        return [
            (str(entry["host"]), int(entry.get("handshake_port") or int(params["remote_port"]) + int(offset)))
            for offset, entry in mapping.items()
        ]
    return [
        (str(params["remote_host"]), int(params["remote_port"]) + rank)
        for rank in range(params.get("remote_ptp_size") or 1)
    ]
