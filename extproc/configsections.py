"""The sections of the configuration: every key, its type, its default and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from extproc.configtypes import (
    CollectorUrl,
    DnsServer,
    EngineUrl,
    HeaderName,
    Listen,
    Peer,
    ProbePath,
    RoutePath,
    Seconds,
    SecondsOrZero,
    Secret,
)

ConnectorName = Literal["nixl", "mooncake-ascend", "timer"]


class Section(BaseModel):
    """A part of the configuration. Unknown keys are refused, so that a typing mistake cannot pass for a default."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Tls(Section):
    """TLS on the gRPC port. The files are read again when they change."""

    certificate: Path
    """PEM chain of the server."""
    key: Path
    """PEM private key."""
    client_ca: Path | None = None
    """PEM roots: only clients with a certificate of these get in (mTLS)."""


class Grpc(Section):
    """Where Envoy calls the service."""

    listen: Listen = "0.0.0.0:9002"
    """Where Envoy reaches the ext_proc, access-log and endpoint-discovery services."""
    tls: Tls | None = None
    """Null: plain HTTP/2."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes; worker i listens on this port + i, and its admin port + i. Caps and queues are each worker's own."""


class Admin(Section):
    """Where operators, probes and Prometheus look: the status page, health, metrics. It asks for no password."""

    listen: Listen | None = "127.0.0.1:9003"
    """Health, metrics and fleet state over HTTP; null turns it off."""


class EngineSettings(Section):
    """What an engine is, however it is found: alone in a list, or with others behind a DNS name."""

    connector: ConnectorName | None = None
    """Overrides ``fleet.connector``."""
    lease_s: Seconds | None = None
    """Overrides ``fleet.lease_s``."""
    api_key: Secret | None = None
    """Overrides ``fleet.api_key``. Sent as a bearer token where the client sent no Authorization, and on requests that
    the service makes itself."""
    abort_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """A nixl prefiller that loads extproc's vLLM plugin: the port its rank 0 listens on for aborts."""
    models: list[str] | None = None
    """The models an engine serves; by default what its /v1/models says."""
    group: str = ""
    """Prefillers hand over to decoders of the same group only."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks behind an engine's address; requests are spread over them with X-data-parallel-rank."""
    max_inflight: Annotated[int, Field(ge=1)] | None = None
    """Overrides ``fleet.max_inflight``."""


class Engine(EngineSettings):
    """One engine: a vLLM server."""

    url: EngineUrl
    """The engine's HTTP address. A name is resolved by the service: Envoy is told addresses."""
    name: str | None = None
    """How logs and metrics call it; the URL's host:port by default."""
    drain: bool = False
    """No new work; what runs may finish."""
    side_channel_hosts: list[str] = []
    """Further addresses of the same prefiller's side channels (other nodes of a multi-node engine)."""

    @property
    def endpoint(self) -> str:
        """The URL's ``host:port``."""
        parts = urlsplit(self.url)
        return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


class EngineLists(Section):
    """The engines by role: in the configuration, and in a watched file (``fleet.file``)."""

    prefill: list[Engine] = []
    """Engines that prefill. Without any, requests run on the decoders alone."""
    decode: list[Engine] = []
    """Engines that decode."""

    @model_validator(mode="after")
    def _listed_once(self) -> Self:
        for role, engines in (("prefill", self.prefill), ("decode", self.decode)):
            seen: set[str] = set()
            for engine in engines:
                for value in {engine.endpoint, engine.name or engine.endpoint}:
                    if value in seen:
                        raise ValueError(f"{role}: {value} is listed twice")
                    seen.add(value)
        return self


class Dns(EngineSettings):
    """Engines behind a DNS name, such as a headless Kubernetes service: one for each address or SRV target."""

    role: Literal["prefill", "decode"]
    """Of all engines found there."""
    name: Annotated[str, Field(min_length=1)]
    """The name to look up."""
    type: Literal["address", "srv"] = "address"
    """``address``: A and AAAA records and ``port``; ``srv``: SRV records, which name the ports."""
    family: Literal["any", "ipv4", "ipv6"] = "any"
    """Of the addresses. Where each engine has both (a dual-stack service) name one: otherwise it is listed twice."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Of the engines at the addresses found; SRV records have their own."""
    scheme: Literal["http", "https"] = "http"
    """Of the engines' URLs. With https, their certificates must be for the addresses."""


class Health(Section):
    """Probes of the engines."""

    interval_s: Seconds = 2.0
    """From one probe of an engine to the next."""
    timeout_s: Seconds = 1.0
    """For one probe, to the end of its answer; for one reading of /metrics, too."""
    path: ProbePath = "/health"
    """What is asked for, by GET."""
    unhealthy_after: Annotated[int, Field(ge=1)] = 2
    """Failed probes in a row (no answer, or 5xx) that stop new work; one good probe brings an engine back."""


class Outlier(Section):
    """Ejection of engines whose requests fail."""

    consecutive: Annotated[int, Field(ge=1)] = 3
    """Failed requests in a row that eject an engine."""
    base_s: Seconds = 1.0
    """For how long, the first time; twice as long each further time in a row."""
    max_s: Seconds = 30.0
    """No ejection is longer than this."""


