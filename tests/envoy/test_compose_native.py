"""The containers of the compose file's profile ``sim``, run as processes: same commands, files and health checks.

Each "container" gets a loopback address of its own, so ports stay as they are; only names and addresses are rewritten.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from extproc.processes import Process, find_envoy
from tests.support.compose import compose_config, dockerfile, exec_form

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="other systems have only one loopback address"),
]

PROGRAMS = {
    "envoy": find_envoy(),
    "extproc": str(Path(sys.executable).with_name("extproc")),
    "python": sys.executable,
    "python3": sys.executable,
    "bash": "bash",
}
# Outside a container several Envoys share a machine, and its two cores.
BESIDE_OTHERS = {"envoy": ["--use-dynamic-base-id", "--concurrency", "1"]}


class Containers:
    """The profile's services on loopback addresses. ``files`` is a directory for the rewritten configurations."""

    def __init__(self, files: Path) -> None:
        network = f"127.{os.getpid() // 250 % 250 + 2}.{os.getpid() % 250 + 2}"
        self.addresses = {"envoy": f"{network}.2", "extproc": f"{network}.3"}
        self.addresses |= {"prefill": f"{network}.11", "decode": f"{network}.12"}
        values = {"PREFILL_ADDRESS": f"{network}.11", "DECODE_ADDRESS": f"{network}.12"}
        self.services = compose_config("sim", {"FLEET_SUBNET": f"{network}.0/24", **values})["services"]
        self.files = files

    def address(self, service: str) -> str:
        """The service's own address, under whichever of its names the others know it."""
        names = [service, *((self.services[service]["networks"]["fleet"] or {}).get("aliases") or [])]
        return next(self.addresses[name] for name in names if name in self.addresses)

    def process(self, service: str) -> Process:
        image = dockerfile() if "build" in self.services[service] else {}
        settings = self.services[service]
        command = settings.get("command") or exec_form(image["CMD"][0])
        entrypoint = exec_form(image["ENTRYPOINT"][0]) if image else ["envoy"]
        mounted = {target: self._localized(service, Path(source)) for source, target in self._mounts(service)}
        arguments = [mounted.get(one, self._local(service, one)) for one in command]
        program, *more = entrypoint
        health = settings["healthcheck"]["test"][1:] if "healthcheck" in settings else None
        health = health or exec_form(image["HEALTHCHECK"][0])

        async def healthy() -> bool:
            check = [PROGRAMS[health[0]], *(self._local(service, one) for one in health[1:])]
            running = await asyncio.create_subprocess_exec(*check, stderr=asyncio.subprocess.DEVNULL)
            return await running.wait() == 0

        return Process(
            [PROGRAMS[program], *more, *arguments, *BESIDE_OTHERS.get(service, [])],
            name=service,
            log=self.files / f"{service}.log",
            ready=healthy,
            ready_timeout_s=90,
        )

    def _mounts(self, service: str) -> list[tuple[str, str]]:
        volumes = self.services[service].get("volumes", [])
        return [
            (one["source"], one["target"]) if isinstance(one, dict) else (one.split(":")[0], one.split(":")[1])
            for one in volumes
        ]

    def _local(self, service: str, text: str) -> str:
        """Text that speaks of the container's own addresses, made to speak of its loopback address."""
        return text.replace("0.0.0.0", self.address(service)).replace("127.0.0.1", self.address(service))

    def _localized(self, service: str, source: Path) -> str:
        """A copy of a mounted YAML file, in which hosts are loopback addresses."""
        copy = self.files / f"{service}-{source.name}"
        copy.write_text(yaml.safe_dump(self._with_hosts(service, yaml.safe_load(source.read_text()))))
        return str(copy)

    def _with_hosts(self, service: str, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: self._with_hosts(service, one, name) for name, one in value.items()}
        if isinstance(value, list):
            return [self._with_hosts(service, one, key) for one in value]
        if isinstance(value, str) and key == "address":  # Envoy's socket addresses
            return self.addresses.get(value) or self._local(service, value)
        if isinstance(value, str) and re.search(r"(^|/)[a-z0-9.]+:\d+$", value):  # host:port, with or without a scheme
            host = value.rpartition("/")[2].rpartition(":")[0]
            return self._local(service, value.replace(f"{host}:", f"{self.addresses.get(host, host)}:"))
        return value


@asynccontextmanager
async def running(containers: Containers) -> AsyncIterator[None]:
    """All services, each started once those that it depends on are healthy."""
    waves: dict[int, list[str]] = {}
    for name, settings in containers.services.items():
        waves.setdefault(len(settings.get("depends_on", {})), []).append(name)
    async with AsyncExitStack() as stack:
        for _, names in sorted(waves.items()):
            processes = [containers.process(name) for name in names]
            for process in processes:
                stack.push_async_exit(process)
            async with asyncio.TaskGroup() as starting:
                for process in processes:
                    starting.create_task(process.start())
        yield


async def until_ready(client: httpx.AsyncClient, containers: Containers) -> None:
    """The service has its engines, and Envoy knows."""
    admin = f"http://{containers.addresses['envoy']}:9901/clusters?format=json"
    async with asyncio.timeout(20):
        while True:
            ready = await client.get(f"http://{containers.addresses['extproc']}:9003/readyz")
            clusters = {one["name"]: one for one in (await client.get(admin)).json()["cluster_statuses"]}
            (host,) = clusters["extproc"]["host_statuses"]
            if ready.status_code == 200 and "failed_active_health_check" not in host["health_status"]:
                return
            await asyncio.sleep(0.05)


async def test_a_chat_completion_through_all_containers_is_disaggregated(tmp_path: Path) -> None:
    containers = Containers(tmp_path)
    model = "Qwen/Qwen3-0.6B"
    request = {"model": model, "messages": [{"role": "user", "content": "Tell me of Lisbon. " * 20}], "max_tokens": 9}
    async with running(containers), httpx.AsyncClient(trust_env=False, timeout=10) as client:
        await until_ready(client, containers)
        answer = await client.post(f"http://{containers.addresses['envoy']}:8080/v1/chat/completions", json=request)
        assert answer.status_code == 200
        assert re.match(r"prefill;dur=\d", answer.headers["server-timing"])

        plain = await client.post(f"http://{containers.addresses['decode']}:8000/v1/chat/completions", json=request)
        assert answer.json()["choices"] == plain.json()["choices"]
        assert answer.json()["usage"] == plain.json()["usage"]

        prefill = await state(client, containers.addresses["prefill"])
        assert [(one["leg"], one["status"]) for one in prefill["requests"]] == [("prefill", 200)]
        assert prefill["blocks"]["pinned"] == 0
        decode_log = (await state(client, containers.addresses["decode"]))["requests"]
        assert [(one["leg"], one["pulled"], one["status"]) for one in decode_log] == [
            ("decode", True, 200),
            ("plain", False, 200),
        ]
        assert decode_log[0]["request_id"] == prefill["requests"][0]["request_id"]


async def state(client: httpx.AsyncClient, address: str) -> dict[str, Any]:
    answer = (await client.get(f"http://{address}:8000/sim/state")).json()
    assert isinstance(answer, dict)
    return answer
