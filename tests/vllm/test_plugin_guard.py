"""The plugin's module in the engines' own interpreter: it knows this vLLM, and refuses one that differs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from extproc.demo.vllm.install import find, offline
from extproc.demo.vllm.launch import VllmEngine
from tests.vllm.conftest import Pair

PROGRAM = """
import importlib, json, sys, types
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

said = {}
reap = base_worker.NixlBaseConnectorWorker._reap_expired_send_leases
base_worker.NixlBaseConnectorWorker._reap_expired_send_leases = lambda self, done: done.clear()
try:
    importlib.import_module("extproc.vllm_plugin.nixl")
except Exception as error:
    said["other internals"] = [type(error).__name__, str(error)]
base_worker.NixlBaseConnectorWorker._reap_expired_send_leases = reap

plugin = importlib.import_module("extproc.vllm_plugin.nixl")
said["connector"] = plugin.AbortableNixlConnector.__mro__[1].__name__
for port in (None, "5700", 0, 70000):
    extra = {} if port is None else {"abort_port": port}
    config = types.SimpleNamespace(kv_transfer_config=types.SimpleNamespace(get_from_extra_config=extra.get))
    try:
        plugin._base_port(config)
    except Exception as error:
        said[str(port)] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(vllm_directory: Path) -> dict[str, object]:
    installation = find()
    package = VllmEngine("prefill", directory=vllm_directory, plugin=True).env["PYTHONPATH"]
    env = os.environ | offline() | {"PYTHONPATH": package}
    ran = subprocess.run([installation.python, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True)
    answer: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_it_loads(said: dict[str, object]) -> None:
    assert said["connector"] == "NixlPullConnector"


def test_it_refuses_other_internals(said: dict[str, object]) -> None:
    assert said["other internals"] == [
        "IncompatibleVllmError",
        "extproc.vllm_plugin does not fit vLLM 0.32.0 (verified: 0.32.0): NixlPullConnectorWorker."
        "_reap_expired_send_leases() does not use _reqs_to_send, _reqs_to_process, perf_counter. "
        'Use "kv_connector": "NixlConnector" without "kv_connector_module_path" instead: '
        "the gateway then releases by way of a decoder",
    ]


@pytest.mark.parametrize(("port", "shown"), [("None", "None"), ("5700", "'5700'"), ("0", "0"), ("70000", "70000")])
def test_it_wants_a_port(said: dict[str, object], port: str, shown: str) -> None:
    message = f'kv_connector_extra_config must have "abort_port": a TCP port (got {shown})'
    assert said[port] == ["ValueError", message]


def test_the_two_core_fix_fits_the_engines(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        assert "two_cores:" not in engine.output()
