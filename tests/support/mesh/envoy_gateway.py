"""Envoy Gateway: its translation of the manifests, and EnvoyPatchPolicies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import jsonpath

from tests.support.manifests import Object, of_kind, one
from tests.support.mesh.common import (
    LISTEN,
    OTHER_PATH,
    TYPES,
    Json,
    PatchError,
    bootstrap,
    cluster,
    connection_manager,
    extension,
    router,
)


def envoy_gateway(
    objects: Sequence[Object], decoders: Iterable[str], service: str, others: Iterable[str], *, patched: bool = True
) -> Json:
    """What Envoy Gateway makes of the manifests; ``patched``: with EnvoyPatchPolicies allowed."""
    all_objects = list(objects)
    route = one(all_objects, "HTTPRoute", "inference")
    namespace, name = route["metadata"]["namespace"], route["metadata"]["name"]
    traffic = one(all_objects, "BackendTrafficPolicy", "extproc")["spec"]
    client = one(all_objects, "ClientTrafficPolicy", "extproc")["spec"]
    extension_policy = one(all_objects, "EnvoyExtensionPolicy", "extproc")
    (processor,) = extension_policy["spec"]["extProc"]
    filter_name = f"envoy.filters.http.ext_proc/envoyextensionpolicy/{namespace}/extproc/extproc/0"
    service_cluster = f"envoyextensionpolicy/{namespace}/extproc/extproc/0"
    log_cluster = "accesslog_als_1_0"
    decode = f"httproute/{namespace}/{name}/rule/0"
    action = {
        "cluster": decode,
        "timeout": route["spec"]["rules"][0]["timeouts"]["request"],
        "retry_policy": _retry_policy(traffic["retry"]),
        "upgrade_configs": [{"upgrade_type": "websocket"}],
    }
    routes = [
        {
            "name": "httproute/apps/other/rule/0/match/0/*",
            "match": {"path_separated_prefix": OTHER_PATH},
            "route": {"cluster": "httproute/apps/other/rule/0"},
        },
        {
            "name": f"{decode}/match/0/*",
            "match": {"prefix": "/"},
            "route": action,
            "typed_per_filter_config": {filter_name: {"@type": f"{TYPES}.config.route.v3.FilterConfig", "config": {}}},
        },
    ]
    hosts = [{"name": f"{namespace}/inference/http/*", "domains": ["*"], "routes": routes}]
    headers = client["headers"]
    assert headers["requestID"] == "Preserve"
    connections = connection_manager(
        stat_prefix="http-10080",
        common_http_protocol_options={"headers_with_underscores_action": "REJECT_REQUEST"},
        route_config={"name": f"{namespace}/inference/http", "virtual_hosts": hosts},
        merge_slashes=True,
        normalize_path=True,
        path_with_escaped_slashes_action="UNESCAPE_AND_REDIRECT",
        server_header_transformation="PASS_THROUGH",
        generate_request_id=False,
        preserve_external_request_id=True,
        early_header_mutation_extensions=[
            extension(
                "envoy.http.early_header_mutation.header_mutation",
                "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
                mutations=[{"remove": header} for header in headers["earlyRequestHeaders"]["remove"]],
            )
        ],
        http_filters=[
            {**_external_processor(filter_name, processor, service_cluster, namespace), "disabled": True},
            router(suppress_envoy_headers=True),
        ],
        access_log=list(_access_logs(one(all_objects, "EnvoyProxy", "inference"), log_cluster)),
    )
    listener = {
        "name": f"{namespace}/inference/http",
        "address": LISTEN,
        "per_connection_buffer_limit_bytes": _bytes(client["connection"]["bufferLimit"]),
        "default_filter_chain": {"filters": [connections]},
    }
    breakers = {"circuit_breakers": {"thresholds": [_breaker(processor["backendSettings"]["circuitBreaker"])]}}
    configuration = bootstrap(
        listener,
        [
            _decode_cluster(decode, decoders, traffic),
            cluster(service_cluster, [service], http2=True, **breakers),
            cluster(log_cluster, [service], http2=True),
            cluster("httproute/apps/other/rule/0", others),
        ],
    )
    for policy in of_kind(all_objects, "EnvoyPatchPolicy") if patched else ():
        apply_patch_policy(configuration, policy)
    return configuration


_BODY_MODES: Final = {
    None: "NONE",
    "Buffered": "BUFFERED",
    "BufferedPartial": "BUFFERED_PARTIAL",
    "Streamed": "STREAMED",
    "FullDuplexStreamed": "FULL_DUPLEX_STREAMED",
}


def _external_processor(name: str, processor: Json, service: str, namespace: str) -> Json:
    modes = {}
    for side in ("request", "response"):
        asked = processor["processingMode"].get(side)
        body = _BODY_MODES[(asked or {}).get("body")]
        modes[f"{side}_header_mode"] = "SKIP" if asked is None else "SEND"
        modes[f"{side}_body_mode"] = body
        modes[f"{side}_trailer_mode"] = "SEND" if body == "FULL_DUPLEX_STREAMED" else "SKIP"
    grpc = {
        "envoy_grpc": {"cluster_name": service, "authority": f"extproc.{namespace}:9002"},
        "timeout": "10s",
        "retry_policy": _retry_policy(processor["backendSettings"]["retry"]),
    }
    return extension(
        name,
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service=grpc,
        processing_mode=modes,
        failure_mode_allow=processor["failOpen"],
        message_timeout=processor["messageTimeout"],
        allow_mode_override=processor["processingMode"].get("allowModeOverride", False),
        metadata_options={"receiving_namespaces": {"untyped": processor["metadata"]["writableNamespaces"]}},
    )


def _decode_cluster(name: str, decoders: Iterable[str], traffic: Json) -> Json:
    balancer = traffic["loadBalancer"]
    assert balancer["type"] == "RoundRobin"
    round_robin = extension(
        "envoy.load_balancing_policies.round_robin", "extensions.load_balancing_policies.round_robin.v3.RoundRobin"
    )
    policy = extension(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=balancer["endpointOverride"]["extractFrom"],
        fallback_policy={"policies": [{"typed_extension_config": round_robin}]},
    )
    found = cluster(
        name,
        decoders,
        load_balancing_policy={"policies": [{"typed_extension_config": policy}]},
        circuit_breakers={"thresholds": [_breaker(traffic["circuitBreaker"])]},
    )
    found["connect_timeout"] = traffic["timeout"]["tcp"]["connectTimeout"]
    (options,) = found["typed_extension_protocol_options"].values()
    options["common_http_protocol_options"] = {"idle_timeout": traffic["timeout"]["http"]["connectionIdleTimeout"]}
    return found


def _retry_policy(retry: Json) -> Json:
    policy: Json = {"retry_on": ",".join(retry["retryOn"]["triggers"]), "num_retries": retry["numRetries"]}
    if "perRetry" in retry:
        times = retry["perRetry"]["backOff"]
        policy["retry_back_off"] = {
            "base_interval": _seconds(times["baseInterval"]),
            "max_interval": _seconds(times["maxInterval"]),
        }
    return policy


def _breaker(limits: Json) -> Json:
    return {
        "max_connections": limits["maxConnections"],
        "max_pending_requests": limits["maxPendingRequests"],
        "max_requests": limits["maxParallelRequests"],
        "max_retries": limits["maxParallelRetries"],
    }


def _access_logs(proxy: Object, als_cluster: str) -> Iterable[Json]:
    for setting in proxy["spec"]["telemetry"]["accessLog"]["settings"]:
        for sink in setting["sinks"]:
            if sink["type"] == "File":
                yield extension(
                    "envoy.access_loggers.file", "extensions.access_loggers.file.v3.FileAccessLog", path="/dev/null"
                )
                continue
            (expression,) = setting["matches"]
            cel = extension(
                "envoy.access_loggers.extension_filters.cel",
                "extensions.access_loggers.filters.cel.v3.ExpressionFilter",
                expression=expression,
            )
            common = {
                "log_name": sink["als"]["logName"],
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": als_cluster}},
            }
            log = extension(
                "envoy.access_loggers.http_grpc",
                "extensions.access_loggers.grpc.v3.HttpGrpcAccessLogConfig",
                common_config=common,
                additional_request_headers_to_log=sink["als"]["http"]["requestHeaders"],
            )
            yield {**log, "filter": {"extension_filter": cel}}


def apply_patch_policy(configuration: Json, policy: Object) -> None:
    """Envoy Gateway's rules: JSON Patch (RFC 6902), with JSONPath to find the places. Raises PatchError."""
    kinds = {"Listener": "listeners", "Cluster": "clusters"}
    for number, patch in enumerate(policy["spec"]["jsonPatches"]):
        operation = dict(patch["operation"])
        resources = configuration["static_resources"][kinds[patch["type"].rsplit(".", 1)[-1]]]
        found = [index for index, resource in enumerate(resources) if resource["name"] == patch["name"]]
        if not found:
            raise PatchError(f"patch {number}: there is no {patch['name']}")
        (index,) = found
        path = operation.pop("path", "")
        suffix = f"/{path.lstrip('/')}" if path else ""
        places = [suffix]
        if (expression := operation.pop("jsonPath", None)) is not None:
            places = [f"{match.pointer()}{suffix}" for match in jsonpath.finditer(expression, resources[index])]
        if not places:
            raise PatchError(f"patch {number}: {expression} finds nothing")
        for place in places:
            resources[index] = jsonpath.patch.apply([{**operation, "path": place}], resources[index])


def _bytes(quantity: str) -> int:
    found = re.fullmatch(r"([0-9]+)(Ki|Mi|Gi)?", quantity)
    assert found is not None, quantity
    return int(found[1]) * {None: 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}[found[2]]


def _seconds(duration: str) -> str:
    """``10ms`` -> ``0.01s``: Envoy's YAML knows seconds alone."""
    found = re.fullmatch(r"([0-9]+)(ms|s)", duration)
    assert found is not None, duration
    return f"{int(found[1]) / (1000 if found[2] == 'ms' else 1):g}s"
