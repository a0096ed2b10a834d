"""Refuses a vLLM that the plugin was not made for.

A release changes a private table of vLLM's worker, so a version that only looks alike could lose blocks or die. Checked
before the engine serves anything: the names that are used exist, and the functions that must work on them do refer to
them. Needs no vLLM itself: the classes to be checked are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

VERIFIED = ("0.32.0",)
"""vLLM versions on which the plugin was run. Others load with a warning if the checks pass."""


class IncompatibleVllmError(RuntimeError):
    """This vLLM cannot be used with the plugin. The text says what differs."""

    def __init__(self, version: str, differences: list[str]) -> None:
        super().__init__(
            f"extproc.vllm_plugin does not fit vLLM {version} (verified: {', '.join(VERIFIED)}): "
            + "; ".join(differences)
            + '. Use "kv_connector": "NixlConnector" without "kv_connector_module_path" instead: '
            "the gateway then releases by way of a decoder"
        )
        self.differences = differences


def check_classes(version: str, connector: type, worker: type) -> None:
    """Check ``NixlPullConnector`` and ``NixlPullConnectorWorker``. Raises IncompatibleVllmError."""
    differences = [*_class_differences(connector, worker)]
    if differences:
        raise IncompatibleVllmError(version, differences)


def check_worker(version: str, worker: Any) -> None:
    """Check the tables of a worker that has been made. Raises IncompatibleVllmError."""
    differences = [
        f"the worker's {name} is {type(getattr(worker, name, None)).__name__}, not {kind.__name__}"
        for name, kind in (("_reqs_to_send", dict), ("_reqs_to_process", set))
        if not isinstance(getattr(worker, name, None), kind)
    ]
    if differences:
        raise IncompatibleVllmError(version, differences)


def _class_differences(connector: type, worker: type) -> Iterator[str]:
    expected: tuple[tuple[type, str, tuple[str, ...]], ...] = (
        # The engine asks the connector each step, and the connector its worker …
        (connector, "get_transfer_results", ("connector_worker", "get_transfer_results")),
        # … which frees the leases that are over …
        (worker, "get_transfer_results", ("_reap_expired_send_leases",)),
        # … by its own thread's clock, out of both tables.
        (worker, "_reap_expired_send_leases", ("_reqs_to_send", "_reqs_to_process", "perf_counter")),
        (worker, "start_load_kv", ("_reqs_to_send", "_reqs_to_process", "reqs_in_batch")),
        # What a finished prefill tells the gateway passes through here.
        (connector, "request_finished", ("connector_scheduler",)),
        (connector, "request_finished_all_groups", ("connector_scheduler",)),
        (connector, "shutdown", ()),
    )
    for owner, name, references in expected:
        function = getattr(owner, name, None)
        if not callable(function):
            yield f"{owner.__name__} has no {name}()"
            continue
        missing = [reference for reference in references if reference not in _names(function)]
        if missing:
            yield f"{owner.__name__}.{name}() does not use {', '.join(missing)}"


def _names(function: Callable[..., Any]) -> set[str]:
    """Names that a function's code refers to, those of functions inside it included."""
    code = getattr(function, "__code__", None)
    pending, names = [code] if code is not None else [], set[str]()
    while pending:
        current = pending.pop()
        names.update(current.co_names)
        pending.extend(constant for constant in current.co_consts if hasattr(constant, "co_names"))
    return names
