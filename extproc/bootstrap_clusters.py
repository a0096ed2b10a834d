"""The bootstrap's two clusters: the decoders, and the service itself."""

from __future__ import annotations

import ipaddress
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final
from urllib.parse import urlsplit

import betterproto2

from extproc.config import Config
from extproc.configtypes import split_listen
from extproc.errors import ConfigError
from extproc.replies import DESTINATION, LB_NAMESPACE

with warnings.catch_warnings():
    # The generated classes spell pydantic's validators in a way that newer releases warn about.
    warnings.simplefilter("ignore", DeprecationWarning)
    from envoy_data_plane.envoy.config.cluster import v3 as cluster
    from envoy_data_plane.envoy.config.core import v3 as core
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
    from envoy_data_plane.envoy.extensions.clusters.common.dns.v3 import DnsLookupFamily
    from envoy_data_plane.envoy.extensions.clusters.dns.v3 import DnsCluster
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
    from envoy_data_plane.envoy.extensions.load_balancing_policies.round_robin.v3 import RoundRobin
    from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream
    from envoy_data_plane.envoy.type.matcher.v3 import StringMatcher
    from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
    from envoy_data_plane.envoy.type.v3 import Percent
    from envoy_data_plane.google.protobuf import Any as AnyMessage
    from envoy_data_plane.google.protobuf import Struct

SERVICE: Final = "extproc"
DECODE: Final = "decode"

Host = tuple[str, int]

_HTTP_OPTIONS: Final = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_TLS_MARK: Final = "envoy.transport_socket_match"


def decode_cluster(config: Config, *, eds: bool = False) -> cluster.Cluster:
    """The decoders: those that the configuration lists; or, where it has them discovered or with ``eds``, those that
    the service tells.

    Raises ConfigError for discovered decoders that speak https: which name to expect is not known beforehand.
    """
    key = MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=DESTINATION)])
    policy = override_host.OverrideHost(
        override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=key)],
        fallback_policy=_policy("envoy.load_balancing_policies.round_robin", RoundRobin()),
    )
    http = upstream.HttpProtocolOptions(
        common_http_protocol_options=core.HttpProtocolOptions(
            idle_timeout=timedelta(seconds=config.prefill.keepalive_s)
        ),
        explicit_http_config=upstream.HttpProtocolOptionsExplicitHttpConfig(
            http_protocol_options=core.Http1ProtocolOptions()
        ),
    )
    return cluster.Cluster(
        name=DECODE,
        **(_told_by_the_service(config) if eds or _discovered(config) else _listed(config)),
        connect_timeout=timedelta(seconds=1),
        circuit_breakers=_breakers(room(config)),
        typed_extension_protocol_options={_HTTP_OPTIONS: AnyMessage.pack(http)},
        load_balancing_policy=_policy("envoy.load_balancing_policies.override_host", policy),
    )


def service_cluster(config: Config) -> cluster.Cluster:
    """The service, each of its workers being a host.

    Raises ConfigError for TLS without what Envoy needs for it, and for a port that leaves no room for all workers.
    """
    host, port = split_listen(config.envoy.extproc)
    if port + config.grpc.workers - 1 > 65535:
        raise ConfigError(f"envoy.extproc: {config.grpc.workers} workers need as many ports from {port} on")
    health = core.HealthCheck(
        timeout=timedelta(seconds=1),
        interval=timedelta(seconds=1),
        no_traffic_interval=timedelta(seconds=1),
        unhealthy_threshold=2,
        healthy_threshold=1,
        grpc_health_check=core.HealthCheckGrpcHealthCheck(),
    )
    # A reply that lay in a stalled connection for longer than a handoff's lease (30 s by default) would send a decoder
    # to blocks that hold another request's KV by then.
    keepalive = core.KeepaliveSettings(interval=timedelta(seconds=10), timeout=timedelta(seconds=5))
    http = upstream.HttpProtocolOptions(
        explicit_http_config=upstream.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(connection_keepalive=keepalive)
        )
    )
    return cluster.Cluster(
        name=SERVICE,
        **_discovery([host], config),
        connect_timeout=timedelta(seconds=1),
        load_assignment=_endpoints(SERVICE, [(host, port + worker) for worker in range(config.grpc.workers)]),
        health_checks=[health],
        circuit_breakers=_breakers(room(config)),
        common_lb_config=cluster.ClusterCommonLbConfig(
            healthy_panic_threshold=Percent(value=0), update_merge_window=timedelta(0)
        ),
        transport_socket=_service_tls(host, config) if config.grpc.tls else None,
        typed_extension_protocol_options={_HTTP_OPTIONS: AnyMessage.pack(http)},
    )


def address(host: str, port: int) -> core.Address:
    # A wildcard IPv6 listener takes IPv4 clients too.
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port, ipv4_compat=host == "::"))


def _discovered(config: Config) -> bool:
    return config.fleet.file is not None or any(entry.role == "decode" for entry in config.fleet.dns)


