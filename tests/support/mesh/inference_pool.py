"""A gateway that knows InferencePool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.support.manifests import Object, of_kind
from tests.support.mesh.common import (
    DESTINATION,
    LISTEN,
    OTHER_PATH,
    TYPES,
    UNBOUNDED,
    Json,
    bootstrap,
    cluster,
    connection_manager,
    extension,
    router,
)


def inference_pool(objects: Sequence[Object], decoders: Iterable[str], service: str, others: Iterable[str]) -> Json:
    """What a gateway makes of an InferencePool, by the endpoint-picker protocol: TLS to the picker without a look at
    its certificate, full-duplex bodies both ways, the picked endpoint in ``envoy.lb`` and in the header."""
    (pool,) = of_kind(list(objects), "InferencePool")
    reference = pool["spec"]["endpointPickerRef"]
    picker = f"outbound|{reference['port']['number']}||{reference['name']}.llm.svc.cluster.local"
    processor = extension(
        "envoy.filters.http.ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": picker, "authority": f"{reference['name']}.llm.svc"}},
        failure_mode_allow=reference["failureMode"] == "FailOpen",
        processing_mode={
            f"{side}_{part}_mode": mode
            for side in ("request", "response")
            for part, mode in (("header", "SEND"), ("body", "FULL_DUPLEX_STREAMED"), ("trailer", "SEND"))
        },
        message_timeout="10s",
        metadata_options={"receiving_namespaces": {"untyped": ["envoy.lb"]}},
    )
    policy = extension(
        "envoy.load_balancing_policies.override_host",
        "extensions.load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[
            {"header": DESTINATION},
            {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}},
        ],
        fallback_policy={
            "policies": [
                {
                    "typed_extension_config": extension(
                        "envoy.load_balancing_policies.random",
                        "extensions.load_balancing_policies.random.v3.Random",
                    )
                }
            ]
        },
    )
    pool_name = f"inferencepool/{pool['metadata']['name']}"
    action = {"cluster": pool_name, "timeout": "0s", "retry_policy": {"retry_on": "connect-failure", "num_retries": 2}}
    routes = [
        {
            "name": "other",
            "match": {"prefix": OTHER_PATH},
            "route": {"cluster": "other"},
            "typed_per_filter_config": {
                "envoy.filters.http.ext_proc": {"@type": f"{TYPES}.config.route.v3.FilterConfig", "disabled": True}
            },
        },
        {"name": "llm.inference.0", "match": {"prefix": "/"}, "route": action},
    ]
    connections = connection_manager(
        stat_prefix="http",
        route_config={"name": "http", "virtual_hosts": [{"name": "*", "domains": ["*"], "routes": routes}]},
        stream_idle_timeout="0s",
        http_filters=[processor, router()],
    )
    listener = {"name": "http", "address": LISTEN, "filter_chains": [{"filters": [connections]}]}
    tls = extension(
        "envoy.transport_sockets.tls",
        "extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context={"alpn_protocols": ["h2"]},
    )
    return bootstrap(
        listener,
        [
            cluster(
                pool_name,
                decoders,
                load_balancing_policy={"policies": [{"typed_extension_config": policy}]},
                circuit_breakers=UNBOUNDED,
            ),
            cluster(picker, [service], http2=True, transport_socket=tls, circuit_breakers=UNBOUNDED),
            cluster("other", others),
        ],
    )
