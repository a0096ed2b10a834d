"""Checks of the Envoy in front: what its own configuration dump says of the parts that the service depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import httpx

from extproc.check.findings import Findings
from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.replies import LB_NAMESPACE, OWN_NAMESPACE

_EXT_PROC: Final = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_ACCESS_LOG: Final = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_OVERRIDE_HOST: Final = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_BODY_MODES: Final = ("BUFFERED", "FULL_DUPLEX_STREAMED")


async def check_envoy(config: Config, fleet: Fleet, client: httpx.AsyncClient, findings: Findings) -> None:
    """Reads ``/config_dump`` at ``envoy.admin``. An Envoy that is not there is only noted."""
    if config.envoy.admin is None:
        findings.note("envoy_unknown", "envoy", "its admin address is not configured", "set `envoy.admin` to check it")
        return
    base = f"http://{config.envoy.admin.replace('0.0.0.0:', '127.0.0.1:').replace('[::]:', '[::1]:')}"
    try:
        dump = (await client.get(f"{base}/config_dump?include_eds")).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        text = f"no configuration dump at {base}: {type(error).__name__}"
        findings.note("envoy_unknown", "envoy", text, "start Envoy, or fix `envoy.admin`")
        return
    filters = list(_of_type(dump, _EXT_PROC))
    if not filters:
        findings.error("no_filter", "envoy", "it has no ext_proc filter", "add one: see `extproc envoy`")
        return
    for entry in filters:
        _check_filter(entry, config, findings)
    if not list(_of_type(dump, _ACCESS_LOG)):
        findings.warning(
            "no_access_log",
            "envoy",
            "no gRPC access log comes to the service: it has to guess how streams end",
            "add envoy.access_loggers.http_grpc to the connection manager: see `extproc envoy`",
        )
    _check_policy(dump, findings)
    _check_buffers(dump, config, findings)
    _check_hosts(dump, fleet, findings)
    if not any(finding.subject == "envoy" and finding.level in ("warning", "error") for finding in findings):
        findings.ok("envoy", "filter, access log, metadata, limits and decode cluster fit")


def _check_filter(entry: dict[str, Any], config: Config, findings: Findings) -> None:
    mode = entry.get("processing_mode", {})
    body_mode = mode.get("request_body_mode", "NONE")
    if body_mode not in _BODY_MODES:
        text = f"request_body_mode is {body_mode}: requests are refused"
        findings.error("body_mode", "envoy", text, "set it to BUFFERED or FULL_DUPLEX_STREAMED")
    if mode.get("response_body_mode", "NONE") != "NONE":
        text = f"response_body_mode is {mode['response_body_mode']}: every token passes through the service for nothing"
        findings.warning("response_body", "envoy", text, "set it to NONE")
    namespaces = entry.get("metadata_options", {}).get("receiving_namespaces", {}).get("untyped", [])
    for namespace in (LB_NAMESPACE, OWN_NAMESPACE):
        if namespace not in namespaces:
            findings.error(
                "namespaces",
                "envoy",
                f"dynamic metadata {namespace!r} is dropped without a word",
                f"add {namespace} to metadata_options.receiving_namespaces.untyped",
            )
    longest = _seconds(entry.get("max_message_timeout", "0s"))
    if body_mode == "BUFFERED" and longest < config.prefill.budget_s:
        findings.error(
            "message_timeout",
            "envoy",
            f"max_message_timeout is {longest:g} s, prefills may take {config.prefill.budget_s:g} s",
            "raise it above prefill.timeout_s × prefill.attempts + prefill.admission.max_wait_s",
        )


def _check_policy(dump: Any, findings: Findings) -> None:
    sources = [
        source for policy in _of_type(dump, _OVERRIDE_HOST) for source in policy.get("override_host_sources", [])
    ]
    keys = [source.get("metadata", {}).get("key") for source in sources] + [source.get("header") for source in sources]
    if LB_NAMESPACE not in keys and "x-gateway-destination-endpoint" not in keys:
        findings.error(
            "no_override_host",
            "envoy",
            "no cluster's load balancer reads the decoder that the service picks",
            "give the decode cluster the override_host policy: see `extproc envoy`",
        )


def _check_buffers(dump: Any, config: Config, findings: Findings) -> None:
    wanted = config.limits.body_bytes
    limits = [int(value) for value in _values(dump, "per_connection_buffer_limit_bytes")]
    routes = [int(value) for value in _values(dump, "request_body_buffer_limit")]
    smallest = min(routes or limits, default=1024 * 1024)
    if smallest < wanted:
        findings.error(
            "buffer_limit",
            "envoy",
            f"it buffers {smallest} bytes of a body, the service takes {wanted}: larger bodies get 413 from Envoy",
            "set per_connection_buffer_limit_bytes to limits.body_bytes on the listener and the clusters",
        )


def _check_hosts(dump: Any, fleet: Fleet, findings: Findings) -> None:
    """Decoders that no static cluster lists can never be reached; a cluster fed by EDS or DNS lists none here."""
    listed = {
        f"[{s['address']}]:{s.get('port_value')}" if ":" in s["address"] else f"{s['address']}:{s.get('port_value')}"
        for s in _values(dump, "socket_address")
        if isinstance(s, dict) and "address" in s
    }
    dynamic = any(value in ("EDS", "STRICT_DNS", "LOGICAL_DNS") for value in _values(dump, "type")) or any(
        True for _ in _values(dump, "cluster_type")
    )
    missing = [e.name for e in fleet.engines("decode") if e.endpoint and e.endpoint not in listed]
    if missing and not dynamic:
        text = f"its clusters do not list {', '.join(missing)}: requests meant for them go elsewhere"
        findings.error("hosts", "envoy", text, "add them to the decode cluster, or use `extproc envoy --eds`")


def _of_type(node: Any, name: str) -> Iterator[dict[str, Any]]:
    """Every object of a protobuf type, anywhere in a dump."""
    if isinstance(node, dict):
        if str(node.get("@type", "")).endswith(name):
            yield node
        for value in node.values():
            yield from _of_type(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _of_type(value, name)


def _values(node: Any, key: str) -> Iterator[Any]:
    """Every value under a key, anywhere in a dump."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from _values(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, key)


def _seconds(duration: str) -> float:
    try:
        return float(duration.rstrip("s"))
    except ValueError:
        return 0.0
