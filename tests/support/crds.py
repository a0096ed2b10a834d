"""Schemas of the custom resources that the manifests use: Istio, Envoy Gateway, the Gateway API and its inference
extension, the Prometheus operator.

Of the fields that exist they have those that are of use here; any other one is an error, as a misspelt one must be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Any, at_least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": at_least}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
FLAG: Final[dict[str, Any]] = {"type": "boolean"}
COUNT: Final[dict[str, Any]] = {"type": "integer", "minimum": 0}
PORT: Final[dict[str, Any]] = {"type": "integer", "minimum": 1, "maximum": 65535}
TEXTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": TEXT}
DURATION: Final[dict[str, Any]] = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
QUANTITY: Final[dict[str, Any]] = {"type": "string", "pattern": r"^[0-9]+(Ki|Mi|Gi)?$"}
ANY_OBJECT: Final[dict[str, Any]] = {"type": "object", "minProperties": 1}
METADATA: Final = _object("name", name=TEXT, namespace=TEXT, labels=TEXTS, annotations=TEXTS)


def _kind(version: str, kind: str, spec: Any) -> tuple[tuple[str, str], dict[str, Any]]:
    envelope = _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=METADATA,
        spec=spec,
    )
    return (version, kind), envelope


def _targets(*kinds: str) -> dict[str, Any]:
    return _list(_target(*kinds))


def _target(*kinds: str) -> dict[str, Any]:
    return _object("group kind name", group={"const": "gateway.networking.k8s.io"}, kind=_one_of(*kinds), name=TEXT)


def _istio() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    listener = _object(
        portNumber=PORT,
        name=TEXT,
        filterChain=_object(filter=_object("name", name=TEXT, subFilter=_object("name", name=TEXT))),
    )
    virtual_host = _object(name=TEXT, route=_object(name=TEXT, action=_one_of("ANY", "ROUTE", "REDIRECT")))
    match = {
        **_object(
            "context",
            context=_one_of("ANY", "SIDECAR_INBOUND", "SIDECAR_OUTBOUND", "GATEWAY"),
            listener=listener,
            routeConfiguration=_object(name=TEXT, portNumber=PORT, vhost=virtual_host),
            cluster=_object(name=TEXT, service=TEXT, portNumber=PORT, subset=TEXT),
        ),
        "maxProperties": 2,
    }
    operation = _one_of("MERGE", "ADD", "REMOVE", "INSERT_BEFORE", "INSERT_AFTER", "INSERT_FIRST", "REPLACE")
    places = "LISTENER FILTER_CHAIN NETWORK_FILTER HTTP_FILTER ROUTE_CONFIGURATION VIRTUAL_HOST HTTP_ROUTE CLUSTER"
    patch = _object(
        "applyTo match patch",
        applyTo=_one_of(*places.split()),
        match=match,
        patch=_object("operation value", operation=operation, value=ANY_OBJECT),
    )
    scoped = {
        **_object(
            "configPatches",
            workloadSelector=_object("labels", labels={**TEXTS, "minProperties": 1}),
            targetRefs=_targets("Gateway"),
            priority={"type": "integer"},
            configPatches=_list(patch),
        ),
        # Without either it would be for every proxy of the namespace; with both Istio refuses it.
        "oneOf": [{"required": ["workloadSelector"]}, {"required": ["targetRefs"]}],
    }
    yield _kind("networking.istio.io/v1alpha3", "EnvoyFilter", scoped)
    pool = _object(tcp=_object(connectTimeout=DURATION), http=_object(idleTimeout=DURATION))
    policy = _object(
        connectionPool=pool, tls=_object("mode", mode=_one_of("DISABLE", "SIMPLE"), insecureSkipVerify=FLAG)
    )
    rule = _object("host", host=TEXT, trafficPolicy=policy)
    yield _kind("networking.istio.io/v1", "DestinationRule", rule)


def _gateway_api() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    namespaces = _object("from", **{"from": _one_of("All", "Same", "Selector")})
    listener = _object(
        "name protocol port",
        name=TEXT,
        protocol=_one_of("HTTP", "HTTPS", "TLS", "TCP", "UDP"),
        port=PORT,
        hostname=TEXT,
        allowedRoutes=_object(namespaces=namespaces),
    )
    parameters = _object("group kind name", group=TEXT, kind=TEXT, name=TEXT)
    gateway = _object(
        "gatewayClassName listeners",
        gatewayClassName=TEXT,
        listeners=_list(listener),
        infrastructure=_object(parametersRef=parameters),
    )
    yield _kind("gateway.networking.k8s.io/v1", "Gateway", gateway)
    path = _object("type value", type=_one_of("Exact", "PathPrefix", "RegularExpression"), value=TEXT)
    rule = _object(
        "backendRefs",
        name=TEXT,
        matches=_list(_object(path=path)),
        backendRefs=_list(_object("name", group=TEXT, kind=TEXT, name=TEXT, port=PORT, weight=COUNT)),
        timeouts=_object(request=DURATION, backendRequest=DURATION),
    )
    parents = _list(_object("name", name=TEXT, namespace=TEXT, sectionName=TEXT))
    route = _object("parentRefs rules", parentRefs=parents, hostnames=_list(TEXT), rules=_list(rule))
    yield _kind("gateway.networking.k8s.io/v1", "HTTPRoute", route)
    picker = _object(
        "name port",
        group=TEXT,
        kind={"const": "Service"},
        name=TEXT,
        port=_object("number", number=PORT),
        failureMode=_one_of("FailOpen", "FailClose"),
    )
    pool = _object(
        "selector targetPorts endpointPickerRef",
        selector=_object("matchLabels", matchLabels={**TEXTS, "minProperties": 1}),
        targetPorts={**_list(_object("number", number=PORT)), "maxItems": 8},
        endpointPickerRef=picker,
    )
    yield _kind("inference.networking.k8s.io/v1", "InferencePool", pool)


def _envoy_gateway() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    version = "gateway.envoyproxy.io/v1alpha1"
    triggers = _one_of("connect-failure", "refused-stream", "reset", "5xx", "gateway-error", "retriable-status-codes")
    back_off = _object(baseInterval=DURATION, maxInterval=DURATION)
    retry = _object(
        numRetries=COUNT,
        retryOn=_object(triggers=_list(triggers), httpStatusCodes=_list(COUNT)),
        perRetry=_object(timeout=DURATION, backOff=back_off),
    )
    breaker = _object(
        maxConnections=COUNT, maxPendingRequests=COUNT, maxParallelRequests=COUNT, maxParallelRetries=COUNT
    )
    backends = _list(_object("name port", name=TEXT, port=PORT, group=TEXT, kind=TEXT))
    body = _one_of("Buffered", "BufferedPartial", "Streamed", "FullDuplexStreamed")
    side = _object(body=body, attributes=_list(TEXT))
    streamed = {"properties": {"body": {"const": "FullDuplexStreamed"}}, "required": ["body"]}
    streams = {"properties": {"request": streamed}, "required": ["request"]}
    processor = {
        **_object(
            "backendRefs",
            backendRefs=backends,
            backendSettings=_object(retry=retry, circuitBreaker=breaker),
            failOpen=FLAG,
            messageTimeout=DURATION,
            processingMode=_object(request=side, response=side, allowModeOverride=FLAG),
            metadata=_object(accessibleNamespaces=_list(TEXT), writableNamespaces=_list(TEXT)),
        ),
        # Envoy Gateway's own rule.
        "not": {
            "properties": {"failOpen": {"const": True}, "processingMode": streams},
            "required": ["failOpen", "processingMode"],
        },
    }
    routes = _targets("HTTPRoute", "GRPCRoute", "Gateway")
    extension = _object("targetRefs", targetRefs=routes, extProc={**_list(processor), "maxItems": 16})
    yield _kind(version, "EnvoyExtensionPolicy", extension)
    override = _object("extractFrom", extractFrom={**_list(_object("header", header=TEXT)), "maxItems": 10})
    balancer = _object(
        "type", type=_one_of("RoundRobin", "LeastRequest", "Random", "ConsistentHash"), endpointOverride=override
    )
    timeout = _object(
        tcp=_object(connectTimeout=DURATION),
        http=_object(requestTimeout=DURATION, connectionIdleTimeout=DURATION, maxConnectionDuration=DURATION),
    )
    traffic = _object(
        "targetRefs",
        targetRefs=routes,
        loadBalancer=balancer,
        retry=retry,
        timeout=timeout,
        circuitBreaker=breaker,
        connection=_object(bufferLimit=QUANTITY),
    )
    yield _kind(version, "BackendTrafficPolicy", traffic)
    early = _object(add=_list(ANY_OBJECT), set=_list(ANY_OBJECT), remove={**_list(TEXT), "maxItems": 64})
    headers = _object(
        earlyRequestHeaders=early,
        requestID=_one_of("PreserveOrGenerate", "Preserve", "Generate", "Disable"),
        enableEnvoyHeaders=FLAG,
    )
    client = _object(
        "targetRefs", targetRefs=_targets("Gateway"), connection=_object(bufferLimit=QUANTITY), headers=headers
    )
    yield _kind(version, "ClientTrafficPolicy", client)
    als = _object(
        "type backendRefs",
        logName=TEXT,
        type=_one_of("HTTP", "TCP"),
        backendRefs=backends,
        http=_object(requestHeaders=_list(TEXT), responseHeaders=_list(TEXT)),
    )
    sink = {
        **_object("type", type=_one_of("ALS", "File", "OpenTelemetry"), als=als, file=_object("path", path=TEXT)),
        "oneOf": [
            {"properties": {"type": {"const": "ALS"}}, "required": ["als"], "not": {"required": ["file"]}},
            {"properties": {"type": {"const": "File"}}, "required": ["file"], "not": {"required": ["als"]}},
        ],
    }
    setting = _object(
        "sinks",
        type=_one_of("Listener", "Route"),
        matches={**_list(TEXT), "maxItems": 10},
        sinks=_list(sink),
        format=ANY_OBJECT,
    )
    log = _object(settings=_list(setting), disable=FLAG)
    yield _kind(version, "EnvoyProxy", _object(telemetry=_object(accessLog=log)))
    types = [
        f"type.googleapis.com/envoy.config.{name}"
        for name in ("listener.v3.Listener", "route.v3.RouteConfiguration", "cluster.v3.Cluster")
    ]
    operation = {
        **_object("op", op=_one_of("add", "remove", "replace"), path=TEXT, jsonPath=TEXT, value={}),
        "anyOf": [{"required": ["path"]}, {"required": ["jsonPath"]}],
    }
    patch = _object("type name operation", type=_one_of(*types), name=TEXT, operation=operation)
    patches = _object(
        "type targetRef",
        type={"const": "JSONPatch"},
        targetRef=_target("Gateway"),
        jsonPatches=_list(patch),
        priority={},
    )
    yield _kind(version, "EnvoyPatchPolicy", patches)


def _prometheus_operator() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    endpoint = _object("port", port=TEXT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION)
    selector = _object("matchLabels", matchLabels={**TEXTS, "minProperties": 1})
    monitor = _object("selector endpoints", selector=selector, endpoints=_list(endpoint), namespaceSelector=ANY_OBJECT)
    yield _kind("monitoring.coreos.com/v1", "ServiceMonitor", monitor)
    alert = _object(
        "alert expr labels annotations",
        **{"alert": TEXT, "expr": TEXT, "for": DURATION, "labels": TEXTS, "annotations": TEXTS},
    )
    record = _object("record expr", record=TEXT, expr=TEXT, labels=TEXTS)
    group = _object("name rules", name=TEXT, interval=DURATION, rules=_list({"oneOf": [alert, record]}))
    yield _kind("monitoring.coreos.com/v1", "PrometheusRule", _object("groups", groups=_list(group)))


SCHEMAS: Final[Mapping[tuple[str, str], dict[str, Any]]] = dict(
    (*_istio(), *_gateway_api(), *_envoy_gateway(), *_prometheus_operator())
)
