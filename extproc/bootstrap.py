"""An Envoy bootstrap that fits a configuration: built from Envoy's own types, printed as commented YAML.

What the parts are for is said in :mod:`extproc.bootstrap_comments`, which are printed above the parts they explain.
"""

from __future__ import annotations

import ipaddress
import warnings
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import betterproto2
import yaml

from extproc.bootstrap_comments import COMMENTS, HEADER, annotate
from extproc.config import Config, split_listen
from extproc.replies import DESTINATION, LB_NAMESPACE, OWN_NAMESPACE

with warnings.catch_warnings():
    # The generated classes spell pydantic's validators in a way that newer releases warn about.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
    from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
    from envoy_data_plane.envoy.config.cluster import v3 as cluster
    from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
    from envoy_data_plane.envoy.config.listener import v3 as listener
    from envoy_data_plane.envoy.config.route import v3 as route
    from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
    from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
    from envoy_data_plane.envoy.extensions.clusters.common.dns.v3 import DnsLookupFamily
    from envoy_data_plane.envoy.extensions.clusters.dns.v3 import DnsCluster
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
    from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
    from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream
    from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
    from envoy_data_plane.envoy.type.v3 import Percent
    from envoy_data_plane.google.protobuf import Any as AnyMessage
    from envoy_data_plane.google.protobuf import Struct

SERVICE = "extproc"
DECODE = "decode"
REALTIME_PATH = "/v1/realtime"
CLIENT_HEADERS_REMOVED = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-data-parallel-rank",
)
CLIENT_PREFIXES_REMOVED = ("x-extproc-", "x-envoy-")

HANDOFF_BYTES = 960 * 1024
"""What the service may add to the largest body. Less than the 1 MiB by which its gRPC messages may exceed that body."""

_TIMEOUT_MARGIN_S = 15.0
_RECEIVE_S = 300.0


def render(config: Config) -> str:
    """The bootstrap as YAML that ``envoy -c`` takes, with comments."""
    values = _names_first(bootstrap(config).to_dict(casing=betterproto2.Casing.SNAKE))
    return HEADER + annotate(yaml.safe_dump(values, sort_keys=False, width=120), COMMENTS)


def bootstrap(config: Config) -> Bootstrap:
    """The same as Envoy's own type."""
    return Bootstrap(
        node=core.Node(id="extproc-gateway", cluster="extproc-gateway"),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(config)],
            clusters=[_decode_cluster(config), _service_cluster(config)],
        ),
        admin=Admin(address=_address(*split_listen(config.envoy.admin))) if config.envoy.admin else None,
    )


def _listener(config: Config) -> listener.Listener:
    manager = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=AnyMessage.pack(_connection_manager(config))
    )
    return listener.Listener(
        name="gateway",
        address=_address(*split_listen(config.envoy.listen)),
        filter_chains=[listener.FilterChain(filters=[manager])],
    )


def _connection_manager(config: Config) -> hcm.HttpConnectionManager:
    return hcm.HttpConnectionManager(
        stat_prefix="gateway",
        early_header_mutation_extensions=[
            _extension("envoy.http.early_header_mutation.header_mutation", _client_headers_removed())
        ],
        generate_request_id=False,
        preserve_external_request_id=True,
        use_remote_address=True,
        server_header_transformation=hcm.HttpConnectionManagerServerHeaderTransformation.PASS_THROUGH,
        normalize_path=False,
        merge_slashes=False,
        http_protocol_options=core.Http1ProtocolOptions(accept_http_10=True),
        stream_idle_timeout=timedelta(0),
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=timedelta(seconds=_RECEIVE_S),
        upgrade_configs=[hcm.HttpConnectionManagerUpgradeConfig(upgrade_type="websocket", enabled=False)],
        route_config=_routes(config),
        http_filters=[
            hcm.HttpFilter(
                name="envoy.filters.http.ext_proc", typed_config=AnyMessage.pack(_external_processor(config))
            ),
            hcm.HttpFilter(
                name="envoy.filters.http.router", typed_config=AnyMessage.pack(Router(suppress_envoy_headers=True))
            ),
        ],
        local_reply_config=_own_errors(),
        access_log=[
            accesslog.AccessLog(name="envoy.access_loggers.http_grpc", typed_config=AnyMessage.pack(_access_log()))
        ],
    )


def _client_headers_removed() -> early.HeaderMutation:
    by_prefix = [
        mutation.HeaderMutationRemoveOnMatch(key_matcher=StringMatcher(prefix=prefix, ignore_case=True))
        for prefix in CLIENT_PREFIXES_REMOVED
    ]
    return early.HeaderMutation(
        mutations=[
            *(mutation.HeaderMutation(remove=name) for name in CLIENT_HEADERS_REMOVED),
            *(mutation.HeaderMutation(remove_on_match=match) for match in by_prefix),
        ]
    )


