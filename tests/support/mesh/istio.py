"""Istio: the gateway proxy's configuration, and EnvoyFilters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tests.support.manifests import Object, of_kind, one
from tests.support.mesh.common import (
    LISTEN,
    MANAGER,
    OTHER_PATH,
    UNBOUNDED,
    Json,
    PatchError,
    bootstrap,
    cluster,
    connection_manager,
    extension,
    manager,
    router,
)


def istio(objects: Sequence[Object], decoders: Iterable[str], service: str, others: Iterable[str]) -> Json:
    """What istiod gives the gateway's proxy, with the EnvoyFilters of ``objects`` applied."""
    route = one(list(objects), "HTTPRoute", "inference")
    namespace, name = route["metadata"]["namespace"], route["metadata"]["name"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    decode = f"outbound|{backend['port']}||{backend['name']}.{namespace}.svc.cluster.local"
    retries = {  # Istio's default, of the time when it still repeated 503 as well
        "retry_on": "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes",
        "num_retries": 2,
        "retriable_status_codes": [503],
        "retry_host_predicate": [
            extension(
                "envoy.retry_host_predicates.previous_hosts",
                "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
            )
        ],
        "host_selection_retry_max_attempts": 5,
    }

    def routed(route_name: str, prefix: str, to: str) -> Json:
        action = {"cluster": to, "timeout": "0s", "retry_policy": copy.deepcopy(retries)}
        return {"name": route_name, "match": {"prefix": prefix}, "route": action}

    routes = [
        routed("apps.other.0", OTHER_PATH, "outbound|80||other.apps.svc.cluster.local"),
        routed(f"{namespace}.{name}.0", "/", decode),
    ]
    hosts = [{"name": "*:80", "domains": ["*"], "routes": routes}]
    connections = connection_manager(
        stat_prefix="outbound_0.0.0.0_80",
        route_config={"name": "http.80", "virtual_hosts": hosts},
        normalize_path=True,
        server_name="istio-envoy",
        stream_idle_timeout="0s",
        upgrade_configs=[{"upgrade_type": "websocket"}],
        http_filters=[
            extension("envoy.filters.http.cors", "extensions.filters.http.cors.v3.Cors"),
            extension("envoy.filters.http.fault", "extensions.filters.http.fault.v3.HTTPFault"),
            router(),
        ],
        access_log=[
            extension("envoy.access_loggers.file", "extensions.access_loggers.file.v3.FileAccessLog", path="/dev/null")
        ],
    )
    listener = {
        "name": "0.0.0.0_80",
        "address": LISTEN,
        "per_connection_buffer_limit_bytes": 32768,
        "filter_chains": [{"filters": [connections]}],
    }
    least = {"lb_policy": "LEAST_REQUEST", "common_lb_config": {}, "circuit_breakers": UNBOUNDED}
    configuration = bootstrap(
        listener,
        [
            cluster(decode, decoders, **least),
            cluster(f"outbound|9002||extproc.{namespace}.svc.cluster.local", [service], http2=True, **least),
            cluster("outbound|80||other.apps.svc.cluster.local", others, **least),
        ],
    )
    labels = {"gateway.networking.k8s.io/gateway-name": "inference"}
    for envoy_filter in of_kind(list(objects), "EnvoyFilter"):
        selector = envoy_filter["spec"]["workloadSelector"]["labels"]
        if selector.items() <= labels.items():
            apply_envoy_filter(configuration, envoy_filter)
    return configuration


def apply_envoy_filter(configuration: Json, envoy_filter: Object) -> None:
    """Istio's rules, for what the manifests use. Raises PatchError for a patch that matches nothing."""
    for number, patch in enumerate(envoy_filter["spec"]["configPatches"]):
        place, operation = patch["applyTo"], patch["patch"]["operation"]
        apply = _ISTIO.get((place, operation))
        if apply is None or patch["match"]["context"] != "GATEWAY":
            raise PatchError(f"patch {number}: {operation} on {place} of {patch['match']['context']} is not known here")
        if not apply(configuration["static_resources"], patch["match"], copy.deepcopy(patch["patch"]["value"])):
            raise PatchError(f"patch {number}: {place} matches nothing")


def _insert_http_filter(resources: Json, match: Json, value: Json) -> bool:
    before = match["listener"]["filterChain"]["filter"]["subFilter"]["name"]
    done = False
    for listener in resources["listeners"]:
        filters = manager(listener)["http_filters"]
        for position, known in enumerate(filters):
            if known["name"] == before:
                filters.insert(position, value)
                done = True
                break
    return done


def _merge_network_filter(resources: Json, match: Json, value: Json) -> bool:
    if match["listener"]["filterChain"]["filter"]["name"] != MANAGER:
        return False
    for listener in resources["listeners"]:
        merge(manager(listener), copy.deepcopy(value["typed_config"]))
    return bool(resources["listeners"])


def _merge_listener(resources: Json, _match: Json, value: Json) -> bool:
    for listener in resources["listeners"]:
        merge(listener, copy.deepcopy(value))
    return bool(resources["listeners"])


def _merge_route(resources: Json, match: Json, value: Json) -> bool:
    wanted = match["routeConfiguration"]["vhost"]["route"]["name"]
    found = [
        route
        for listener in resources["listeners"]
        for host in manager(listener)["route_config"]["virtual_hosts"]
        for route in host["routes"]
        if route["name"] == wanted
    ]
    for route in found:
        merge(route, copy.deepcopy(value))
    return bool(found)


def _merge_cluster(resources: Json, match: Json, value: Json) -> bool:
    found = [known for known in resources["clusters"] if known["name"].split("|")[-1] == match["cluster"]["service"]]
    for known in found:
        merge(known, copy.deepcopy(value))
    return bool(found)


_ISTIO: Final[Mapping[tuple[str, str], Callable[[Json, Json, Json], bool]]] = {
    ("HTTP_FILTER", "INSERT_BEFORE"): _insert_http_filter,
    ("NETWORK_FILTER", "MERGE"): _merge_network_filter,
    ("LISTENER", "MERGE"): _merge_listener,
    ("HTTP_ROUTE", "MERGE"): _merge_route,
    ("CLUSTER", "MERGE"): _merge_cluster,
}


def merge(into: Json, value: Json) -> None:
    """As protobuf merges messages: fields of a message one by one, lists one after the other, the rest replaced."""
    for key, new in value.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            merge(old, new)
        elif isinstance(old, list) and isinstance(new, list):
            old.extend(new)
        else:
            into[key] = new
