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
_LUA: Final = "envoy.extensions.filters.http.lua.v3.Lua"
_FILTER_CONFIG: Final = "envoy.config.route.v3.FilterConfig"
_PER_ROUTE: Final = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_OVERRIDE_HOST: Final = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_LISTENER: Final = "envoy.config.listener.v3.Listener"
_CLUSTER: Final = "envoy.config.cluster.v3.Cluster"
_ROUTES: Final = "envoy.config.route.v3.RouteConfiguration"
_BOOTSTRAP: Final = "envoy.admin.v3.BootstrapConfigDump"
_DEFAULT_BUFFER: Final = 1024 * 1024
_DEFAULT_REQUESTS: Final = 1024
_DEFAULT_ROUTE_TIMEOUT: Final = "15s"
_SELECTIVE: Final = {
    "status_code_filter",
    "duration_filter",
    "runtime_filter",
    "response_flag_filter",
    "grpc_status_filter",
}
"""Filters of an access log that leave requests out by how they went."""
_GONE: Final = ("draining_state", "error_state")
"""What Envoy keeps of listeners that no longer take requests, or never did."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route to a cluster, with what it inherits of its virtual host. Times in seconds, sizes in bytes."""

    clusters: frozenset[str]
    retry_on: frozenset[str]
    body_limit: int | None
    """None where the listener's counts."""
    timeout: float
    """For the whole answer; 0 for any time."""
    filters: Mapping[str, bool]
    """What it says of HTTP filters, by name: whether they see its requests."""


@dataclass(frozen=True)
class Processor:
    """An ext_proc filter."""

    config: Json
    connection_limit: int = _DEFAULT_BUFFER
    routes: Sequence[Route] = field(default_factory=list)
    """Of the connection manager that it is in."""
    name: str = ""
    """Of the HTTP filter, by which routes speak of it."""
    disabled: bool = False
    """Unless a route enables it."""
    guarded: bool = False
    """Whether a Lua filter is there, too: ``extproc envoy``'s guard is one."""

    def sees(self, route: Route) -> bool:
        """Whether requests of a route come to it."""
        return route.filters.get(self.name, not self.disabled)

    @property
    def cluster(self) -> str | None:
        """Where the service is; None for a service that is not reached through a cluster."""
        name: str | None = self.config.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name")
        return name

    @property
    def body_mode(self) -> str:
        return str(self.config.get("processing_mode", {}).get("request_body_mode", "NONE"))

    def header_mode(self, which: str) -> str:
        """Of ``request`` or ``response`` headers."""
        mode = str(self.config.get("processing_mode", {}).get(f"{which}_header_mode", "DEFAULT"))
        return "SEND" if mode == "DEFAULT" else mode

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
        self._statistics = _statistics(clusters)
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
                guarded = any(True for _ in _of_type(manager.get("http_filters"), _LUA))
                for entry, config in _holders(manager.get("http_filters"), _EXT_PROC):
                    off = bool(entry.get("disabled"))
                    found.append(Processor(config, limit, routes, str(entry.get("name", "")), off, guarded))
        known = [one.config for one in found]
        # Filters that are delivered by themselves (ECDS) are in no listener.
        return found + [Processor(config) for config in _of_type(self._configs, _EXT_PROC) if config not in known]

    @cached_property
    def decode_clusters(self) -> frozenset[str]:
        """The clusters that go where the service says."""
        return frozenset(
            name
            for name, cluster in self.clusters.items()
            if any(_reads_destination(policy) for policy in _of_type(cluster, _OVERRIDE_HOST)) or self._is_told(cluster)
        )

    @cached_property
    def has_any_host(self) -> bool:
        """Whether a decode cluster goes to any address that it is told, and has no hosts of its own."""
        return any(self._is_told(cluster) for cluster in self.clusters.values())

    @staticmethod
    def _is_told(cluster: Json) -> bool:
        told = cluster.get("original_dst_lb_config", {})
        return _reads_destination(
            {
                "override_host_sources": [
                    {"header": told.get("http_header_name", "")},
                    {"metadata": told.get("metadata_key", {})},
                ]
            }
        )

    @cached_property
    def has_access_log(self) -> bool:
        """Whether a gRPC access log goes anywhere."""
        return any(True for _ in _of_type(self._configs, _ACCESS_LOG))

    def access_logs(self, processor: Processor) -> list[Json]:
        """The loggers whose entries come to the service of a filter, as far as the dump tells.

        Their clusters need not be the same: one may have pods where the other has their Service, but the port is one.
        """
        ports = self._ports(processor.cluster)
        found: list[Json] = []
        for logger, config in _holders(self._configs, _ACCESS_LOG):
            target = config.get("common_config", {}).get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name")
            if (
                target in (None, processor.cluster)
                or not ports
                or not self._ports(target)
                or ports & self._ports(target)
            ):
                found.append(logger)
        return found

    def _ports(self, cluster: str | None) -> set[str]:
        return {host.rpartition(":")[2] for host in self.hosts.get(cluster or "", {})}

    @staticmethod
    def is_selective(logger: Json) -> bool:
        """Whether an access log leaves requests out by how they went."""
        return any(key in _SELECTIVE for key in logger.get("filter", {}))

    def speaks_http2(self, cluster: str) -> bool:
        """Whether Envoy uses HTTP/2 towards a cluster; True for one that the dump does not have."""
        config = self.clusters.get(cluster)
        if config is None or "http2_protocol_options" in config:
            return True
        return any(
            "http2_protocol_options" in options.get("explicit_http_config", {}) or "auto_config" in options
            for options in _of_type(config.get("typed_extension_protocol_options"), _HTTP_OPTIONS)
        )

    def room(self, cluster: str) -> int:
        """Requests at once that a cluster's circuit breaker lets through."""
        thresholds = self.clusters.get(cluster, {}).get("circuit_breakers", {}).get("thresholds", [])
        usual = [entry for entry in thresholds if entry.get("priority", "DEFAULT") == "DEFAULT"]
        return int(usual[0].get("max_requests", _DEFAULT_REQUESTS)) if usual else _DEFAULT_REQUESTS

    def failed_connections(self, cluster: str) -> int:
        """Attempts that came to nothing, where no host has a connection and no health check says how hosts are."""
        if "health_checks" in self.clusters.get(cluster, {}):
            return 0
        numbers = self._statistics.get(cluster, {})
        return 0 if numbers.get("cx_active") else numbers.get("cx_connect_fail", 0)

    @cached_property
    def clusters(self) -> Mapping[str, Json]:
        """By name."""
        return {str(cluster.get("name")): cluster for cluster in _of_type(self._configs, _CLUSTER)}

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
                yield Route(
                    frozenset(filter(None, names)),
                    frozenset(filter(None, (*reasons, *_copies(action, host)))),
                    _body_limit(route, host),
                    seconds(action.get("timeout", _DEFAULT_ROUTE_TIMEOUT)),
                    {name: sees for place in (config, host, route) for name, sees in _told_filters(place)},
                )


