"""What the configurations of all control planes are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

Json = dict[str, Any]

TYPES: Final = "type.googleapis.com/envoy"
MANAGER: Final = "envoy.filters.network.http_connection_manager"
DESTINATION: Final = "x-gateway-destination-endpoint"
OTHER_PATH: Final = "/other-app"
"""A path of somebody else's route on the same gateway, in every configuration here."""
LISTEN: Final = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}


class PatchError(Exception):
    """A patch that would have no effect."""


UNBOUNDED: Final = {
    "thresholds": [
        dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), 4_294_967_295)
    ]
}
"""Istio's circuit breakers, where no DestinationRule sets others."""


def extension(name: str, type_name: str, **fields: Any) -> Json:
    return {"name": name, "typed_config": {"@type": f"{TYPES}.{type_name}", **fields}}


def bootstrap(listener: Json, clusters: Sequence[Json]) -> Json:
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": LISTEN},
        "static_resources": {"listeners": [listener], "clusters": list(clusters)},
    }


def cluster(name: str, endpoints: Iterable[str], *, http2: bool = False, **fields: Any) -> Json:
    """``endpoints`` are ``host:port``."""
    addresses = [endpoint.rsplit(":", 1) for endpoint in endpoints]
    hosts = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in addresses
    ]
    protocol = {"http2_protocol_options": {}} if http2 else {"http_protocol_options": {}}
    options = {"@type": f"{TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config": protocol}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "per_connection_buffer_limit_bytes": 32768,
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        **fields,
    }


def manager(listener: Json) -> Json:
    """The HTTP connection manager's configuration."""
    chain = listener.get("default_filter_chain") or listener["filter_chains"][0]
    (found,) = [filter_ for filter_ in chain["filters"] if filter_["name"] == MANAGER]
    configuration: Json = found["typed_config"]
    return configuration


def connection_manager(**fields: Any) -> Json:
    kind = f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
    return {"name": MANAGER, "typed_config": {"@type": kind, "use_remote_address": True, **fields}}


def router(**fields: Any) -> Json:
    return extension("envoy.filters.http.router", "extensions.filters.http.router.v3.Router", **fields)
