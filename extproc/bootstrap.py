"""An Envoy bootstrap that fits a configuration: built from Envoy's own types, printed as commented YAML.

What the parts are for is said in :mod:`extproc.bootstrap_comments`, which are printed above the parts they explain.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from importlib.resources import files
from typing import Any

import betterproto2
import yaml

from extproc.bootstrap_clusters import DECODE, SERVICE, address, decode_cluster, room, service_cluster
from extproc.bootstrap_comments import COMMENTS, HEADER, annotate
from extproc.config import Config
from extproc.configtypes import split_listen
from extproc.connectors.base import MAX_PARAMS_BYTES
from extproc.replies import LB_NAMESPACE, OWN_NAMESPACE

with warnings.catch_warnings():
    # The generated classes spell pydantic's validators in a way that newer releases warn about.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
    from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
    from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.listener import v3 as listener
    from envoy_data_plane.envoy.config.overload import v3 as overload
    from envoy_data_plane.envoy.config.route import v3 as route
    from envoy_data_plane.envoy.extensions.access_loggers.filters.cel.v3 import ExpressionFilter
    from envoy_data_plane.envoy.extensions.access_loggers.grpc import v3 as grpc_log
    from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
    from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua
    from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
    from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
    from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early
    from envoy_data_plane.envoy.extensions.resource_monitors.downstream_connections.v3 import (
        DownstreamConnectionsConfig,
    )
    from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
    from envoy_data_plane.google.protobuf import Any as AnyMessage
    from envoy_data_plane.google.protobuf import Struct

REALTIME_PATH = "/v1/realtime"
CLIENT_HEADERS_REMOVED = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-data-parallel-rank",
)
CLIENT_PREFIXES_REMOVED = ("x-extproc-", "x-envoy-")

HANDOFF_BYTES = MAX_PARAMS_BYTES + 1024
"""What the service may add to the largest body. Less than the 1 MiB by which its gRPC messages may exceed that body."""

_TIMEOUT_MARGIN_S = 15.0

# What HTTP/2 allows at least, and Envoy's own default.
_STREAM_WINDOW_BYTES = (65_535, 16 * 1024 * 1024)


def render(config: Config, *, eds: bool = False) -> str:
    """The bootstrap as YAML that ``envoy -c`` takes, with comments. Raises ConfigError for what it cannot express.

    ``eds``: Envoy is told the decoders by the service even where the configuration lists them all.
    """
    values = _names_first(bootstrap(config, eds=eds).to_dict(casing=betterproto2.Casing.SNAKE))
    return HEADER + annotate(yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=120), COMMENTS)


def bootstrap(config: Config, *, eds: bool = False) -> Bootstrap:
    """The same as Envoy's own type."""
    return Bootstrap(
        node=core.Node(id="extproc-gateway", cluster="extproc-gateway"),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(config)],
            clusters=[decode_cluster(config, eds=eds), service_cluster(config)],
        ),
        admin=_admin(config.envoy.admin) if config.envoy.admin else None,
        overload_manager=_connection_limit(room(config)),
    )


def _admin(listen: str) -> Admin:
    return Admin(address=address(*split_listen(listen)), ignore_global_conn_limit=True)


def _connection_limit(connections: int) -> overload.OverloadManager:
    name = "envoy.resource_monitors.global_downstream_max_connections"
    limit = DownstreamConnectionsConfig(max_active_downstream_connections=connections)
    monitor = overload.ResourceMonitor(name=name, typed_config=AnyMessage.pack(limit))
    return overload.OverloadManager(resource_monitors=[monitor])


def _listener(config: Config) -> listener.Listener:
    manager = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=AnyMessage.pack(_connection_manager(config))
    )
    return listener.Listener(
        name="gateway",
        address=address(*split_listen(config.envoy.listen)),
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
        http2_protocol_options=core.Http2ProtocolOptions(initial_stream_window_size=_stream_window(config)),
        common_http_protocol_options=core.HttpProtocolOptions(max_headers_count=2 * config.limits.headers),
        max_request_headers_kb=-(-2 * config.limits.header_bytes // 1024),
        stream_idle_timeout=timedelta(0),
        request_headers_timeout=timedelta(seconds=10),
        request_timeout=timedelta(seconds=config.limits.body_timeout_s),
        upgrade_configs=[hcm.HttpConnectionManagerUpgradeConfig(upgrade_type="websocket", enabled=False)],
        route_config=_routes(config),
        http_filters=[
            hcm.HttpFilter(
                name="envoy.filters.http.ext_proc", typed_config=AnyMessage.pack(_external_processor(config))
            ),
            hcm.HttpFilter(name="envoy.filters.http.lua", typed_config=AnyMessage.pack(_guard())),
            hcm.HttpFilter(
                name="envoy.filters.http.router", typed_config=AnyMessage.pack(Router(suppress_envoy_headers=True))
            ),
        ],
        local_reply_config=_own_errors(),
        access_log=[
            accesslog.AccessLog(name="envoy.access_loggers.http_grpc", typed_config=AnyMessage.pack(_access_log()))
        ],
    )


def _stream_window(config: Config) -> int:
    """Bytes of a body that may arrive before the service has answered its headers: Envoy counts them only then."""
    least, most = _STREAM_WINDOW_BYTES
    return min(most, max(least, config.limits.body_bytes))


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


def _guard() -> Lua:
    source = files("extproc").joinpath("bootstrap_guard.lua").read_text()
    return Lua(default_source_code=core.DataSource(inline_string=source))


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
            buffer_size_bytes=16384,
            grpc_stream_retry_policy=core.RetryPolicy(
                num_retries=3,
                retry_back_off=core.BackoffStrategy(
                    base_interval=timedelta(seconds=0.02), max_interval=timedelta(seconds=0.2)
                ),
            ),
        ),
        additional_request_headers_to_log=["x-request-id"],
    )


def _extension(name: str, message: betterproto2.Message) -> core.TypedExtensionConfig:
    return core.TypedExtensionConfig(name=name, typed_config=AnyMessage.pack(message))


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are printed as they read."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _names_first(value: Any) -> Any:
    """The same values; in each mapping what identifies it comes first, as a reader expects."""
    if isinstance(value, list):
        return [_names_first(item) for item in value]
    if isinstance(value, dict):
        first = [key for key in ("name", "@type") if key in value]
        return {key: _names_first(value[key]) for key in (*first, *(key for key in value if key not in first))}
    return value