def _told_by_the_service(config: Config) -> dict[str, Any]:
    listed = [f"fleet.decode: {engine.url}" for engine in config.fleet.decode if engine.url.startswith("https:")]
    found = [
        f"fleet.dns: {entry.name}" for entry in config.fleet.dns if (entry.role, entry.scheme) == ("decode", "https")
    ]
    if listed or found:
        raise ConfigError(
            "\n".join(f"{one}: Envoy cannot speak https to decoders that are discovered" for one in listed + found)
        )
    source = core.ApiConfigSource(
        api_type=core.ApiConfigSourceApiType.GRPC,
        transport_api_version=core.ApiVersion.V3,
        grpc_services=[core.GrpcService(envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=SERVICE))],
    )
    config_source = core.ConfigSource(
        api_config_source=source, resource_api_version=core.ApiVersion.V3, initial_fetch_timeout=timedelta(seconds=5)
    )
    return {
        "type": cluster.ClusterDiscoveryType.EDS,
        "eds_cluster_config": cluster.ClusterEdsClusterConfig(eds_config=config_source),
    }


def _listed(config: Config) -> dict[str, Any]:
    urls = [urlsplit(engine.url) for engine in config.fleet.decode]
    hosts = [(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)) for url in urls]
    secure = [host if url.scheme == "https" else None for url, (host, _) in zip(urls, hosts, strict=True)]
    return {
        **_discovery([host for host, _ in hosts], config),
        "load_assignment": _endpoints(DECODE, hosts, secure),
        "transport_socket_matches": [
            cluster.ClusterTransportSocketMatch(
                name=host, match=Struct.from_dict({"tls": host}), transport_socket=_tls(host, config.envoy.ca_file)
            )
            for host in sorted({host for host in secure if host})
        ],
    }


def _discovery(hosts: Sequence[str], config: Config) -> dict[str, Any]:
    if all(_is_address(host) for host in hosts):
        return {"type": cluster.ClusterDiscoveryType.STATIC}
    dns = DnsCluster(
        dns_refresh_rate=timedelta(seconds=config.fleet.resolve_s), dns_lookup_family=DnsLookupFamily.V4_PREFERRED
    )
    return {
        "cluster_type": cluster.ClusterCustomClusterType(name="envoy.clusters.dns", typed_config=AnyMessage.pack(dns))
    }


def _endpoints(
    name: str, hosts: Sequence[Host], secure: Sequence[str | None] | None = None
) -> endpoint.ClusterLoadAssignment:
    """``secure`` has for each host the name of its TLS settings, or None for plain TCP."""
    endpoints = [
        endpoint.LbEndpoint(
            endpoint=endpoint.Endpoint(address=address(host, port)),
            metadata=core.Metadata(filter_metadata={_TLS_MARK: Struct.from_dict({"tls": mark})}) if mark else None,
        )
        for (host, port), mark in zip(hosts, secure or [None] * len(hosts), strict=True)
    ]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=endpoints)]
    )


def _service_tls(host: str, config: Config) -> core.TransportSocket:
    envoy, server = config.envoy, config.grpc.tls
    client: list[tls.TlsCertificate] = []
    if envoy.service_certificate and envoy.service_key:
        chain, key = (core.DataSource(filename=file) for file in (envoy.service_certificate, envoy.service_key))
        client = [tls.TlsCertificate(certificate_chain=chain, private_key=key)]
    elif server and server.client_ca:
        raise ConfigError("envoy.service_certificate, envoy.service_key: required, because grpc.tls.client_ca is set")
    return _tls(host, envoy.service_ca_file or envoy.ca_file, protocol="h2", client=client)


def _tls(
    host: str, ca_file: str, *, protocol: str = "http/1.1", client: Sequence[tls.TlsCertificate] = ()
) -> core.TransportSocket:
    """TLS to a server that must prove to be ``host``, by name or by address."""
    san_type = tls.SubjectAltNameMatcherSanType
    name = tls.SubjectAltNameMatcher(
        san_type=san_type.IP_ADDRESS if _is_address(host) else san_type.DNS, matcher=StringMatcher(exact=host)
    )
    context = tls.UpstreamTlsContext(
        common_tls_context=tls.CommonTlsContext(
            alpn_protocols=[protocol],
            tls_certificates=list(client),
            validation_context=tls.CertificateValidationContext(
                trusted_ca=core.DataSource(filename=ca_file), match_typed_subject_alt_names=[name]
            ),
        ),
        sni="" if _is_address(host) else host,
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=AnyMessage.pack(context))


def room(config: Config) -> int:
    """Requests and connections that Envoy lets through: more than the service takes, so that the service refuses."""
    return 2 * config.limits.in_flight * config.grpc.workers


def _breakers(requests: int) -> cluster.CircuitBreakers:
    limits = cluster.CircuitBreakersThresholds(
        max_connections=requests, max_pending_requests=requests, max_requests=requests, max_retries=requests
    )
    return cluster.CircuitBreakers(thresholds=[limits])


def _policy(name: str, message: betterproto2.Message) -> cluster.LoadBalancingPolicy:
    extension = core.TypedExtensionConfig(name=name, typed_config=AnyMessage.pack(message))
    return cluster.LoadBalancingPolicy(policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
