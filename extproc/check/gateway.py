"""Checks of the Envoy in front: what its own configuration dump says of the parts that the service depends on."""

from __future__ import annotations

from typing import Any, Final

import httpx

from extproc.check.envoydump import EnvoyDump, Processor
from extproc.check.findings import Findings
from extproc.config import Config
from extproc.fleet.fleet import Fleet
from extproc.replies import LB_NAMESPACE, OWN_NAMESPACE

_BODY_MODES: Final = ("BUFFERED", "FULL_DUPLEX_STREAMED")
_SHORT_S: Final = 1.0
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
        _check_retries(processor, dump, about)
        if processor.body_mode == "BUFFERED":  # in the other mode Envoy has neither time limits nor limits of bodies
            _check_patience(processor, config, about)
            _check_buffers(processor, dump, config, about)
    if processors:
        _check_access_log(processors, dump, about)
        _check_decoders(dump, fleet, about)
    if not any(finding.level in ("warning", "error") for finding in about):
        about.ok("envoy", "filter, access log, metadata, limits and decode cluster fit")
    findings.extend(dict.fromkeys(about))  # two filters of one kind have the same to be said of them


def _check_filter(processor: Processor, dump: EnvoyDump, findings: Findings) -> None:
    if processor.body_mode not in _BODY_MODES:
        text = f"request_body_mode is {processor.body_mode}: requests are refused"
        findings.error("body_mode", "envoy", text, "set it to BUFFERED or FULL_DUPLEX_STREAMED")
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


def _check_patience(processor: Processor, config: Config, findings: Findings) -> None:
    """Envoy waits for message_timeout, or for as long as the service asks for: max_message_timeout at most."""
    first = _seconds(processor.config.get("message_timeout", "0.2s"))
    longest = max(first, _seconds(processor.config.get("max_message_timeout", "0s")))
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


def _check_access_log(processors: list[Processor], dump: EnvoyDump, findings: Findings) -> None:
    if not dump.has_access_log and not all(processor.is_endpoint_picker for processor in processors):
        findings.warning(
            "no_access_log",
            "envoy",
            "no gRPC access log comes to the service: it has to guess how streams end",
            "add envoy.access_loggers.http_grpc to the connection manager: see `extproc envoy`",
        )


def _check_retries(processor: Processor, dump: EnvoyDump, findings: Findings) -> None:
    retried = {reason for route in dump.decode_routes(processor) for reason in route.retry_on}
    if unsafe := sorted(retried - _SAFE_RETRIES):
        text = f"routes retry on {', '.join(unsafe)}: the same KV params may reach two decoders"
        findings.warning("retries", "envoy", text, "set retry_on to connect-failure: params are good for one decoder")


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


def _seconds(duration: Any) -> float:
    """A protobuf duration in its JSON form: ``145s``, ``0.200s``."""
    try:
        return float(str(duration).rstrip("s"))
    except ValueError:
        return 0.0