def _external_processor(config: Config) -> ext_proc.ExternalProcessor:
    header, body = ext_proc.ProcessingModeHeaderSendMode, ext_proc.ProcessingModeBodySendMode
    return ext_proc.ExternalProcessor(
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=SERVICE),
            retry_policy=core.RetryPolicy(retry_on="connect-failure,refused-stream", num_retries=2),
        ),
        failure_mode_allow=config.envoy.fail_open,
        processing_mode=ext_proc.ProcessingMode(
            request_header_mode=header.SEND,
            request_body_mode=body.BUFFERED,
            request_trailer_mode=header.SKIP,
            response_header_mode=header.SEND,
            response_body_mode=body.NONE,
            response_trailer_mode=header.SKIP,
        ),
        allow_mode_override=True,
        message_timeout=timedelta(seconds=config.envoy.message_timeout_s),
        max_message_timeout=timedelta(seconds=config.prefill.budget_s + _TIMEOUT_MARGIN_S),
        mutation_rules=mutation.HeaderMutationRules(disallow_system=True, disallow_is_error=True),
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=ext_proc.MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, OWN_NAMESPACE])
        ),
    )


def _routes(config: Config) -> route.RouteConfiguration:
    retry = route.RetryPolicy(
        retry_on="connect-failure",
        num_retries=config.routing.decode_choices - 1,
        retry_back_off=route.RetryPolicyRetryBackOff(base_interval=timedelta(seconds=0.01)),
    )

    def to_decoders(**more: Any) -> route.RouteAction:
        timeout = timedelta(seconds=config.envoy.route_timeout_s)
        return route.RouteAction(cluster=DECODE, timeout=timeout, retry_policy=retry, **more)

    websocket = route.RouteActionUpgradeConfig(upgrade_type="websocket", enabled=True)
    return route.RouteConfiguration(
        name="gateway",
        virtual_hosts=[
            route.VirtualHost(
                name="engines",
                domains=["*"],
                request_body_buffer_limit=config.limits.body_bytes + HANDOFF_BYTES,
                routes=[
                    route.Route(
                        name="realtime",
                        match=route.RouteMatch(path=REALTIME_PATH),
                        route=to_decoders(upgrade_configs=[websocket]),
                    ),
                    route.Route(name="all", match=route.RouteMatch(prefix="/"), route=to_decoders()),
                ],
            )
        ],
    )


def _own_errors() -> hcm.LocalReplyConfig:
    return hcm.LocalReplyConfig(
        mappers=[
            _error_body("response.code_details.startsWith('ext_proc_error')", "The gateway's service failed."),
            _error_body("!response.code_details.startsWith('extproc_')", "%LOCAL_REPLY_BODY%"),
        ]
    )


def _error_body(condition: str, message: str) -> hcm.ResponseMapper:
    body = {"message": message, "type": "gateway_error", "param": None, "code": "%RESPONSE_CODE_DETAILS%"}
    return hcm.ResponseMapper(
        filter=accesslog.AccessLogFilter(
            extension_filter=accesslog.ExtensionFilter(
                name="envoy.access_loggers.extension_filters.cel",
                typed_config=AnyMessage.pack(ExpressionFilter(expression=condition)),
            )
        ),
        body_format_override=core.SubstitutionFormatString(
            json_format=Struct.from_dict({"error": body}), content_type="application/json"
        ),
    )


def _access_log() -> grpc_log.HttpGrpcAccessLogConfig:
    return grpc_log.HttpGrpcAccessLogConfig(
        common_config=grpc_log.CommonGrpcAccessLogConfig(
            log_name="extproc",
            grpc_service=core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=SERVICE)),
            transport_api_version=core.ApiVersion.V3,
            buffer_flush_interval=timedelta(seconds=0.05),
            buffer_size_bytes=0,
        ),
        additional_request_headers_to_log=["x-request-id"],
    )


def _decode_cluster(config: Config) -> cluster.Cluster:
    urls = [urlsplit(engine.url) for engine in config.fleet.decode]
    hosts = [(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)) for url in urls]
    secure = {host for url, (host, _) in zip(urls, hosts, strict=True) if url.scheme == "https"}
    fallback = _policy("envoy.load_balancing_policies.round_robin", RoundRobin())
    key = MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=DESTINATION)])
    policy = override_host.OverrideHost(
        override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=key)], fallback_policy=fallback
    )
    tls_sockets = [
        cluster.ClusterTransportSocketMatch(
            name=host,
            match=Struct.from_dict({"tls": host}),
            transport_socket=_tls_socket(host, config.envoy.ca_file),
        )
        for host in sorted(secure)
    ]
    return cluster.Cluster(
        name=DECODE,
        **_discovery([host for host, _ in hosts], config),
        connect_timeout=timedelta(seconds=1),
        load_assignment=_endpoints(
            DECODE,
            hosts,
            [{"tls": host} if url.scheme == "https" else None for url, (host, _) in zip(urls, hosts, strict=True)],
        ),
        circuit_breakers=_room_for(config.limits.in_flight),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": AnyMessage.pack(
                upstream.HttpProtocolOptions(
                    common_http_protocol_options=core.HttpProtocolOptions(
                        idle_timeout=timedelta(seconds=config.prefill.keepalive_s)
                    ),
                    explicit_http_config=upstream.HttpProtocolOptionsExplicitHttpConfig(
                        http_protocol_options=core.Http1ProtocolOptions()
                    ),
                )
            )
        },
        transport_socket_matches=tls_sockets,
        load_balancing_policy=_policy("envoy.load_balancing_policies.override_host", policy),
    )


