"""What the service counts, in Prometheus' terms. Labels come from fixed sets, so their number is bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One set of metrics on its own registry: several services can live in one process (tests do that)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()

        self.exchanges = Counter(
            "extproc_exchanges", "Exchanges by what we did with them.", ["decision"], registry=registry
        )
        self.in_flight = Gauge("extproc_exchanges_in_flight", "Open ext_proc streams.", registry=registry)
        self.bypass = Counter(
            "extproc_bypass", "Requests sent to a decoder without a prefill leg.", ["reason"], registry=registry
        )
        self.fallbacks = Counter(
            "extproc_fallbacks", "Requests whose prefill failed, by what became of them.", ["result"], registry=registry
        )
        self.errors = Counter("extproc_errors", "Requests answered by us with an error.", ["code"], registry=registry)
        self.prefill_attempts = Counter(
            "extproc_prefill_attempts", "Prefill calls by result.", ["result"], registry=registry
        )
        self.queue_depth = Gauge("extproc_queue_depth", "Requests waiting for a prefiller.", registry=registry)
        self.queue_seconds = Histogram(
            "extproc_queue_seconds", "Time spent waiting for a prefiller.", buckets=_SECONDS, registry=registry
        )
        self.queue_rejections = Counter(
            "extproc_queue_rejections", "Requests that the queue turned away.", ["reason"], registry=registry
        )
        self.outcomes = Counter(
            "extproc_stream_outcomes", "How requests ended, by Envoy's access log.", ["outcome"], registry=registry
        )
        self.releases = Counter(
            "extproc_releases",
            "Handoffs whose blocks had to be freed, by result.",
            ["connector", "result"],
            registry=registry,
        )
        self.release_seconds = Histogram(
            "extproc_release_seconds",
            "From asking for a release to the engine's answer.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.tickets_refused = Counter(
            "extproc_tickets_refused",
            "Tickets in the access log that were not acted on.",
            ["reason"],
            registry=registry,
        )
        self.handoffs_open = Gauge(
            "extproc_handoffs_open", "Handoffs dispatched and not yet decided.", registry=registry
        )
        self.handoffs_expired = Counter(
            "extproc_handoffs_expired", "Handoffs too old to be sent to a decoder.", registry=registry
        )
        self.prefill_seconds = Histogram(
            "extproc_prefill_seconds", "Duration of a prefill call.", buckets=_SECONDS, registry=registry
        )
