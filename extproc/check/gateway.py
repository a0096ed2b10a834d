"""Checks of the Envoy in front: what its own configuration dump says of the parts that the service depends on."""

from __future__ import annotations

from collections import Counter
from typing import Final

import httpx

from extproc.check.envoydump import EnvoyDump, Processor, seconds
from extproc.check.findings import Findings
from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.replies import LB_NAMESPACE, OWN_NAMESPACE

_BODY_MODES: Final = ("BUFFERED", "FULL_DUPLEX_STREAMED")
_SHORT_S: Final = 1.0
_LONG_ANSWER_S: Final = 60.0
# Reasons for which nothing has reached the first decoder, so that another one may have the same params.
_SAFE_RETRIES: Final = {"connect-failure", "refused-stream"}


async def check_envoy(config: Config, fleet: Fleet, client: httpx.AsyncClient, findings: Findings) -> None:
    """Reads ``/config_dump`` and ``/clusters`` at ``envoy.admin``. An Envoy that is not there is only noted."""
    if config.envoy.admin is None:
        findings.note("envoy_unknown", "envoy", "its admin address is not configured", "set `envoy.admin` to check it")
        return
    base = f"http://{config.envoy.admin.replace('0.0.0.0:', '127.0.0.1:').replace('[::]:', '[::1]:')}"
    try:
        dump = EnvoyDump(
            (await client.get(f"{base}/config_dump")).raise_for_status().json(),
            (await client.get(f"{base}/clusters?format=json")).raise_for_status().json(),
        )
    except (httpx.HTTPError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        text = f"no configuration dump at {base}: {type(error).__name__}"
        findings.note("envoy_unknown", "envoy", text, "start Envoy, or fix `envoy.admin`")
        return
    about = Findings()
    processors = dump.processors(config.envoy.extproc)
    if not processors:
        about.error("no_filter", "envoy", "it has no ext_proc filter", "add one: see `extproc envoy`")
    for processor in processors:
        _check_filter(processor, dump, about)
        _check_service_hosts(processor, dump, about)
        _check_routes(processor, dump, about)
        if processor.body_mode == "BUFFERED":  # in the other mode Envoy has neither time limits nor limits of bodies
            _check_patience(processor, config, about)
            _check_buffers(processor, dump, config, about)
    if processors:
        _check_access_log(processors, dump, about)
        _check_decoders(dump, fleet, about)
        _check_ways(processors, dump, about)
        _check_room(processors, dump, config, about)
    if not any(finding.level in ("warning", "error") for finding in about):
        about.ok("envoy", "filter, access log, metadata, limits and decode cluster fit")
    findings.extend(dict.fromkeys(about))  # two filters of one kind have the same to be said of them


def _check_filter(processor: Processor, dump: EnvoyDump, findings: Findings) -> None:
    if processor.body_mode not in _BODY_MODES:
        text = f"request_body_mode is {processor.body_mode}: requests are refused"
        findings.error("body_mode", "envoy", text, "set it to BUFFERED or FULL_DUPLEX_STREAMED")
    if processor.header_mode("request") != "SEND":
        text = f"request_header_mode is {processor.header_mode('request')}: requests are refused"
        findings.error("header_mode", "envoy", text, "set it to SEND")
    if processor.header_mode("response") != "SEND":
        text = "response_header_mode is SKIP: no Server-Timing, and only the access log tells what decoders answer"
        findings.warning("header_mode", "envoy", text, "set it to SEND")
    _check_obedience(processor, findings)
    if processor.is_endpoint_picker:
        text = "it takes the service for an endpoint picker: every token passes through, no ticket comes back"
        findings.note("endpoint_picker", "envoy", text, "fine; the filters of docs/mesh.md cost less and release more")
    elif processor.response_body_mode != "NONE":
        text = (
            f"response_body_mode is {processor.response_body_mode}: every token passes through the service for nothing"
        )
        findings.warning("response_body", "envoy", text, "set it to NONE")
    needed = (
        [LB_NAMESPACE, OWN_NAMESPACE] if dump.has_access_log else [LB_NAMESPACE]
    )  # tickets come back in its entries
    for namespace in needed:
        if namespace not in processor.namespaces:
            findings.error(
                "namespaces",
                "envoy",
                f"dynamic metadata {namespace!r} is dropped without a word",
                f"add {namespace} to metadata_options.receiving_namespaces.untyped",
            )


def _check_obedience(processor: Processor, findings: Findings) -> None:
    """Whether Envoy does what the service says, and what it does where the service says nothing."""
    for key, ignored in (
        ("observability_mode", processor.config.get("observability_mode")),
        ("mutation_rules.disallow_all", processor.config.get("mutation_rules", {}).get("disallow_all")),
        ("disable_immediate_response", processor.config.get("disable_immediate_response")),
    ):
        if ignored:
            text = f"{key} is set: Envoy does not do what the service says"
            findings.error("ignored", "envoy", text, f"remove {key} from the filter")
    if processor.config.get("failure_mode_allow") and not processor.guarded:
        findings.warning(
            "unguarded",
            "envoy",
            "failure_mode_allow without a guard: while the service is down, clients' own KV params reach the decoders",
            "set failure_mode_allow to false, or add the Lua filter that `extproc envoy` prints",
        )


def _check_patience(processor: Processor, config: Config, findings: Findings) -> None:
    """Envoy waits for message_timeout, or for as long as the service asks for: max_message_timeout at most."""
    first = seconds(processor.config.get("message_timeout", "0.2s"))
    longest = max(first, seconds(processor.config.get("max_message_timeout", "0s")))
    if longest < config.prefill.budget_s:
        findings.error(
            "message_timeout",
            "envoy",
            f"it waits {longest:g} s for the service, prefills may take {config.prefill.budget_s:g} s",
            "raise max_message_timeout above prefill.timeout_s × prefill.attempts + prefill.admission.max_wait_s",
        )
    if first < _SHORT_S:
        text = f"message_timeout is {first:g} s: a service that is busy for a moment fails requests"
        findings.warning("short_message_timeout", "envoy", text, "set it to some seconds; prefills ask for more")


def _check_service_hosts(processor: Processor, dump: EnvoyDump, findings: Findings) -> None:
    known = dump.hosts.get(processor.cluster or "", {})
    if processor.cluster is not None and not any(known.values()):
        text = f"it finds no healthy service in its cluster {processor.cluster!r}: {', '.join(known) or 'no hosts'}"
        findings.error("service_unseen", "envoy", text, "start the service, or fix `envoy.extproc` and the TLS files")
    elif processor.cluster is not None and not dump.speaks_http2(processor.cluster):
        text = f"its cluster {processor.cluster!r} speaks HTTP/1.1: no call reaches the service"
        findings.error("service_unseen", "envoy", text, "give the cluster http2_protocol_options")
    elif processor.cluster is not None and (failed := dump.failed_connections(processor.cluster)):
        text = f"{failed} connections of its cluster {processor.cluster!r} failed, none is there: {', '.join(known)}"
        findings.warning("service_unseen", "envoy", text, "compare its address with `grpc.listen`; add a health check")


def _check_access_log(processors: list[Processor], dump: EnvoyDump, findings: Findings) -> None:
    if not dump.has_access_log and not all(processor.is_endpoint_picker for processor in processors):
        findings.warning(
            "no_access_log",
            "envoy",
            "no gRPC access log comes to the service: it has to guess how streams end",
            "add envoy.access_loggers.http_grpc to the connection manager: see `extproc envoy`",
        )
        return
    for processor in processors:
        loggers = dump.access_logs(processor)
        if dump.has_access_log and not loggers:
            text = f"its gRPC access log goes elsewhere than to the service's cluster {processor.cluster!r}"
            findings.warning("no_access_log", "envoy", text, "name that cluster in the access log's grpc_service")
        elif loggers and all(dump.is_selective(logger) for logger in loggers):
            text = "its access log has a filter: of the requests left out, the service has to guess how they end"
            findings.warning("no_access_log", "envoy", text, "remove the access log's filter")


def _check_routes(processor: Processor, dump: EnvoyDump, findings: Findings) -> None:
    routes = [route for route in dump.decode_routes(processor) if processor.sees(route)]
    if short := sorted({route.timeout for route in routes if 0 < route.timeout < _LONG_ANSWER_S}):
        text = f"routes give an answer {short[0]:g} s: longer ones are cut off"
        findings.warning("route_timeout", "envoy", text, "set the route's timeout to 0s; Envoy's default is 15s")
    retried = {reason for route in routes for reason in route.retry_on}
    if unsafe := sorted(retried - _SAFE_RETRIES):
        text = f"routes repeat requests ({', '.join(unsafe)}): the same KV params may reach two decoders"
        findings.warning(
            "retries", "envoy", text, "leave retry_on: connect-failure alone: params are good for one decoder"
        )


def _check_buffers(processor: Processor, dump: EnvoyDump, config: Config, findings: Findings) -> None:
    wanted = config.limits.body_bytes
    limits = [processor.buffered(route) for route in dump.decode_routes(processor)]
    if (smallest := min(limits, default=wanted)) < wanted:
        findings.error(
            "buffer_limit",
            "envoy",
            f"it buffers {smallest} bytes of a body, the service takes {wanted}: larger bodies get 413 from Envoy",
            "set request_body_buffer_limit on the virtual host to limits.body_bytes and 1 MiB more",
        )


def _check_decoders(dump: EnvoyDump, fleet: Fleet, findings: Findings) -> None:
    """Whether some cluster goes where the service says, and has the decoders among its hosts."""
    if not dump.decode_clusters:
        findings.error(
            "no_override_host",
            "envoy",
            "no cluster's load balancer reads the decoder that the service picks",
            "give the decode cluster the override_host policy: see `extproc envoy`",
        )
        return
    if dump.has_any_host:
        return
    listed = {host for cluster in dump.decode_clusters for host in dump.hosts.get(cluster, {})}
    missing = [e.name for e in fleet.engines("decode") if e.endpoint and e.endpoint not in listed]
    if missing:
        text = f"its decode cluster does not have {', '.join(missing)}: requests meant for them go elsewhere"
        findings.error("hosts", "envoy", text, "add them to it: `extproc envoy` prints one that fits")


def _check_ways(processors: list[Processor], dump: EnvoyDump, findings: Findings) -> None:
    """Whether any route leads through the filter to the decoders. One filter may be on many listeners."""
    if not dump.decode_clusters or any(not one.routes or not all(r.clusters for r in one.routes) for one in processors):
        return  # said already, or the dump does not tell
    ways = [(one, route) for one in processors for route in dump.decode_routes(one)]
    if not ways:
        text = f"no route leads to {', '.join(sorted(dump.decode_clusters))}, which goes where the service says"
        findings.error("no_override_host", "envoy", text, "point the route at it, or give its cluster that policy")
    elif not any(one.sees(route) for one, route in ways):
        text = "the ext_proc filter is disabled on all routes to the decoders"
        findings.error("no_filter", "envoy", text, "enable it, in the connection manager or on the route")
    seen = Counter(id(route) for one, route in ways if one.sees(route))
    if any(count > 1 for count in seen.values()):
        text = "a route has two filters of the service: each request is prefilled twice, and one handoff stays pinned"
        findings.error("twice", "envoy", text, "remove one of them")


def _check_room(processors: list[Processor], dump: EnvoyDump, config: Config, findings: Findings) -> None:
    """Each request takes a place in both clusters until its last token."""
    used = {cluster for one in processors for route in dump.decode_routes(one) for cluster in route.clusters}
    ours = {one.cluster for one in processors if one.cluster} | (used & dump.decode_clusters)
    for name in sorted(ours & dump.clusters.keys()):
        if (room := dump.room(name)) < config.limits.in_flight:
            text = f"its cluster {name!r} takes {room} requests at once, the service {config.limits.in_flight}"
            findings.warning(
                "circuit_breakers", "envoy", text, "raise circuit_breakers' max_requests and max_connections"
            )