class Fleet(EngineLists):
    """The engines: listed here, in a watched file, or behind DNS names, all at once if need be."""

    connector: ConnectorName = "nixl"
    """How engine pairs move KV blocks, unless an engine says otherwise."""
    lease_s: Seconds = 30.0
    """How long a prefiller keeps a handoff (vLLM's kv_lease_duration). Older handoffs are never sent to a decoder."""
    api_key: Secret | None = None
    """The engines' key (vLLM's --api-key), unless an engine has its own."""
    resolve_s: Seconds = 5.0
    """How often engine names are looked up again; DNS discovery follows the records' TTL, but not faster than 1 s."""
    file: Path | None = None
    """A YAML file with ``prefill`` and ``decode`` lists, read again whenever it changes. A bad file changes nothing. A
    relative path, like all others here, starts at the directory that the service was started in."""
    dns: list[Dns] = []
    """Names to discover engines by."""
    dns_servers: list[DnsServer] = []
    """``address:port`` of the DNS servers for ``dns``; the system's own by default."""
    health: Health = Health()
    """Which engines are up."""
    outlier: Outlier = Outlier()
    """Which engines fail though they are up."""
    scrape_s: SecondsOrZero = 1.0
    """How often each engine's ``/metrics`` is read for its load; 0 turns it off."""
    max_inflight: dict[Literal["prefill", "decode"], Annotated[int, Field(ge=1)]] = {}
    """Cap of requests from this process on an engine, by role, unless the engine has its own."""

    @model_validator(mode="after")
    def _has_decoders(self) -> Self:
        if not (self.decode or self.file or any(entry.role == "decode" for entry in self.dns)):
            raise ValueError("decode: required, unless `file` or `dns` provide decode engines")
        return self


class Fallback(Section):
    """Bounds of ``prefill.on_failure: decode``: decoders that suddenly prefill everything would fall over."""

    max_body_bytes: Annotated[int, Field(ge=0)] = 64 * 1024
    """Larger requests get the error instead."""
    max_concurrent: Annotated[int, Field(ge=0)] = 8
    """How many may run as a fallback at once."""


class Admission(Section):
    """The queue in front of the prefillers, for when all are at their cap (``fleet.max_inflight``)."""

    queue: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait; more get 429 with Retry-After."""
    max_wait_s: Seconds = 10.0
    """A request that has waited so long gets 503 with Retry-After."""
    fair_by: HeaderName = "authorization"
    """Clients with different values of this header take turns; those with the same one queue up."""


class Prefill(Section):
    """The prefill leg: the request that the service sends to a prefiller itself."""

    timeout_s: Seconds = 60.0
    """For one attempt, from sending to the full answer."""
    connect_timeout_s: Seconds = 2.0
    """For a connection to a prefiller; the attempt counts as failed then."""
    attempts: Annotated[int, Field(ge=1, le=10)] = 2
    """How many prefillers are tried before ``on_failure``."""
    on_failure: Literal["error", "decode"] = "error"
    """``error``: 503 (504 after a timeout). ``decode``: the decoder prefills, within ``fallback``."""
    fallback: Fallback = Fallback()
    """Bounds of ``on_failure: decode``."""
    admission: Admission = Admission()
    """The queue in front of the prefillers."""
    cancel: Literal["auto", "disconnect", "finish"] = "auto"
    """What a client's hang-up does to a running prefill; ``auto`` takes what the connector says is safe."""
    max_connections: Annotated[int, Field(ge=1)] = 4096
    """To all engines together, from this process. A prefill that needs one more waits a few seconds for a place."""
    keepalive_s: Seconds = 2.0
    """Idle connections are dropped after this; well under the 5 s after which uvicorn closes them."""

    @property
    def budget_s(self) -> float:
        """The longest that waiting for a prefiller and all attempts may take together."""
        return self.timeout_s * self.attempts + self.admission.max_wait_s


PolicyName = Literal["round_robin", "least_inflight", "least_loaded", "power_of_two", "prefix_affinity"]


