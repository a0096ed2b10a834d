"""What the service counts, in Prometheus' terms; docs/metrics.md has the list. All labels are bounded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from extproc import __version__
from extproc.telemetry import labels
from extproc.telemetry.labels import Labelled

if TYPE_CHECKING:
    from google.protobuf.duration_pb2 import Duration

    from extproc.fleet.fleet import Fleet
    from extproc.outcomes import Outcome
    from extproc.pb.envoy.data.accesslog.v3 import accesslog_pb2

# Each set of buckets spans what its phase can take: histogram_quantile cannot see beyond the last one.
_WAIT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LEG: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
_REQUEST: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
_LAG: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """One set of metrics on its own registry: several services can live in one process (tests do that)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        self._fleet = _FleetCollector()
        registry.register(self._fleet)
        ProcessCollector(registry=registry)
        Info("extproc", "The service's version.", registry=registry).info({"version": __version__})

        self.ready = Gauge("extproc_ready", "1: takes traffic; 0: not ready, or draining.", registry=registry)
        self.exchanges = self._counter(
            "extproc_exchanges",
            "Requests, by what was done with them.",
            decision=labels.DECISIONS,
        )
        self.in_flight = Gauge(
            "extproc_exchanges_in_flight",
            "Open ext_proc streams: requests, from their headers to their last byte.",
            registry=registry,
        )
        self.bypass = self._counter(
            "extproc_bypass",
            "Requests sent to a decoder without a prefill leg.",
            reason=labels.BYPASS_REASONS,
        )
        self.fallbacks = self._counter(
            "extproc_fallbacks",
            "Requests whose prefill failed for good: prefilled by the decoder, answered with an error, or answered so "
            "because the fallback's bounds were reached.",
            result=labels.FALLBACK_RESULTS,
        )
        self.errors = self._counter(
            "extproc_errors",
            "Requests answered by the service itself, by the error's code.",
            code=labels.ERROR_CODES,
        )

        self.queue_depth = Gauge("extproc_queue_depth", "Requests waiting for a prefiller.", registry=registry)
        self.queue_seconds = Histogram(
            "extproc_queue_seconds",
            "Time in the queue, of those requests that had to wait for a prefiller.",
            buckets=_WAIT,
            registry=registry,
        )
        self.queue_rejections = self._counter(
            "extproc_queue_rejections",
            "Requests that the queue turned away: it was full (429), or they had waited too long (503).",
            reason=labels.QUEUE_REJECTIONS,
        )
        self.prefill_attempts = self._counter(
            "extproc_prefill_attempts",
            "Prefill calls, by result: ok, refused (the engine's 4xx), cancelled (the client left), or why it failed.",
            result=labels.PREFILL_RESULTS,
        )
        self.prefill_seconds = self._histogram(
            "extproc_prefill_seconds",
            "Duration of a prefill call; `other` stands for all failures but timeouts.",
            _LEG,
            result=labels.PREFILL_TIMES,
        )

        self.dispatch_seconds = self._histogram(
            "extproc_dispatch_seconds",
            "From a request's arrival to the start of its decode leg: what comes before decoding, all told.",
            _LEG,
            outcome=labels.OUTCOMES,
        )
        self.decode_first_byte_seconds = self._histogram(
            "extproc_decode_first_byte_seconds",
            "From the start of the decode leg to the first byte of the response.",
            _LEG,
            outcome=labels.OUTCOMES,
        )
        self.request_seconds = self._histogram(
            "extproc_request_seconds",
            "From a request's arrival to its end.",
            _REQUEST,
            outcome=labels.OUTCOMES,
        )
        self.outcomes = self._counter(
            "extproc_stream_outcomes",
            "How requests ended.",
            outcome=labels.OUTCOMES,
        )
        self.access_log_streams = Gauge(
            "extproc_access_log_streams",
            "Access-log streams that Envoys have open here. None anywhere: endings have to be guessed.",
            registry=registry,
        )

        self.handoffs_open = Gauge(
            "extproc_handoffs_open", "Handoffs given to Envoy and not yet decided.", registry=registry
        )
        self.handoffs_expired = Counter(
            "extproc_handoffs_expired", "Handoffs too old to be sent to a decoder.", registry=registry
        )
        self.releases = self._counter(
            "extproc_releases",
            "Handoffs whose blocks had to be freed, by result.",
            connector=labels.CONNECTOR_NAMES,
            result=labels.RELEASE_RESULTS,
        )
        self.releases_pending = Gauge(
            "extproc_releases_pending", "Releases asked for and not yet ended.", registry=registry
        )
        self.release_seconds = Histogram(
            "extproc_release_seconds",
            "From asking for a release to the engine's answer.",
            buckets=_WAIT,
            registry=registry,
        )
        self.tickets_refused = self._counter(
            "extproc_tickets_refused",
            "Tickets in the access log that were not acted on.",
            reason=labels.TICKET_FAULTS,
        )
        self.tasks = Gauge(
            "extproc_tasks",
            "Running asyncio tasks: a few in all, one for each open stream, prefill and release.",
            registry=registry,
        )
        self.tasks.set_function(_tasks)
        self.loop_lag = Histogram(
            "extproc_loop_lag_seconds",
            "How late the event loop gets to what is due.",
            buckets=_LAG,
            registry=registry,
        )

    def watch(self, fleet: Fleet) -> None:
        """Show this fleet's engines."""
        self._fleet.fleet = fleet

    def ended(self, outcome: Outcome, entry: accesslog_pb2.AccessLogCommon) -> None:
        """Time a request's phases as Envoy saw them; a phase that it did not reach has no time."""
        if entry.HasField("duration"):
            self.request_seconds.labels(outcome).observe(_seconds(entry.duration))
        if not entry.HasField("time_to_first_upstream_tx_byte"):
            return
        sent = _seconds(entry.time_to_first_upstream_tx_byte)
        self.dispatch_seconds.labels(outcome).observe(sent)
        if entry.HasField("time_to_first_upstream_rx_byte"):
            waited = _seconds(entry.time_to_first_upstream_rx_byte) - sent
            self.decode_first_byte_seconds.labels(outcome).observe(max(0.0, waited))

    def _counter(self, name: str, text: str, **known: Iterable[str]) -> Labelled[Counter]:
        return Labelled(Counter(name, text, list(known), registry=self.registry), *map(tuple, known.values()))

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], **known: Iterable[str]
    ) -> Labelled[Histogram]:
        histogram = Histogram(name, text, list(known), buckets=buckets, registry=self.registry)
        return Labelled(histogram, *map(tuple, known.values()))


