"""The two-core fix, in an interpreter of its own with a stand-in for NIXL's compiled binding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from extproc.demo.vllm.install import HERE

BINDING = """
class nixlAgentConfig:
    pthrDelay = 7

def nixlAgent(name, configuration):
    return name, configuration.pthrDelay
"""


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program as the engines run: both folders on PYTHONPATH, nothing inherited."""
    env = {"PYTHONPATH": f"{HERE / 'two_cores'}:{folder}"}
    return subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True)


def binding(folder: Path, package: str, source: str) -> None:
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "_bindings.py").write_text(source)


@pytest.mark.parametrize("package", ["nixl_cu12", "nixl_cu13", "nixl_rocm"])
def test_the_progress_thread_gets_a_pause(tmp_path: Path, package: str) -> None:
    binding(tmp_path, package, BINDING)
    program = f"""
from {package} import _bindings
configuration = _bindings.nixlAgentConfig()
configuration.pthrDelay = 0  # as NIXL's Python class sets it
print(_bindings.nixlAgent("agent", configuration))
"""
    ran = run(tmp_path, program)
    assert ran.stdout == "('agent', 1000)\n"
    assert ran.stderr == ""


def test_a_longer_pause_is_kept(tmp_path: Path) -> None:
    binding(tmp_path, "nixl_cu13", BINDING)
    program = """
from nixl_cu13 import _bindings
configuration = _bindings.nixlAgentConfig()
configuration.pthrDelay = 50_000
print(_bindings.nixlAgent("agent", configuration))
"""
    assert run(tmp_path, program).stdout == "('agent', 50000)\n"


@pytest.mark.parametrize(
    "source", ["nixlAgent = print", "class nixlAgentConfig: pthrDelay = 0", "class nixlAgentConfig: 0"]
)
def test_a_binding_that_differs_is_left_alone_with_a_warning(tmp_path: Path, source: str) -> None:
    binding(tmp_path, "nixl_cu13", source)
    ran = run(tmp_path, "from nixl_cu13 import _bindings; print(getattr(_bindings, 'nixlAgent', None))")
    assert ran.stdout in ("None\n", "<built-in function print>\n")
    assert ran.stderr == (
        "two_cores: nixl_cu13._bindings has no nixlAgentConfig.pthrDelay; this engine may need more than two cores\n"
    )


def test_yielding_the_processor_sleeps_instead(tmp_path: Path) -> None:
    program = """
import os, time
started, used = time.perf_counter(), time.process_time()
for _ in range(20):
    os.sched_yield()
print(time.perf_counter() - started >= 0.01, time.process_time() - used < 0.01)
"""
    assert run(tmp_path, program).stdout == "True True\n"


def test_other_modules_are_found_as_ever(tmp_path: Path) -> None:
    binding(tmp_path, "other_cu13", BINDING)
    assert run(tmp_path, "import json, other_cu13._bindings as b; print(b.nixlAgent.__module__)").stdout == (
        "other_cu13._bindings\n"
    )
