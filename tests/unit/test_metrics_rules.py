"""Alert rules and dashboard: every expression asks for metrics, labels and values that the service exposes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest

from extproc.telemetry.metrics import Metrics
from tests.support.manifests import ROOT, documents

DASHBOARD = json.loads((ROOT / "kubernetes/grafana-dashboard.json").read_text())
(RULES,) = documents(ROOT / "kubernetes/prometheus-rules.yaml")
ALERTS = {rule["alert"]: rule for group in RULES["spec"]["groups"] for rule in group["rules"]}
PANELS = {
    f"{panel['id']} {panel['title']} {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
}
EXPRESSIONS = {name: rule["expr"] for name, rule in ALERTS.items()} | PANELS

# What Prometheus adds to each series when it scrapes a pod.
TARGET_LABELS = {"namespace", "pod", "instance", "job"}


@cache
def exposed() -> dict[str, dict[str, set[str]]]:
    """``{sample: {label: its values}}`` of a service that has seen no request yet."""
    found: dict[str, dict[str, set[str]]] = {}
    for family in Metrics().registry.collect():
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


@cache
def kinds() -> dict[str, str]:
    return {sample.name: family.type for family in Metrics().registry.collect() for sample in family.samples}


def nodes(expression: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Every part of a parsed expression, and what is around it, innermost first."""
    yield expression, around
    inner = [getattr(expression, name, None) for name in ("expr", "lhs", "rhs", "vector_selector")]
    for part in (*inner, *(getattr(expression, "args", None) or ())):
        if part is not None:
            yield from nodes(part, (expression, *around))


def selectors(text: str) -> list[tuple[Any, tuple[Any, ...]]]:
    # Grafana's own variables stand for a duration and for a regular expression.
    parsed = promql_parser.parse(text.replace("$__rate_interval", "5m").replace("$namespace", ".*"))
    return [(node, around) for node, around in nodes(parsed) if isinstance(node, promql_parser.VectorSelector)]


def faults(text: str) -> Iterator[str]:
    """What an expression asks for in vain."""
    found = selectors(text)
    if not found:
        yield "it asks for no metric"
    for selector, around in found:
        name = selector.name
        if name not in exposed():
            yield f"there is no {name}"
            continue
        labels = exposed()[name]
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            if matcher.name not in labels:
                yield f"{name} has no label {matcher.name}"
                continue
            for value in matcher.value.split("|") if "Re" in str(matcher.op) else [matcher.value]:
                # Unknown values of ours are counted as `other`, which need not be there from the start.
                if value not in labels[matcher.name] | {"other"}:
                    yield f"{name}: {matcher.name} is never {value!r}"
        yield from misuse(name, around)
        for node in around:
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                for label in set(node.modifier.labels) - labels.keys() - TARGET_LABELS:
                    yield f"{name} has no label {label} to aggregate by"


def misuse(name: str, around: tuple[Any, ...]) -> Iterator[str]:
    calls = [node.func.name for node in around if isinstance(node, promql_parser.Call)]
    counts = kinds()[name] == "counter" or name.endswith(("_bucket", "_count", "_sum"))
    if counts and not {"rate", "increase"} & set(calls):
        yield f"{name} only ever grows: rate() or increase() is missing"
    if not counts and {"rate", "increase"} & set(calls):
        yield f"{name} goes up and down: rate() tells nothing"
    if name.endswith("_bucket") != ("histogram_quantile" in calls):
        yield f"{name}: histogram_quantile() goes with buckets"
    sums = [node for node in around if isinstance(node, promql_parser.AggregateExpr)]
    if "histogram_quantile" in calls and any(not node.modifier or "le" not in node.modifier.labels for node in sums):
        yield f"{name}: histogram_quantile() needs `le`"


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_asks_for_what_exists(name: str) -> None:
    assert list(faults(EXPRESSIONS[name])) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sum(rate(extproc_exchange_total[5m]))", "there is no extproc_exchange_total"),
        ('rate(extproc_exchanges_total{decison="bypass"}[5m])', "extproc_exchanges_total has no label decison"),
        ('rate(extproc_exchanges_total{decision="bypas"}[5m])', "extproc_exchanges_total: decision is never 'bypas'"),
        ('rate(extproc_exchanges_total{decision=~"bypass|x"}[5m])', "extproc_exchanges_total: decision is never 'x'"),
        ("sum by (reason) (rate(extproc_exchanges_total[5m]))", "extproc_exchanges_total has no label reason to"),
        ("extproc_exchanges_total > 0", "extproc_exchanges_total only ever grows"),
        ("rate(extproc_queue_depth[5m])", "extproc_queue_depth goes up and down"),
        ("rate(extproc_queue_seconds_bucket[5m])", "extproc_queue_seconds_bucket: histogram_quantile() goes with"),
        (
            "histogram_quantile(0.9, sum by (pod) (rate(extproc_queue_seconds_bucket[5m])))",
            "extproc_queue_seconds_bucket: histogram_quantile() needs `le`",
        ),
        ("vector(1)", "it asks for no metric"),
    ],
)
def test_an_expression_that_asks_in_vain_is_found(text: str, says: str) -> None:
    assert [fault[: len(says)] for fault in faults(text)] == [says]


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    asked = {selector.name for text in PANELS.values() for selector, _ in selectors(text)}
    ours = {name for name in exposed() if name.startswith("extproc_")}
    families = {re.sub("_(bucket|count|sum|created)$", "", name).removesuffix("_total") for name in ours}
    shown = {re.sub("_(bucket|count|sum)$", "", name).removesuffix("_total") for name in asked}
    assert families - shown == {"extproc_info"}