class _FleetCollector(Collector):
    """Counts engines when it is asked: nothing has to be kept up to date."""

    fleet: Fleet | None = None

    def collect(self) -> Iterator[Metric]:
        engines = self.fleet.engines() if self.fleet else []
        now = time.monotonic()
        states = Tally((engine.role, engine.state(now)) for engine in engines)
        by_state = GaugeMetricFamily("extproc_engines", "Engines, by what they are fit for.", labels=["role", "state"])
        for role, state in product(labels.ENGINE_ROLES, labels.ENGINE_STATES):
            by_state.add_metric([role, state], states[role, state])
        yield by_state

        sources = GaugeMetricFamily(
            "extproc_fleet_sources",
            "Where engines come from: configuration, file and DNS names. One that fails keeps the engines that it had.",
            labels=["state"],
        )
        failing = [source.problem is not None for source in self.fleet.sources] if self.fleet else []
        for state in labels.SOURCE_STATES:
            sources.add_metric([state], failing.count(state == "failing"))
        yield sources

        requests = GaugeMetricFamily("extproc_engine_requests", "Requests that engines hold for us.", labels=["role"])
        picks = CounterMetricFamily("extproc_picks", "Engines picked for a leg.", labels=["role"])
        for role in labels.ENGINE_ROLES:
            requests.add_metric([role], sum(engine.inflight for engine in engines if engine.role == role))
            picks.add_metric([role], self.fleet.picks[role] if self.fleet else 0)
        yield requests
        yield picks


def _tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # asked from outside the event loop
        return 0


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
