"""vLLM's NIXL pull connector with a release listener. Imported by vLLM only; see the package for how to load it."""

from __future__ import annotations

import logging
import os
from typing import Any

from .guard import VERIFIED, IncompatibleVllmError, check_classes, check_worker
from .leases import Leases
from .listener import AbortListener

try:
    from vllm import __version__ as vllm_version
    from vllm import envs
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
except ImportError as error:
    raise IncompatibleVllmError("of this environment", [str(error)]) from error

check_classes(vllm_version, NixlPullConnector, NixlPullConnectorWorker)

# Below vLLM's own root logger, so that its settings decide what is shown.
logger = logging.getLogger("vllm.extproc_plugin")


class AbortableNixlConnector(NixlPullConnector):  # type: ignore[misc]  # vLLM is not importable where types are checked
    """As ``NixlConnector``, and its workers listen for aborts; the scheduler's half tells clients where."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._abort_ranks = int(parallel.world_size)
        self._abort_port = _base_port(vllm_config) + parallel.data_parallel_index * self._abort_ranks
        self._leases: Leases | None = None
        self._listener: AbortListener | None = None
        if vllm_version not in VERIFIED:
            logger.warning(
                "extproc.vllm_plugin was not run on vLLM %s (verified: %s)", vllm_version, ", ".join(VERIFIED)
            )
        if role == KVConnectorRole.WORKER:
            self._listen(vllm_config, rank=parallel.rank % self._abort_ranks)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Once an engine step, in the worker: what has been sent, what has arrived, and whose lease is over."""
        if self._leases is not None:
            self._leases.apply()
        return super().get_transfer_results(finished_req_ids)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_abort_port(super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_abort_port(super().request_finished_all_groups(request, block_ids))

    def shutdown(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        super().shutdown()

    def _listen(self, vllm_config: Any, rank: int) -> None:
        check_worker(vllm_version, self.connector_worker)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        host = str(extra("abort_host", envs.VLLM_NIXL_SIDE_CHANNEL_HOST))
        endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{self._abort_port + rank}"
        about = {"vllm": vllm_version, "engine_id": self.engine_id, "rank": rank, "ranks": self._abort_ranks}
        self._leases = Leases(self.connector_worker)
        self._listener = AbortListener(self._leases, endpoint, about=about, grace_s=float(extra("abort_grace_s", 0.5)))
        self._listener.start()
        logger.info("Listening for aborts at %s (pid %d)", endpoint, os.getpid())

    def _with_abort_port(self, finished: tuple[bool, dict[str, Any] | None]) -> tuple[bool, dict[str, Any] | None]:
        pinned, params = finished
        if pinned and params is not None:
            params |= {"abort_port": self._abort_port, "abort_ranks": self._abort_ranks}
        return pinned, params


def _base_port(vllm_config: Any) -> int:
    port = vllm_config.kv_transfer_config.get_from_extra_config("abort_port", None)
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ValueError(f'kv_connector_extra_config must have "abort_port": a TCP port (got {port!r})')
    return port
