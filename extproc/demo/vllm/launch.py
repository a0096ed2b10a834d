"""Real vLLM engines as processes: a prefiller, a decoder, or a plain one to compare with.

Ready in about 35 s on two cores, started together, and about 1.5 GB of memory each.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

import extproc
from extproc.demo.vllm.install import HERE, Installation, find, offline
from extproc.processes import Process, free_port, plain_http_client

Role = Literal["prefill", "decode", "plain"]
LoadFailurePolicy = Literal["fail", "recompute"]

HOST = "127.0.0.1"
MODEL_NAME = "tiny"
BLOCK_TOKENS = 32
"""Tokens of one KV block. On CPUs vLLM takes multiples of 32 only."""

_COMMON_ENV = {
    **offline(),
    # One thread each, not bound to a core: the machine may have two cores for everything.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}


class VllmEngine(Process):
    """One vLLM server on loopback, serving the tiny model as :data:`MODEL_NAME`; its log is ``directory/<name>.log``.

    ``lease_s``: how long a finished prefill's blocks stay pinned. ``load_failure_policy``: what a decoder does when it
    cannot get the KV, answer 500 (``fail``, vLLM's default) or prefill itself. ``plugin``: a prefiller loads
    :mod:`extproc.vllm_plugin` and listens for aborts at ``abort_port``. ``kv_blocks``: size of the KV cache, small
    enough that one request shows in its usage. Ports that are not given are free ones. Raises ConfigError if vLLM is
    not installed.
    """

    def __init__(
        self,
        role: Role,
        *,
        directory: Path,
        name: str | None = None,
        port: int | None = None,
        side_channel_port: int | None = None,
        lease_s: int = 30,
        load_failure_policy: LoadFailurePolicy = "fail",
        plugin: bool = False,
        abort_port: int | None = None,
        kv_blocks: int = 256,
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        installation: Installation | None = None,
        **options: Any,
    ) -> None:
        if plugin and role != "prefill":
            raise ValueError(f"the plugin is for prefillers, not for role {role!r}")
        installed = installation or find()
        self.role = role
        self.port = port or free_port()
        self.side_channel_port = side_channel_port or free_port()
        self.abort_port = (abort_port or free_port()) if plugin else None
        self.kv_blocks = kv_blocks
        # `vllm serve` looks for a distribution named vllm, which vllm-cpu is not.
        command = [
            *(str(installed.python), "-m", "vllm.entrypoints.openai.api_server"),
            *(
                "--model",
                str(installed.model),
                "--served-model-name",
                MODEL_NAME,
                "--dtype",
                "float32",
                "--enforce-eager",
            ),
            *("--host", HOST, "--port", str(self.port)),
            *("--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(kv_blocks)),
        ]
        if role != "plain":
            command += ["--kv-transfer-config", json.dumps(self._kv_transfer_config(lease_s, load_failure_policy))]
        python_path = [str(HERE / "two_cores"), *([_package_folder(directory)] if plugin else [])]
        super().__init__(
            [*command, *arguments],
            log=directory / f"{name or role}.log",
            name=name or role,
            ready=f"{self.url}/health",
            ready_timeout_s=options.pop("ready_timeout_s", 600.0),
            stop_timeout_s=options.pop("stop_timeout_s", 15.0),
            env={
                **_COMMON_ENV,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
                "PYTHONPATH": os.pathsep.join(python_path),
                **(env or {}),
            },
            **options,
        )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def metric(self, name: str) -> float:
        """The value that ``/metrics`` gives for a sample of this name, summed over its labels; 0 if there is none."""
        async with plain_http_client(timeout_s=60.0) as client:
            text = (await client.get(f"{self.url}/metrics")).raise_for_status().text
        # Only the lines looked for are parsed: there are many hundred, and tests ask again and again.
        lines = "\n".join(line for line in text.splitlines() if line.startswith(name))
        families = text_string_to_metric_families(lines + "\n")
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    async def pinned_blocks(self) -> int:
        """How many KV blocks are in use. With no request running, these are pinned ones."""
        usage = await self.metric("vllm:kv_cache_usage_perc")
        return round(usage * (self.kv_blocks - 1))  # vLLM keeps one block for itself

    def _kv_transfer_config(self, lease_s: int, load_failure_policy: LoadFailurePolicy) -> dict[str, Any]:
        extra: dict[str, Any] = {"kv_lease_duration": lease_s}
        config = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_buffer_device": "cpu",
            "kv_load_failure_policy": load_failure_policy,
            "kv_connector_extra_config": extra,
        }
        if self.abort_port is not None:
            config["kv_connector"] = "AbortableNixlConnector"
            config["kv_connector_module_path"] = "extproc.vllm_plugin.nixl"
            extra["abort_port"] = self.abort_port
        return config


@asynccontextmanager
async def running(*engines: VllmEngine) -> AsyncIterator[None]:
    """All of them started at once, which is much faster than one after the other, and stopped in the end."""
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        yield
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def _package_folder(directory: Path) -> str:
    """A folder for PYTHONPATH with this package and nothing else, whatever it is installed beside."""
    folder = directory / "python-path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "extproc"
    if not link.is_symlink():
        link.symlink_to(Path(extproc.__file__).parent.absolute(), target_is_directory=True)
    return str(folder)
