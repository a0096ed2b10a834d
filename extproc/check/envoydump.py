"""An Envoy's own account of its configuration (``/config_dump``, ``/clusters``), down to what the checks ask about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from extproc.replies import DESTINATION, LB_NAMESPACE, OWN_NAMESPACE

Json = dict[str, Any]

_EXT_PROC: Final = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_MANAGER: Final = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ACCESS_LOG: Final = "envoy.extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig"
_OVERRIDE_HOST: Final = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_LISTENER: Final = "envoy.config.listener.v3.Listener"
_CLUSTER: Final = "envoy.config.cluster.v3.Cluster"
_ROUTES: Final = "envoy.config.route.v3.RouteConfiguration"
_BOOTSTRAP: Final = "envoy.admin.v3.BootstrapConfigDump"
_DEFAULT_BUFFER: Final = 1024 * 1024
_GONE: Final = ("draining_state", "error_state")
"""What Envoy keeps of listeners that no longer take requests, or never did."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route to a cluster, with what it inherits of its virtual host. Times in seconds, sizes in bytes."""

    clusters: frozenset[str]
    retry_on: frozenset[str]
    body_limit: int | None
    """None where the listener's counts."""


@dataclass(frozen=True)
class Processor:
    """An ext_proc filter."""

    config: Json
    connection_limit: int = _DEFAULT_BUFFER
    routes: Sequence[Route] = field(default_factory=list)
    """Of the connection manager that it is in."""

    @property
    def cluster(self) -> str | None:
        """Where the service is; None for a service that is not reached through a cluster."""
        name: str | None = self.config.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name")
        return name

    @property
    def body_mode(self) -> str:
        return str(self.config.get("processing_mode", {}).get("request_body_mode", "NONE"))

    @property
    def response_body_mode(self) -> str:
        return str(self.config.get("processing_mode", {}).get("response_body_mode", "NONE"))

    @property
    def is_endpoint_picker(self) -> bool:
        """Whether a gateway has set it up for an InferencePool: bodies are streamed both ways then."""
        return self.body_mode == self.response_body_mode == "FULL_DUPLEX_STREAMED"

    @property
    def namespaces(self) -> Sequence[str]:
        """Of dynamic metadata that it takes from the service."""
        options = self.config.get("metadata_options", {})
        names: Sequence[str] = options.get("receiving_namespaces", {}).get("untyped", [])
        return names

    def buffered(self, route: Route) -> int:
        """Bytes of a body that fit: Envoy 1.40 takes the larger one of the listener's limit and the route's."""
        return max(self.connection_limit, route.body_limit or 0)


