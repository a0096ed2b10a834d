"""The NIXL pull connector of vLLM 0.32: leases, heartbeats, notifications, a side channel that one frame can kill."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from hashlib import sha256
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from extproc.sim.config import VLLM_VERSION
from extproc.sim.engine import Engine, Load, LoadFailed
from extproc.sim.request import EngineRequest, Status
from extproc.sim.transfer import DataPort, RemoteAgent, TransferError

logger = logging.getLogger(__name__)

GET_META_MSG = b"get_meta_msg"
REQUIRED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Without one of these a decoder's worker cannot build its request; the KeyError takes the engine core with it."""


class AgentMetadata(msgspec.Struct):
    """What a handshake tells about an engine: the part of vLLM's NixlAgentMetadata that a simulated peer needs."""

    engine_id: str
    agent_metadata: bytes
    num_blocks: int
    block_size: int


class HandshakePayload(msgspec.Struct):
    compatibility_hash: str
    agent_metadata_bytes: bytes


def compatibility_hash(model: str) -> str:
    return sha256(f"{VLLM_VERSION}/{model}".encode()).hexdigest()


def tcp(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class NixlConnector:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.config = engine.config
        self.engine_id = str(uuid.uuid4())
        self.side_channel_port = 0
        self.listener_alive = False
        self.listener_messages = 0
        self.handshakes = 0
        """Prefillers met."""
        assert engine.metrics.nixl is not None
        self._metrics = engine.metrics.nixl
        self._context = zmq.asyncio.Context()
        self._data = DataPort(self.engine_id, engine.pool, self._notified)
        self._agents: dict[str, RemoteAgent] = {}
        self._handshakes: dict[str, asyncio.Task[RemoteAgent]] = {}
        self._in_batch: set[str] = set()
        """Prefills for other engines that were scheduled and are not yet accounted for."""
        self._heartbeats: dict[str, dict[str, Any]] = {}
        """By local request: the params whose blocks must stay pinned until they are pulled."""
        self._unread: list[str] = []
        """Notifications that came while the engine did not step."""
        self._unsent: list[tuple[RemoteAgent, str]] = []
        """Notifications that became possible, by the end of a handshake, while the engine did not step."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        host = self.config.advertised_host
        await self._data.start(host)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.IPV6, ":" in host)
        socket.linger = 0
        socket.bind(tcp(host, self.config.side_channel_port or "*"))
        self.side_channel_port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.listener_alive = True
        self._spawn(self._listen(socket))
        self._spawn(self._heartbeat())

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- side channel --------------------------------------------------------------------------------------------

    def _handshake_payload(self) -> bytes:
        metadata = AgentMetadata(
            engine_id=self.engine_id,
            agent_metadata=msgspec.msgpack.encode({"data_port": self._data.port}),
            num_blocks=self.config.blocks,
            block_size=self.config.block_size,
        )
        return msgspec.msgpack.encode(
            HandshakePayload(compatibility_hash(self.config.model), msgspec.msgpack.encode(metadata))
        )

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        """Answers handshakes, three frames and a 3-tuple at a time. Anything else ends it, as in the engine."""
        payloads = {(0, rank): self._handshake_payload() for rank in range(self.config.tp)}
        try:
            while True:
                identity, _, frame = await socket.recv_multipart()
                self.listener_messages += 1
                message, pp_rank, tp_rank = msgspec.msgpack.decode(frame)
                if message != GET_META_MSG:
                    logger.warning("Connection listener got unexpected message %r", message)
                clock = msgspec.msgpack.encode(time.perf_counter())
                await socket.send_multipart([identity, b"", payloads[(pp_rank, tp_rank)], clock])
        except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
            logger.error("the handshake listener died: %r", error)
        finally:
            self.listener_alive = False
            socket.close()

    # -- the prefiller's side ------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, status: Status) -> tuple[float | None, dict[str, Any] | None]:
        self._heartbeats.pop(request.id, None)
        params = request.kv_transfer_params
        if not params:
            return None, None
        if params.get("do_remote_prefill"):
            # It ended before it was scheduled: tell the prefiller that nobody will come.
            self._notify_unused(params)
            params["do_remote_prefill"] = False
            return None, None
        if not request.is_remote_decode:
            return None, None
        if status not in (Status.LENGTH_CAPPED, Status.STOPPED):
            self._in_batch.discard(request.id)
            return None, None
        answer: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [request.blocks],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.id,
            "remote_host": self.config.advertised_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.config.tp,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(request.prompt) + len(request.generated) - 1,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }
        if len(request.generated) == 1:
            # The scheduler knows it only while it handles the prefill's own step.
            answer["remote_prefill_cached_tokens"] = request.cached_tokens
        return self.config.lease, answer

    def expired(self, request_id: str) -> None:
        self._in_batch.discard(request_id)
        self._metrics.expired()

    def _notified(self, text: str) -> None:
        """A notification from a decoder: ``HB:<id>,<id>`` or ``<id>:<expected consumers>``."""
        if self.engine.is_stepping:
            self._read(text)
        else:
            self._unread.append(text)

    def _read(self, text: str) -> None:
        if text.startswith("HB:"):
            for request_id in text[3:].split(","):
                self.engine.extend(request_id, self.config.lease * 2 / 3)
        elif (request_id := text.rpartition(":")[0]) in self._in_batch:
            self._in_batch.discard(request_id)
            self.engine.sent(request_id)
        else:
            self._metrics.notified_late()
            logger.error("Potentially invalid KV blocks for unrecognized request %s were retrieved", request_id)

    def _step(self) -> None:
        """What lay about while the engine did not step."""
        unread, self._unread = self._unread, []
        for text in unread:
            self._read(text)
        unsent, self._unsent = self._unsent, []
        for agent, text in unsent:
            self._spawn(self._notify(agent, text))

    # -- the decoder's side --------------------------------------------------------------------------------------

    def queued(self, request: EngineRequest) -> None:
        self._step()
        params = request.kv_transfer_params
        keys = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size")
        if params and params.get("do_remote_prefill") and all(params.get(key) is not None for key in keys):
            self._heartbeats[request.id] = params

    def scheduled(self, request: EngineRequest) -> Load:
        params = request.kv_transfer_params
        if not params:
            return Load.COMPUTED
        if params.get("do_remote_decode"):
            self._in_batch.add(request.id)
        if not params.get("do_remote_prefill"):
            return Load.COMPUTED
        assert params.get("remote_block_ids"), "num_external_tokens == 0"
        params["do_remote_prefill"] = False
        return Load.PULLED if all(key in params for key in REQUIRED) else Load.NEVER

    async def load(self, request: EngineRequest, blocks: list[int]) -> None:
        params = request.kv_transfer_params
        assert params is not None
        started = time.perf_counter()
        try:
            agent = await self._agent(params)
            assert isinstance(params["remote_block_ids"][0], list), "block ids come in a list for each group"
            remote: list[int] = params["remote_block_ids"][0]
            assert len(blocks) <= len(remote), "num_decode_blocks <= len(prefill_group)"
            contents = await agent.read(remote[len(remote) - len(blocks) :])
        except (TransferError, TypeError, LookupError) as error:
            self._metrics.failed()
            raise LoadFailed(str(error)) from error
        finally:
            self._heartbeats.pop(request.id, None)
        for block, content in zip(blocks, contents, strict=True):
            self.engine.pool.fill(block, content)
        self._metrics.transferred(time.perf_counter() - started, sum(map(len, contents)))
        await self._notify(agent, f"{params['remote_request_id']}:1")

    def rejected(self, params: dict[str, Any]) -> None:
        """The API server refused a decode request before the engine saw it (vllm ≥ 0.21).

        The engine is told to tell the prefiller, in one step. If it has to shake hands first and nothing else makes it
        step afterwards, the notification waits for the next request, whatever that is.
        """
        if params.get("do_remote_prefill"):
            self._notify_unused(params)

    def _notify_unused(self, params: dict[str, Any]) -> None:
        missing = next((key for key in REQUIRED if key not in params), None)
        if missing is not None:
            self.engine.die(f"KeyError: {missing!r}")
            return

        self._step()
        text = f"{params['remote_request_id']}:1"
        if (known := self._agents.get(str(params["remote_engine_id"]))) is not None:
            self._spawn(self._notify(known, text))
            return

        async def notify() -> None:
            try:
                agent = await self._agent(params)
            except TransferError as error:
                self._metrics.failed()
                logger.warning("%s stays pinned until its lease ends: %s", params["remote_request_id"], error)
                return
            self._unsent.append((agent, text))
            if self.engine.is_stepping:
                self._step()

        self._spawn(notify())

    async def _notify(self, agent: RemoteAgent, text: str) -> None:
        try:
            await agent.notify(text)
        except TransferError as error:
            self._metrics.notification_failed()
            logger.warning("%s", error)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self.config.lease / 6)
            by_engine: dict[str, list[dict[str, Any]]] = {}
            for params in self._heartbeats.values():
                by_engine.setdefault(params["remote_engine_id"], []).append(params)
            for group in by_engine.values():
                try:
                    agent = await self._agent(group[0])
                    await agent.notify("HB:" + ",".join(str(params["remote_request_id"]) for params in group))
                except TransferError as error:
                    logger.warning("heartbeat: %s", error)

    async def _agent(self, params: dict[str, Any]) -> RemoteAgent:
        """The peer that the params name, after a handshake if it is new. Raises TransferError."""
        engine_id = str(params["remote_engine_id"])
        if engine_id == self.engine_id:
            raise TransferError("an engine cannot shake hands with itself")
        if engine_id in self._agents:
            return self._agents[engine_id]
        task = self._handshakes.get(engine_id)
        if task is None:
            task = asyncio.create_task(self._shake_hands(engine_id, params["remote_host"], params["remote_port"]))
            self._handshakes[engine_id] = task
            task.add_done_callback(lambda _: self._handshakes.pop(engine_id, None))
        return await asyncio.shield(task)

    async def _shake_hands(self, engine_id: str, host: Any, port: Any) -> RemoteAgent:
        socket = self._context.socket(zmq.REQ)
        socket.linger = 0
        try:
            socket.setsockopt(zmq.IPV6, ":" in str(host))
            socket.connect(tcp(str(host), port))
            async with asyncio.timeout(self.config.handshake_timeout_s):
                await socket.send(msgspec.msgpack.encode((GET_META_MSG, 0, 0)))
                payload_frame, _ = await socket.recv_multipart()
            payload = msgspec.msgpack.decode(payload_frame, type=HandshakePayload)
            if payload.compatibility_hash != compatibility_hash(self.config.model):
                raise TransferError("the peer serves another model or release")
            metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=AgentMetadata)
            if metadata.engine_id != engine_id:
                raise TransferError(f"expected engine {engine_id}, found {metadata.engine_id}")
            data_port = msgspec.msgpack.decode(metadata.agent_metadata)["data_port"]
        except (zmq.ZMQError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            raise TransferError(f"handshake with {host}:{port}: {error!r}") from error
        finally:
            socket.close()
        agent = RemoteAgent(engine_id, str(host), data_port, timeout_s=self.config.handshake_timeout_s)
        self._agents[engine_id] = agent
        self.handshakes += 1
        return agent

    async def stop(self) -> None:
        tasks = [*self._tasks, *self._handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for agent in self._agents.values():
            await agent.close()
        await self._data.stop()
        self._context.destroy(linger=0)