def test_alerts_say_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert label in rule["expr"] or label in TARGET_LABELS, (name, label)


# ── the dashboard ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_panels_work_with_any_data_source_and_namespace() -> None:
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "namespace"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            assert 'namespace=~"$namespace"' in target["expr"], panel["title"]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), panel["title"]


# ── Prometheus' own opinion ───────────────────────────────────────────────────────────────────────────────────────────


def promtool(*arguments: str, text: bytes = b"") -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool here (Debian: the package prometheus)")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


@pytest.fixture
def rules_file(tmp_path: Path) -> Path:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(RULES["spec"]))
    return file


def test_promtool_takes_the_rules(rules_file: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(rules_file))


def test_promtool_finds_no_fault_with_the_metrics() -> None:
    promtool("check", "metrics", text=generate_latest(Metrics().registry))


HEALTHY = {
    'extproc_ready{instance="a"}': "1x60",
    'extproc_engines{role="prefill",state="ready"}': "2x60",
    'extproc_engines{role="decode",state="ready"}': "2x60",
    'extproc_engines{role="decode",state="draining"}': "1x60",
    'extproc_fleet_sources{state="ok"}': "2x60",
    'extproc_fleet_sources{state="failing"}': "0x60",
    'extproc_exchanges_total{decision="disaggregated"}': "0+60x60",
    "extproc_access_log_streams": "2x60",
    'extproc_prefill_attempts_total{result="ok"}': "0+60x60",
    'extproc_prefill_attempts_total{result="refused"}': "0+5x60",
    'extproc_prefill_attempts_total{result="cancelled"}': "0+30x60",
    'extproc_prefill_attempts_total{result="connect"}': "0+1x60",
    'extproc_stream_outcomes_total{outcome="completed"}': "0+60x60",
    'extproc_stream_outcomes_total{outcome="client_reset"}': "0+20x60",
    'extproc_releases_total{connector="nixl",result="released"}': "0+20x60",
    'extproc_releases_total{connector="timer",result="left_to_timer"}': "0+20x60",
    'extproc_fallbacks_total{result="error"}': "0x60",
    'extproc_loop_lag_seconds_bucket{instance="a",le="0.1"}': "0+240x60",
    'extproc_loop_lag_seconds_bucket{instance="a",le="+Inf"}': "0+240x60",
}
SICK: dict[str, dict[str, str | None]] = {
    "ExtprocNoReplicaReady": {'extproc_ready{instance="a"}': None},
    "ExtprocReplicaNotReady": {'extproc_ready{instance="b"}': "0x60"},
    "ExtprocInternalErrors": {'extproc_errors_total{code="internal"}': "0x20 1x40"},
    "ExtprocWrongProcessingMode": {'extproc_errors_total{code="unsupported_processing_mode"}': "0+1x60"},
    "ExtprocLoopLag": {
        'extproc_loop_lag_seconds_bucket{instance="a",le="0.1"}': "0+200x60",
        'extproc_loop_lag_seconds_bucket{instance="a",le="0.5"}': "0+240x60",
    },
    "ExtprocNoAccessLog": {"extproc_access_log_streams": "0x60"},
    "ExtprocForgedTickets": {'extproc_tickets_refused_total{reason="forged"}': "0x20 3x40"},
    "ExtprocNoPrefiller": {'extproc_engines{role="prefill",state="ready"}': "0x60"},
    "ExtprocNoDecoder": {'extproc_engines{role="decode",state="ready"}': "0x60"},
    "ExtprocEnginesUnfit": {'extproc_engines{role="decode",state="ejected"}': "1x60"},
    "ExtprocFleetSourceFailing": {'extproc_fleet_sources{state="failing"}': "1x60"},
    "ExtprocPrefillFailures": {'extproc_prefill_attempts_total{result="timeout"}': "0+6x60"},
    "ExtprocPrefillGivenUp": {'extproc_fallbacks_total{result="error"}': "0+1x60"},
    "ExtprocQueueTurnsAway": {'extproc_queue_rejections_total{reason="full"}': "0+1x60"},
    "ExtprocDecodeFailures": {'extproc_stream_outcomes_total{outcome="decode_reset"}': "0+10x60"},
    "ExtprocBlocksLeftPinned": {'extproc_releases_total{connector="nixl",result="timed_out"}': "0+1x60"},
    "ExtprocReleasesPending": {"extproc_releases_pending": "300x60"},
    "ExtprocHandoffsExpired": {"extproc_handoffs_expired_total": "0x20 2x40"},
}


def test_every_alert_has_a_case() -> None:
    assert SICK.keys() == ALERTS.keys()


def test_alerts_fire_when_they_should_and_only_then(rules_file: Path, tmp_path: Path) -> None:
    """A minute between samples; looked at after 25 minutes. A service with few failures raises no alert at all."""
    tests = []
    for sick, changes in [("", {}), *SICK.items()]:
        series = {name: values for name, values in {**HEALTHY, **changes}.items() if values is not None}
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{alert}"}})',
                        "eval_time": "25m",
                        "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert == sick else [],
                    }
                    for alert in ALERTS
                ],
            }
        )
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules_file)], "evaluation_interval": "1m", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", str(file))
