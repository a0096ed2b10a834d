"""Makes a prefill/decode pair of vLLM usable on two CPU cores.

Python runs this file at its start where PYTHONPATH names the folder.

Two busy loops, harmless on a large machine, starve everything else on a small one:

* NIXL's Python binding starts UCX's progress thread with no pause between its rounds (``pthrDelay = 0``).
* vLLM's shared-memory queue polls with ``os.sched_yield`` for a second after each message, and as long as any KV block
  is pinned.

Both get a pause here, only in the processes of the engines that ``extproc.demo.vllm.launch`` starts. Where the code to
be changed looks different, it is left alone and a line on stderr says so. No package file is changed, and nothing
outside the standard library is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PROGRESS_PAUSE_US = 1000
POLL_PAUSE_S = 0.0005

_NIXL_BINDING = re.compile(r"nixl_(cu\d+|rocm)\._bindings")


def warn(reason: str) -> None:
    print(f"two_cores: {reason}; this engine may need more than two cores", file=sys.stderr, flush=True)


def slow_progress_thread(bindings: Any) -> None:
    """Wrap the binding's agent: its configuration gets a pause before the agent, and with it the thread, is made."""
    agent = getattr(bindings, "nixlAgent", None)
    config = getattr(bindings, "nixlAgentConfig", None)
    if agent is None or not hasattr(config, "pthrDelay"):
        warn(f"{bindings.__name__} has no nixlAgentConfig.pthrDelay")
        return

    def paused_agent(name: str, configuration: Any) -> Any:
        configuration.pthrDelay = max(configuration.pthrDelay, PROGRESS_PAUSE_US)
        return agent(name, configuration)

    bindings.nixlAgent = paused_agent


class _BindingFinder(importlib.abc.MetaPathFinder):
    """Finds NIXL's compiled binding as usual, and patches it once it has been loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _NIXL_BINDING.fullmatch(fullname):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        slow_progress_thread(module)


def install() -> None:
    sys.meta_path.insert(0, _BindingFinder())
    if hasattr(os, "sched_yield"):
        os.sched_yield = lambda: time.sleep(POLL_PAUSE_S)
    else:
        warn("this Python has no os.sched_yield")


install()
