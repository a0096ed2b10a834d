"""What ``/metrics`` shows, in vLLM's names and labels."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from extproc.sim.request import Status

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(float(2 ** (10 + step)) for step in range(1, 25, 2))


class Metrics:
    """One engine's registry. Every series carries ``model_name`` and ``engine``, as vLLM's do."""

    def __init__(self, model: str, *, nixl: bool) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._usage = self.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self._running = self.gauge("vllm:num_requests_running", "Number of requests in model execution batches.")
        self._waiting = self.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.")
        self._prompt_tokens = self.counter("vllm:prompt_tokens", "Number of prefill tokens processed.")
        self._generation_tokens = self.counter("vllm:generation_tokens", "Number of generation tokens processed.")
        self._preemptions = self.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.")
        self._queries = self.counter("vllm:prefix_cache_queries", "Prefix cache queries, in tokens.")
        self._hits = self.counter("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.")
        success = "Count of successfully processed requests."
        self._success = Counter(
            "vllm:request_success", success, [*self._labels, "finished_reason"], registry=self.registry
        )
        self.nixl = NixlMetrics(self) if nixl else None

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry).labels(**self._labels)

    def watch(self, usage: Callable[[], float], running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Where the gauges are read from at each scrape."""
        self._usage.set_function(usage)
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def prefix_cache(self, queried: int, hit: int) -> None:
        self._queries.inc(queried)
        self._hits.inc(hit)

    def generated(self, tokens: int) -> None:
        self._generation_tokens.inc(tokens)

    def preempted(self) -> None:
        self._preemptions.inc()

    def finished(self, status: Status, prompt_tokens: int) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._success.labels(**self._labels, finished_reason=status.value).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def value(self, name: str) -> float:
        """The sample of a series with no labels but the common ones; 0 when there is none yet."""
        return self.registry.get_sample_value(name, self._labels) or 0.0


class NixlMetrics:
    """The NIXL connector's own series. Expiry is counted by prefillers, transfers by decoders."""

    def __init__(self, parent: Metrics) -> None:
        self._duration = parent.histogram(
            "vllm:nixl_xfer_time_seconds", "Histogram of transfer duration.", _SECONDS[1:]
        )
        self._bytes = parent.histogram("vllm:nixl_bytes_transferred", "Histogram of bytes transferred.", _BYTES)
        self._failed = parent.counter("vllm:nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers.")
        self._failed_notifications = parent.counter(
            "vllm:nixl_num_failed_notifications", "Number of failed NIXL KV Cache notifications."
        )
        self._expired = parent.counter("vllm:nixl_num_kv_expired_reqs", "Number of requests that had their KV expire.")
        self._late = parent.counter(
            "vllm:nixl_num_notifications_after_expiry", "Notifications for requests that were no longer tracked."
        )

    def transferred(self, seconds: float, size: int) -> None:
        self._duration.observe(seconds)
        self._bytes.observe(size)

    def failed(self) -> None:
        self._failed.inc()

    def notification_failed(self) -> None:
        self._failed.inc()
        self._failed_notifications.inc()

    def expired(self) -> None:
        self._expired.inc()

    def notified_late(self) -> None:
        self._late.inc()