class EnvoyDump:
    """Raises KeyError or TypeError for what is no dump."""

    def __init__(self, dump: Json, clusters: Json) -> None:
        self._configs = [config for config in dump["configs"] if not _is(config, _BOOTSTRAP)]  # said again elsewhere
        self.hosts = _hosts(clusters)
        """``{cluster: {"ip:port": healthy}}``."""

    def processors(self, service: str) -> list[Processor]:
        """The filters that call the service at ``service`` (``host:port``); or that pass on what it tells; or all."""
        found = self._all_processors
        ours = [one for one in found if service in self.hosts.get(one.cluster or "", {})]
        ours = ours or [one for one in found if {LB_NAMESPACE, OWN_NAMESPACE} & set(one.namespaces)]
        return ours or found

    @cached_property
    def _all_processors(self) -> list[Processor]:
        route_configs = {config.get("name"): config for config in _of_type(self._configs, _ROUTES)}
        found: list[Processor] = []
        for listener in _of_type(self._configs, _LISTENER):
            limit = int(listener.get("per_connection_buffer_limit_bytes", _DEFAULT_BUFFER))
            for manager in _of_type(listener, _MANAGER):
                name = manager.get("rds", {}).get("route_config_name")
                routes = list(_routes(manager.get("route_config") or route_configs.get(name, {})))
                found += [Processor(config, limit, routes) for config in _of_type(manager, _EXT_PROC)]
        known = [one.config for one in found]
        # Filters that are delivered by themselves (ECDS) are in no listener.
        return found + [Processor(config) for config in _of_type(self._configs, _EXT_PROC) if config not in known]

    @cached_property
    def decode_clusters(self) -> frozenset[str]:
        """The clusters that go where the service says."""
        return frozenset(
            str(cluster.get("name"))
            for cluster in _of_type(self._configs, _CLUSTER)
            if any(_reads_destination(policy) for policy in _of_type(cluster, _OVERRIDE_HOST)) or self._is_told(cluster)
        )

    @cached_property
    def has_any_host(self) -> bool:
        """Whether a decode cluster goes to any address that it is told, and has no hosts of its own."""
        return any(self._is_told(cluster) for cluster in _of_type(self._configs, _CLUSTER))

    @staticmethod
    def _is_told(cluster: Json) -> bool:
        told = cluster.get("original_dst_lb_config", {})
        return _reads_destination(
            {
                "override_host_sources": [
                    {"header": told.get("http_header_name", "")},
                    {"metadata": {"key": told.get("metadata_key", {}).get("key")}},
                ]
            }
        )

    @cached_property
    def has_access_log(self) -> bool:
        """Whether a gRPC access log goes anywhere."""
        return any(True for _ in _of_type(self._configs, _ACCESS_LOG))

    def decode_routes(self, processor: Processor) -> list[Route]:
        """The routes to decode clusters; all of them, where there is no such cluster."""
        to_decoders = [route for route in processor.routes if route.clusters & self.decode_clusters]
        return to_decoders if self.decode_clusters else list(processor.routes)


def _routes(config: Json) -> Iterator[Route]:
    for host in config.get("virtual_hosts", []):
        for route in host.get("routes", []):
            if (action := route.get("route")) is not None:
                weighted = action.get("weighted_clusters", {}).get("clusters", [])
                names = [action.get("cluster"), *(entry.get("name") for entry in weighted)]
                policy = action.get("retry_policy", host.get("retry_policy", {}))
                reasons = (reason.strip() for reason in policy.get("retry_on", "").split(","))
                limit = _body_limit(route, host)
                yield Route(frozenset(filter(None, names)), frozenset(filter(None, reasons)), limit)


def _body_limit(route: Json, host: Json) -> int | None:
    """The newer field first, of the route or of its virtual host (seen with Envoy 1.40)."""
    for key in ("request_body_buffer_limit", "per_request_buffer_limit_bytes"):
        for place in (route, host):
            if key in place:
                return int(place[key])
    return None


def _reads_destination(policy: Json) -> bool:
    sources: Sequence[Json] = policy.get("override_host_sources", [])
    return any(
        source.get("metadata", {}).get("key") == LB_NAMESPACE or source.get("header", "").lower() == DESTINATION
        for source in sources
    )


def _hosts(clusters: Json) -> Mapping[str, Mapping[str, bool]]:
    found: dict[str, dict[str, bool]] = {}
    for cluster in clusters.get("cluster_statuses", []):
        known = found.setdefault(cluster["name"], {})
        for host in cluster.get("host_statuses", []):
            if socket := host["address"].get("socket_address"):
                name = f"[{socket['address']}]" if ":" in socket["address"] else socket["address"]
                healthy = not host.get("health_status", {}).get("failed_active_health_check", False)
                known[f"{name}:{socket.get('port_value')}"] = healthy
    return found


def _is(node: Any, name: str) -> bool:
    return isinstance(node, dict) and str(node.get("@type", "")).endswith(f"/{name}")


def _of_type(node: Any, name: str) -> Iterator[Json]:
    """Every object of a protobuf type, anywhere in a dump."""
    if isinstance(node, dict):
        if _is(node, name):
            yield node
        for key, value in node.items():
            if key not in _GONE:
                yield from _of_type(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _of_type(value, name)
