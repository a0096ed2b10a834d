"""The values that metrics' labels can have.

All are exposed from the start, at 0: ``rate()`` does not see the step from nothing to 1.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Final, Generic, TypeVar, get_args

from prometheus_client import Counter, Gauge, Histogram

from extproc.configsections import ConnectorName
from extproc.fleet.engines import ROLES
from extproc.outcomes import Outcome

OTHER: Final = "other"
"""What a value that is not listed here is counted as, so that no input can make series without end."""

DECISIONS: Final = (
    *("disaggregated", "bypass", "fallback", "refused", "refused_by_engine", "client_left"),
    "answered_by_envoy",  # or by a filter in front of ours
)
BYPASS_REASONS: Final = (
    *("method", "path", "upgrade", "no_body", "content_type", "not_json", "small_prompt", "cached_prefix"),
    *("several_choices", "several_prompts", "beam_search", "prompt_logprobs", "prompt_embeds", "stored_response"),
    *("no_prefillers", "no_prefillers_for_model", "unknown_model"),
)
FALLBACK_RESULTS: Final = ("decode", "error", "out_of_bounds")
ERROR_CODES: Final = (
    *("body_too_large", "headers_too_large", "json_too_deep", "json_too_large", "body_timeout", "exchange_timeout"),
    *("unsupported_content_encoding", "unsupported_charset", "connector_params_not_accepted"),
    *("overloaded", "queue_full", "queue_timeout", "decoders_busy", "no_decoder"),
    *("refusal_too_large", "prefill_timeout", "prefill_unavailable"),
    *("unsupported_processing_mode", "internal"),
)
UNUSABLE_HANDOFFS: Final = (
    *("not_json", "no_params", "bad_params", "params_too_large", "not_remote"),
    *(
        f"{fault}_{key}"
        for key in ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
        for fault in ("missing", "bad")
    ),
)
PREFILL_RESULTS: Final = (
    *("ok", "refused", "cancelled", "timeout", "connect", "disconnected", "too_large"),
    *("status_1xx", "status_2xx", "status_3xx", "status_5xx"),
    *(f"unusable_{fault}" for fault in UNUSABLE_HANDOFFS),
)
PREFILL_TIMES: Final = ("ok", "refused", "cancelled", "timeout", OTHER)
"""Coarser: each has a histogram."""
QUEUE_REJECTIONS: Final = ("full", "timeout")
RELEASE_RESULTS: Final = ("released", "refused", "timed_out", "dropped", "left_to_timer")
TICKET_FAULTS: Final = ("oversize", "malformed", "forged", "version", "expired", "unknown_engine", "replayed")
OUTCOMES: Final = tuple(Outcome)
CONNECTOR_NAMES: Final = get_args(ConnectorName)
ENGINE_ROLES: Final = ROLES
ENGINE_STATES: Final = ("ready", "ejected", "unhealthy", "draining", "unresolved")
SOURCE_STATES: Final = ("ok", "failing")

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class Labelled(Generic[_Metric]):
    """A metric with labels of known values; use it as one of prometheus_client's: ``.labels(value).inc()``."""

    def __init__(self, metric: _Metric, *known: Collection[str]) -> None:
        """``known`` has one collection of values for each label, in the metric's order."""
        self._metric: _Metric = metric
        self._known = known
        self._children: dict[tuple[str, ...], _Metric] = {values: metric.labels(*values) for values in product(*known)}

    def labels(self, *values: str) -> _Metric:
        if (child := self._children.get(values)) is not None:
            return child
        folded = (value if value in known else OTHER for value, known in zip(values, self._known, strict=True))
        other: _Metric = self._metric.labels(*folded)
        return other