def _copies(action: Json, host: Json) -> Iterator[str]:
    """How else than by retries a second host may get a request."""
    hedging: Json = action.get("hedge_policy") or host.get("hedge_policy") or {}
    if hedging.get("hedge_on_per_try_timeout"):
        yield "hedge_on_per_try_timeout"
    if action.get("request_mirror_policies", host.get("request_mirror_policies")):
        yield "request_mirror_policies"


def _told_filters(place: Json) -> Iterator[tuple[str, bool]]:
    """What a route, or what it inherits from, says of filters: any word of its own enables one that is disabled."""
    for name, config in place.get("typed_per_filter_config", {}).items():
        yield name, not ((_is(config, _FILTER_CONFIG) or _is(config, _PER_ROUTE)) and config.get("disabled", False))


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
        _is_destination(source.get("metadata", {})) or source.get("header", "").lower() == DESTINATION
        for source in sources
    )


def _is_destination(metadata: Json) -> bool:
    path = [step.get("key") for step in metadata.get("path", [])]
    return bool(metadata.get("key") == LB_NAMESPACE and path == [DESTINATION])


def seconds(duration: Any) -> float:
    """A protobuf duration in its JSON form: ``145s``, ``0.200s``."""
    try:
        return float(str(duration).rstrip("s"))
    except ValueError:
        return 0.0


def _statistics(clusters: Json) -> Mapping[str, Mapping[str, int]]:
    """The sums over each cluster's hosts."""
    found: dict[str, dict[str, int]] = {}
    for cluster in clusters.get("cluster_statuses", []):
        numbers = found.setdefault(cluster["name"], {})
        for host in cluster.get("host_statuses", []):
            for entry in host.get("stats", []):
                numbers[entry["name"]] = numbers.get(entry["name"], 0) + int(entry.get("value", 0))
    return found


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


def _holders(node: Any, name: str) -> Iterator[tuple[Json, Json]]:
    """Every object whose ``typed_config`` is of a protobuf type, and that."""
    if isinstance(node, dict):
        if _is(node.get("typed_config"), name):
            yield node, node["typed_config"]
        for key, value in node.items():
            if key not in _GONE:
                yield from _holders(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _holders(value, name)
