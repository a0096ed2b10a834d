"""Checks of the Envoy in front: what its own configuration dump says of the parts that the service depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import httpx

from extproc.check.findings import Findings
from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.replies import DESTINATION, LB_NAMESPACE, OWN_NAMESPACE

_EXT_PROC: Final = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_ACCESS_LOG: Final = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_OVERRIDE_HOST: Final = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_CLUSTER: Final = "envoy.config.cluster.v3.Cluster"
_ROUTES: Final = "envoy.config.route.v3.RouteConfiguration"
_BODY_MODES: Final = ("BUFFERED", "FULL_DUPLEX_STREAMED")
_DEFAULT_BUFFER: Final = 1024 * 1024
_SHORT_S: Final = 1.0
# Reasons for which nothing has reached the first decoder, so that another one may have the same params.
_SAFE_RETRIES: Final = {"connect-failure", "refused-stream"}


async def check_envoy(config: Config, fleet: Fleet, client: httpx.AsyncClient, findings: Findings) -> None:
    """Reads ``/config_dump`` and ``/clusters`` at ``envoy.admin``. An Envoy that is not there is only noted."""
    if config.envoy.admin is None:
        findings.note("envoy_unknown", "envoy", "its admin address is not configured", "set `envoy.admin` to check it")
        return
    base = f"http://{config.envoy.admin.replace('0.0.0.0:', '127.0.0.1:').replace('[::]:', '[::1]:')}"
    try:
        dump = (await client.get(f"{base}/config_dump")).raise_for_status().json()
        hosts = _hosts((await client.get(f"{base}/clusters?format=json")).raise_for_status().json())
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        text = f"no configuration dump at {base}: {type(error).__name__}"
        findings.note("envoy_unknown", "envoy", text, "start Envoy, or fix `envoy.admin`")
        return
    about = Findings()
    filters = list(_of_type(dump, _EXT_PROC))
    if not filters:
        about.error("no_filter", "envoy", "it has no ext_proc filter", "add one: see `extproc envoy`")
    for entry in filters:
        _check_filter(entry, config, about)
        _check_service_hosts(entry, hosts, about)
    if filters:
        _check_access_log(dump, about)
        _check_retries(dump, about)
        _check_buffers(dump, config, about)
        _check_decoders(dump, hosts, fleet, about)
    if not any(finding.level in ("warning", "error") for finding in about):
        about.ok("envoy", "filter, access log, metadata, limits and decode cluster fit")
    findings.extend(about)


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
    if body_mode == "BUFFERED":
        _check_patience(entry, config, findings)


def _check_patience(entry: dict[str, Any], config: Config, findings: Findings) -> None:
    """In the other mode Envoy has no time limits."""
    longest = _seconds(entry.get("max_message_timeout", "0s"))
    if longest < config.prefill.budget_s:
        findings.error(
            "message_timeout",
            "envoy",
            f"max_message_timeout is {longest:g} s, prefills may take {config.prefill.budget_s:g} s",
            "raise it above prefill.timeout_s × prefill.attempts + prefill.admission.max_wait_s",
        )
    shortest = _seconds(entry.get("message_timeout", "0.2s"))
    if shortest < _SHORT_S:
        text = f"message_timeout is {shortest:g} s: a service that is busy for a moment fails requests"
        findings.warning("short_message_timeout", "envoy", text, "set it to some seconds; prefills ask for more")


def _check_service_hosts(entry: dict[str, Any], hosts: Mapping[str, Mapping[str, bool]], findings: Findings) -> None:
    cluster = entry.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name")
    known = hosts.get(cluster, {})
    if cluster is not None and not any(known.values()):
        text = f"it finds no healthy service in its cluster {cluster!r}: {', '.join(known) or 'no hosts'}"
        findings.error("service_unseen", "envoy", text, "start the service, or fix `envoy.extproc` and the TLS files")


def _check_access_log(dump: Any, findings: Findings) -> None:
    if not any(True for _ in _of_type(dump, _ACCESS_LOG)):
        findings.warning(
            "no_access_log",
            "envoy",
            "no gRPC access log comes to the service: it has to guess how streams end",
            "add envoy.access_loggers.http_grpc to the connection manager: see `extproc envoy`",
        )


def _check_retries(dump: Any, findings: Findings) -> None:
    retried = {
        reason.strip()
        for routes in _of_type(dump, _ROUTES)
        for policy in _values(routes, "retry_policy")
        for reason in policy.get("retry_on", "").split(",")
    }
    if unsafe := sorted(retried - _SAFE_RETRIES - {""}):
        text = f"routes retry on {', '.join(unsafe)}: the same KV params may reach two decoders"
        findings.warning("retries", "envoy", text, "set retry_on to connect-failure: params are good for one decoder")


def _check_buffers(dump: Any, config: Config, findings: Findings) -> None:
    wanted = config.limits.body_bytes
    limits = [int(value) for value in _values(dump, "per_connection_buffer_limit_bytes")]
    routes = [
        int(value)
        for key in ("request_body_buffer_limit", "per_request_buffer_limit_bytes")
        for value in _values(dump, key)
    ]
    smallest = min(routes or limits, default=_DEFAULT_BUFFER)
    if smallest < wanted:
        findings.error(
            "buffer_limit",
            "envoy",
            f"it buffers {smallest} bytes of a body, the service takes {wanted}: larger bodies get 413 from Envoy",
            "set request_body_buffer_limit on the virtual host to limits.body_bytes and 1 MiB more",
        )


def _check_decoders(dump: Any, hosts: Mapping[str, Mapping[str, bool]], fleet: Fleet, findings: Findings) -> None:
    """Whether some cluster goes where the service says, and has the decoders among its hosts."""
    clusters = [
        cluster
        for cluster in _of_type(dump, _CLUSTER)
        if any(_reads_destination(policy) for policy in _of_type(cluster, _OVERRIDE_HOST))
    ]
    if any(True for _ in _values(dump, "original_dst_lb_config")):
        return  # goes to any address that it is told, and has no hosts of its own
    if not clusters:
        findings.error(
            "no_override_host",
            "envoy",
            "no cluster's load balancer reads the decoder that the service picks",
            "give the decode cluster the override_host policy: see `extproc envoy`",
        )
        return
    listed = {host for cluster in clusters for host in hosts.get(cluster.get("name", ""), {})}
    missing = [e.name for e in fleet.engines("decode") if e.endpoint and e.endpoint not in listed]
    if missing:
        text = f"its decode cluster does not have {', '.join(missing)}: requests meant for them go elsewhere"
        findings.error("hosts", "envoy", text, "add them to it: `extproc envoy` prints one that fits")


def _reads_destination(policy: dict[str, Any]) -> bool:
    sources: Sequence[dict[str, Any]] = policy.get("override_host_sources", [])
    return any(
        source.get("metadata", {}).get("key") == LB_NAMESPACE or source.get("header", "").lower() == DESTINATION
        for source in sources
    )


def _hosts(clusters: Any) -> dict[str, dict[str, bool]]:
    """``{cluster: {"ip:port": healthy}}`` of an answer of /clusters."""
    found: dict[str, dict[str, bool]] = {}
    for cluster in clusters.get("cluster_statuses", []):
        known = found.setdefault(cluster["name"], {})
        for host in cluster.get("host_statuses", []):
            if socket := host["address"].get("socket_address"):
                name = f"[{socket['address']}]" if ":" in socket["address"] else socket["address"]
                healthy = not host.get("health_status", {}).get("failed_active_health_check", False)
                known[f"{name}:{socket.get('port_value')}"] = healthy
    return found


def _of_type(node: Any, name: str) -> Iterator[dict[str, Any]]:
    """Every object of a protobuf type, anywhere in a dump."""
    if isinstance(node, dict):
        if str(node.get("@type", "")).endswith(f"/{name}"):
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