def _service_cluster(config: Config) -> cluster.Cluster:
    host, port = split_listen(config.envoy.extproc)
    return cluster.Cluster(
        name=SERVICE,
        **_discovery([host], config),
        connect_timeout=timedelta(seconds=1),
        load_assignment=_endpoints(SERVICE, [(host, port + worker) for worker in range(config.grpc.workers)]),
        health_checks=[
            core.HealthCheck(
                timeout=timedelta(seconds=1),
                interval=timedelta(seconds=1),
                no_traffic_interval=timedelta(seconds=1),
                unhealthy_threshold=2,
                healthy_threshold=1,
                grpc_health_check=core.HealthCheckGrpcHealthCheck(),
            )
        ],
        circuit_breakers=_room_for(config.limits.in_flight),
        common_lb_config=cluster.ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": AnyMessage.pack(
                upstream.HttpProtocolOptions(
                    explicit_http_config=upstream.HttpProtocolOptionsExplicitHttpConfig(
                        http2_protocol_options=core.Http2ProtocolOptions(
                            connection_keepalive=core.KeepaliveSettings(
                                interval=timedelta(seconds=30), timeout=timedelta(seconds=5)
                            )
                        )
                    )
                )
            )
        },
    )


def _discovery(hosts: list[str], config: Config) -> dict[str, Any]:
    if all(_is_address(host) for host in hosts):
        return {"type": cluster.ClusterDiscoveryType.STATIC}
    dns = DnsCluster(
        dns_refresh_rate=timedelta(seconds=config.fleet.resolve_s),
        dns_lookup_family=DnsLookupFamily.V4_PREFERRED,
    )
    return {
        "cluster_type": cluster.ClusterCustomClusterType(name="envoy.clusters.dns", typed_config=AnyMessage.pack(dns))
    }


def _endpoints(
    name: str, hosts: list[tuple[str, int]], transport: list[dict[str, str] | None] | None = None
) -> endpoint.ClusterLoadAssignment:
    return endpoint.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[
            endpoint.LocalityLbEndpoints(
                lb_endpoints=[
                    endpoint.LbEndpoint(
                        endpoint=endpoint.Endpoint(address=_address(host, port)),
                        metadata=core.Metadata(
                            filter_metadata={"envoy.transport_socket_match": Struct.from_dict(match)}
                        )
                        if match
                        else None,
                    )
                    for (host, port), match in zip(hosts, transport or [None] * len(hosts), strict=True)
                ]
            )
        ],
    )


def _tls_socket(host: str, ca_file: str) -> core.TransportSocket:
    san_type = tls.SubjectAltNameMatcherSanType
    context = tls.UpstreamTlsContext(
        common_tls_context=tls.CommonTlsContext(
            alpn_protocols=["http/1.1"],
            validation_context=tls.CertificateValidationContext(
                trusted_ca=core.DataSource(filename=ca_file),
                match_typed_subject_alt_names=[
                    tls.SubjectAltNameMatcher(
                        san_type=san_type.IP_ADDRESS if _is_address(host) else san_type.DNS,
                        matcher=StringMatcher(exact=host),
                    )
                ],
            ),
        ),
        sni="" if _is_address(host) else host,
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def _room_for(requests: int) -> cluster.CircuitBreakers:
    return cluster.CircuitBreakers(
        thresholds=[
            cluster.CircuitBreakersThresholds(
                max_connections=requests, max_pending_requests=requests, max_requests=requests, max_retries=requests
            )
        ]
    )


def _policy(name: str, message: betterproto2.Message) -> cluster.LoadBalancingPolicy:
    return cluster.LoadBalancingPolicy(
        policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=_extension(name, message))]
    )


def _extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    return core.TypedExtensionConfig(name=name, typed_config=AnyMessage.pack(message))


def _address(host: str, port: int) -> core.Address:
    # A wildcard IPv6 listener takes IPv4 clients too.
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port, ipv4_compat=host == "::"))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _names_first(value: Any) -> Any:
    """The same values; in each mapping what identifies it comes first, as a reader expects."""
    if isinstance(value, list):
        return [_names_first(item) for item in value]
    if isinstance(value, dict):
        first = [key for key in ("name", "@type") if key in value]
        return {key: _names_first(value[key]) for key in (*first, *(key for key in value if key not in first))}
    return value