class Routing(Section):
    """Which requests are disaggregated, and which engines they get: docs/picking.md."""

    paths: list[RoutePath] = ["/v1/chat/completions", "/v1/completions"]
    """Exact paths that are disaggregated; all others go to a decoder untouched."""
    prefill_policy: PolicyName = "least_loaded"
    """How a prefiller is chosen among those that could take the request."""
    decode_policy: PolicyName = "least_loaded"
    """How decoders are put in order; the first one is Envoy's first choice."""
    affinity_bytes: Annotated[int, Field(ge=64)] = 2048
    """``prefix_affinity``: requests whose prompts begin with the same bytes, so many of them, go to the same engine."""
    min_prompt_bytes: Annotated[int, Field(ge=0)] = 0
    """Requests with a smaller body skip the prefiller."""
    bypass_cached_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Requests of whose prompt a decoder is expected to have this share cached, from earlier requests that this process
    sent there, skip the prefiller and go to that decoder. Null turns it off."""
    decode_choices: Annotated[int, Field(ge=1, le=16)] = 3
    """How many decoders Envoy is given, in order of preference, for a refused connection."""
    clear_route_cache: bool = False
    """Have Envoy choose the route again once the destination header is set: where a route matches on that header."""


class Limits(Section):
    """What requests may cost. A request in flight takes about three times its body of memory."""

    body_bytes: Annotated[int, Field(ge=1024, le=1 << 30)] = 32 * 1024 * 1024
    """The largest request body; a larger one gets 413. Envoy's buffer limit must leave room for what the service adds:
    1 MiB is plenty."""
    header_bytes: Annotated[int, Field(ge=1024, le=4 << 20)] = 56 * 1024
    """Of all names and values of a request's headers together; more get 431. Envoy's own limit, 60 KiB by default, must
    leave room for the few that the service adds, or requests in between get 500 from Envoy."""
    headers: Annotated[int, Field(ge=16, le=10_000)] = 90
    """How many header lines a request may have; more get 431. Envoy's own limit, 100 by default, must leave room."""
    json_depth: Annotated[int, Field(ge=8, le=512)] = 256
    """Levels of objects and arrays in a JSON body; a deeper one gets 400."""
    body_timeout_s: Seconds = 300.0
    """From a request's headers to the end of its body; a slower one gets 408."""
    exchange_s: Seconds = 600.0
    """From a request's headers to its dispatch to a decoder, whatever it waits for; a slower one gets 504."""
    in_flight: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    """Exchanges at once, those included whose tokens are still flowing; more get 503 with Retry-After."""


class Release(Section):
    """Limits of the release service (what frees a prefiller's pinned KV blocks)."""

    queue: Annotated[int, Field(ge=1)] = 10_000
    """Releases that may be under way or wait; more are dropped, and counted as dropped."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    """Releases under way at once."""
    timeout_s: Seconds = 1.0
    """For one try on one endpoint."""
    deadline_s: Seconds = 5.0
    """From the request for a release to giving up."""
    ticket_key: Secret | None = None
    """Signs tickets. All replicas need the same one; by default it is derived from the fleet's configuration."""
    ascend_message: Literal["auto", "abort", "done"] = "auto"
    """mooncake-ascend: ``abort_request_msg`` (vllm-ascend PR 14716) or ``done_recving_msg`` (stock)."""
    outcomes_from: Literal["auto", "access_log", "stream"] = "auto"
    """What tells how a request ended. ``auto``: Envoy's access log once an entry has come in, the stream until then."""
    settle_s: Seconds = 0.4
    """A stream that ends before its response headers: how long the access log has to tell why."""
    max_finishing: Annotated[int, Field(ge=0)] = 256
    """How many abandoned prefills may run to their end at once (``prefill.cancel: finish``)."""


class Life(Section):
    """The end of the process."""

    drain_s: Seconds = 30.0
    """SIGTERM to exit: running prefills and queued releases get this long."""
    notice_s: SecondsOrZero = 2.0
    """How long new streams are still served after health turned NOT_SERVING, so that Envoy's health check notices."""


class Tracing(Section):
    """OpenTelemetry traces over OTLP (gRPC); needs the extra ``extproc[otlp]``."""

    endpoint: CollectorUrl | None = None
    """The collector, like http://otel-collector:4317; null turns tracing off."""
    insecure: bool = True
    """Plain HTTP/2; false: TLS with the system's roots."""
    service_name: str = "extproc"
    """``service.name`` of the traces."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of requests that bring no sampling decision of their own (``traceparent``)."""


class Log(Section):
    """Lines on standard error: one for each request, and for what happens to engines; never a body or a secret."""

    format: Literal["console", "json"] = "console"
    """For people, or one JSON object a line."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Nothing below it is written."""


class Envoy(Section):
    """What ``extproc envoy`` needs to know to print a bootstrap, and ``extproc check`` to look at Envoy. The service
    itself does not read it."""

    listen: Listen = "0.0.0.0:8080"
    """Where clients reach Envoy."""
    admin: Listen | None = "127.0.0.1:9901"
    """Envoy's own admin port, which ``extproc check`` asks; null turns it off."""
    extproc: Peer = "127.0.0.1:9002"
    """Where Envoy reaches the service: host:port; a name is resolved by Envoy (STRICT_DNS)."""
    fail_open: bool = True
    """The service is down: true runs requests on the decoders alone, false answers 500."""
    message_timeout_s: Seconds = 5.0
    """Envoy's patience for one reply; the service asks for more while it prefills."""
    ca_file: str = "/etc/ssl/certs/ca-certificates.crt"
    """Certificate authorities that Envoy trusts for decoders with an https URL."""
    service_ca_file: str | None = None
    """The same for the service, where ``grpc.tls`` is set; ``ca_file`` by default. All paths are as Envoy sees them."""
    service_certificate: str | None = None
    """Envoy's own certificate for the service (``grpc.tls.client_ca``), with ``service_key``."""
    service_key: str | None = None
    """The key of ``service_certificate``."""
    route_timeout_s: SecondsOrZero = 0.0
    """Envoy's limit for a whole request; 0 turns it off, as long generations need."""
