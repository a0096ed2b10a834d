"""The reference pages of docs/, made from what they describe: ``python -m extproc.reference docs`` writes them anew."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from extproc import configtypes
from extproc.config import Config
from extproc.configenv import NESTING, PREFIX
from extproc.configsections import EngineSettings
from extproc.telemetry.metrics import Metrics

_MADE: Final = "<!-- Made by `python -m extproc.reference docs`; a test keeps it current. -->\n"

_CONFIGURATION: Final = """\
# Configuration

One YAML file, `extproc serve --config extproc.yaml`. Every key can be set from the environment too, which wins over the
file; a value that is not a plain text is written as JSON there:
`EXTPROC_FLEET__DECODE='[{"url": "http://10.0.0.8:8000"}]'`. Unknown keys and bad values are errors that name the key.
`extproc check --config extproc.yaml` looks at the engines and at Envoy as well.

Keys whose name ends in `_s` are in seconds, those in `_bytes` in bytes.
"""

_METRICS: Final = """\
# Metrics

`/metrics` on the admin port, in Prometheus' text format. All values of a label are there from the start, at 0, so that
`rate()` sees the first event; an event of a kind that is not listed counts as `other`. Beside these there are
`process_*` (CPU, memory, file descriptors).

`envoy/kubernetes/` has a [Grafana dashboard](../envoy/kubernetes/grafana-dashboard.json),
[alert rules](../envoy/kubernetes/prometheus-rules.yaml) and a
[ServiceMonitor](../envoy/kubernetes/servicemonitor.yaml). With `grpc.workers` each worker has a port of its own.

What a request's time is made of, as histograms:

| phase | metric | measured by |
|---|---|---|
| waiting for a prefiller | `extproc_queue_seconds` | the service |
| the prefill call | `extproc_prefill_seconds` | the service |
| all that comes before decoding | `extproc_dispatch_seconds` | Envoy (access log) |
| decode leg, to the first byte | `extproc_decode_first_byte_seconds` | Envoy (access log) |
| the whole request | `extproc_request_seconds` | Envoy (access log) |
"""

# What a text is that configtypes.py checks by a function of its own.
_KINDS_OF_TEXT: Final[Mapping[Any, str]] = {
    get_args(configtypes.Listen)[1]: "`host:port`",
    get_args(configtypes.Peer)[1]: "`host:port`",
    get_args(configtypes.DnsServer)[1]: "`address:port`",
    get_args(configtypes.EngineUrl)[1]: "URL",
    get_args(configtypes.CollectorUrl)[1]: "URL",
    get_args(configtypes.RoutePath)[1]: "path",
    get_args(configtypes.ProbePath)[1]: "path",
    get_args(configtypes.HeaderName)[1]: "header",
    get_args(configtypes.Secret)[1]: "secret",
}
_NAMES: Final[Mapping[Any, str]] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    Path: "file",
    SecretStr: "secret",
    types.NoneType: "`null`",
}
_BOUNDS: Final = ((Ge, "≥", "ge"), (Gt, ">", "gt"), (Le, "≤", "le"), (Lt, "<", "lt"))


def configuration() -> str:
    """docs/configuration.md."""
    return f"{_MADE}{_CONFIGURATION}{''.join(_sections())}"


def metrics() -> str:
    """docs/metrics.md."""
    rows = [("metric", "type", "labels", "what"), *_metric_rows()]
    return f"{_MADE}{_METRICS}\n{_table(rows)}"


# ── configuration ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _sections() -> Iterator[str]:
    """A heading and a table for each section; one for all places that have the same shape."""
    places: dict[type[BaseModel], list[str]] = {}
    for path, model in _models(Config, ""):
        places.setdefault(model, []).append(path)
    del places[Config]
    for model, paths in places.items():
        level = "##" if all("." not in path for path in paths) else "###"
        text = model.__dict__.get("__doc__")
        yield f"\n{level} {', '.join(f'`{path}`' for path in paths)}\n\n"
        yield f"{_plain(text)}\n\n" if text else ""
        rows: list[tuple[str, ...]] = [("key", "default", "value", "what", "environment")]
        rows += [_row(name, field, paths) for name, field in _own_first(model)]
        yield _table(rows)


def _own_first(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    """A section's fields; what all kinds of engines share comes after what is its own."""
    shared = EngineSettings.model_fields if issubclass(model, EngineSettings) else {}
    return sorted(model.model_fields.items(), key=lambda item: item[0] in shared)


def _models(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        here = f"{path}.{name}" if path else name
        for inner, several in _models_in(field.annotation):
            yield from _models(inner, f"{here}[]" if several else here)


def _models_in(annotation: Any, several: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, several
    for argument in get_args(annotation):
        yield from _models_in(argument, several or get_origin(annotation) is list)


def _row(name: str, field: FieldInfo, paths: Sequence[str]) -> tuple[str, ...]:
    variables = [
        f"`{PREFIX}{path.replace('.', NESTING).upper()}{NESTING}{name.upper()}`"
        for path in paths
        if "[]" not in path and all(several for _, several in _models_in(field.annotation))
    ]
    kind = _kind(field.annotation, field.metadata)
    return f"`{name}`", _default(field), kind, _plain(field.description or ""), ", ".join(variables)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return ""
    return f"`{json.dumps(value, default=str)}`"


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The type in words, with its bounds."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _kind(inner, metadata)
    for constraint in metadata:
        if isinstance(constraint, AfterValidator):
            return _KINDS_OF_TEXT[constraint]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return ", or ".join(_kind(argument, metadata) for argument in get_args(annotation))
    if get_origin(annotation) is list:
        (item,) = get_args(annotation)
        return f"list of {_several(item)}"
    if get_origin(annotation) is dict:
        key, value = get_args(annotation)
        return f"mapping of {_kind(key)} to {_kind(value)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _NAMES[annotation] + ("" if annotation is types.NoneType else _bounds(metadata))


def _several(annotation: Any) -> str:
    kind = _kind(annotation)
    return {"section": "sections", "text": "texts", "path": "paths"}.get(kind, kind)


def _bounds(metadata: Sequence[Any]) -> str:
    texts = [
        f" {sign} {getattr(constraint, name)}"
        for constraint in _flat(metadata)
        for kind, sign, name in _BOUNDS
        if isinstance(constraint, kind)
    ]
    return ",".join(texts)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from _flat(item.metadata) if isinstance(item, FieldInfo) else (item,)


# ── metrics ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _metric_rows() -> Iterator[tuple[str, ...]]:
    for family in Metrics().registry.collect():
        if not family.name.startswith("extproc"):
            continue
        labels: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label != "le" and value not in labels.setdefault(label, []):
                    labels[label].append(value)
        texts = [f"`{label}`: {', '.join(f'`{value}`' for value in values)}" for label, values in labels.items()]
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if family.type == "info":
            name, texts = f"{family.name}_info", ["`version`"]
        yield f"`{name}`", family.type, "; ".join(texts), family.documentation


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plain(text: str) -> str:
    """One paragraph of Markdown from a docstring."""
    return re.sub(r"\s+", " ", text.strip()).replace("``", "`")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(re.sub(" {2,}", " ", line) for line in lines) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = {"configuration.md": configuration, "metrics.md": metrics}


def write(directory: Path) -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (directory / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
