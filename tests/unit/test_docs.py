"""docs/: reference pages are current, links lead somewhere, and what the pages name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pytest
import typer
import yaml
from prometheus_client import generate_latest
from pydantic import BaseModel, Field, SecretStr, create_model

from extproc import reference
from extproc.cli import app
from extproc.config import Config, build
from extproc.configsections import Section
from extproc.telemetry.labels import BYPASS_REASONS
from extproc.telemetry.metrics import Metrics
from tests.support.crds import SCHEMAS
from tests.support.manifests import RENDERED, validate

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
EXPOSED = generate_latest(Metrics().registry).decode()


@pytest.mark.parametrize("name", reference.PAGES)
def test_reference_pages_are_current(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert text == reference.PAGES[name](), "run: python -m extproc.reference docs"


def test_the_pages_are_written_where_asked(tmp_path: Path) -> None:
    reference.write(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"configuration.md", "metrics.md"}
    assert (tmp_path / "metrics.md").read_text() == reference.metrics()


def rows(page: str, heading: str = "") -> dict[str, list[str]]:
    """The cells of the table under a heading, by their first."""
    _, _, rest = page.partition(f"{heading}\n" if heading else "")
    table = [line for line in rest.partition("\n#")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {row[0].strip("`"): row for row in cells}


def test_every_metric_is_in_the_table_with_its_labels() -> None:
    table = rows(reference.metrics(), "| metric | type | labels | what |")
    types = dict(re.findall(r"^# TYPE (extproc_\w+) (\w+)$", EXPOSED, re.MULTILINE))
    types = {name: kind for name, kind in types.items() if not name.endswith("_created")}
    assert table.keys() == types.keys()
    assert {name: row[1].replace("info", "gauge") for name, row in table.items()} == types
    assert table["extproc_picks_total"][2] == "`role`: `prefill`, `decode`"
    assert table["extproc_queue_seconds"][2] == ""
    assert all(row[3] for row in table.values())


def test_every_key_is_in_the_reference() -> None:
    page = reference.configuration()
    assert rows(page, "## `grpc`")["workers"] == [
        "`workers`",
        "`1`",
        "integer ≥ 1, ≤ 64",
        "Processes; worker i listens on this port + i, and its admin port + i. Caps and queues are each worker's own.",
        "`EXTPROC_GRPC__WORKERS`",
    ]
    assert rows(page, "### `grpc.tls`")["key"][1:3] == ["**required**", "file"]
    assert rows(page, "### `fleet.prefill[]`, `fleet.decode[]`")["url"][1:] == [
        "**required**",
        "URL",
        "The engine's HTTP address. A name is resolved by the service: Envoy is told addresses.",
        "",
    ]
    for section, model in ((name, field.annotation) for name, field in Config.model_fields.items()):
        assert isinstance(model, type)
        assert issubclass(model, Section)
        assert rows(page, f"## `{section}`").keys() == model.model_fields.keys()
    described = [line for line in page.splitlines() if line.startswith("| `")]
    assert [line for line in described if not re.split(r"(?<!\\)\|", line)[4].strip()] == []


def test_kinds_of_values_in_words() -> None:
    fields = {
        "choice": (Literal["a", "b"] | None, None),
        "secret": (SecretStr, ...),
        "bounded": (Annotated[float, Field(gt=0, le=1 << 30)], 0.5),
        "many": (list[Annotated[int, Field(ge=1)]], []),
        "by_role": (dict[Literal["x"], int], {}),
        "switch": (bool, False),
    }
    model = create_model("Model", __base__=Section, **fields)  # type: ignore[call-overload]
    described = [reference._row(name, field, ["a.b"]) for name, field in model.model_fields.items()]
    assert [row[:3] for row in described] == [
        ("`choice`", "`null`", "`a` or `b`, or `null`"),
        ("`secret`", "**required**", "secret"),
        ("`bounded`", "`0.5`", "number > 0, ≤ 1073741824"),
        ("`many`", "`[]`", "list of integer ≥ 1"),
        ("`by_role`", "`{}`", "mapping of `x` to integer"),
        ("`switch`", "`false`", "`true` or `false`"),
    ]
    assert described[0][4] == "`EXTPROC_A__B__CHOICE`"


def test_the_names_of_variables_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    page = reference.configuration()
    monkeypatch.setenv(rows(page, "## `prefill`")["timeout_s"][4].strip("`"), "7.5")
    monkeypatch.setenv(rows(page, "### `prefill.admission`")["queue"][4].strip("`"), "3")
    monkeypatch.setenv(rows(page, "## `fleet`")["decode"][4].strip("`"), '[{"url": "http://10.0.0.8:8000"}]')
    config = build({})
    assert (config.prefill.timeout_s, config.prefill.admission.queue) == (7.5, 3)
    assert [engine.url for engine in config.fleet.decode] == ["http://10.0.0.8:8000"]


# ── what pages refer to ───────────────────────────────────────────────────────────────────────────────────────────────


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_the_readme_leads_to_every_page() -> None:
    named = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text()))
    assert named == {page.name for page in PAGES} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_metrics_that_pages_name_exist(page: Path) -> None:
    for name, label in re.findall(r"`(extproc_[a-z_]+)(?:\{(\w+))?", page.read_text()):
        names = (name, f"{name}_total", f"{name}_count")
        assert any(re.search(rf"^{one}(\{{| )", EXPOSED, re.MULTILINE) for one in names), name
        if label:
            assert re.search(rf'^{name}\{{[^}}]*{label}="', EXPOSED, re.MULTILINE), (name, label)


def keys(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every key that a configuration may have, as pages write them."""
    for name, field in model.model_fields.items():
        yield path + name
        for inner, _ in reference._models_in(field.annotation):
            yield from keys(inner, f"{path}{name}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_keys_that_pages_name_exist(page: Path) -> None:
    sections = "|".join(Config.model_fields)
    named = re.findall(rf"`((?:{sections})\.[a-z_.]+)(?=[`:=])", page.read_text())
    assert {name for name in named if not name.startswith("envoy.lb")} <= set(keys(Config))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_targets_and_options_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    for file in re.findall(r"(?<![\w/.-])((?:extproc|tests|bench|docs|envoy|fuzz|protos)/[\w/.-]*\w)", text):
        assert file == "extproc/role" or (ROOT / file).exists(), file  # a label of pods
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command, rest in re.findall(r"extproc (serve|envoy|check|probe)((?: [^\s`#(]+)*)", text):
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options


def test_concepts_say_every_reason_of_a_bypass() -> None:
    table = rows((ROOT / "docs" / "concepts.md").read_text(), "## Bypass")
    assert {reason for cell in table for reason in cell.split("`, `")} == set(BYPASS_REASONS)


def test_every_finding_of_check_is_on_the_page_and_planted_in_a_test() -> None:
    found = set()
    for file in (ROOT / "extproc" / "check").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="note" | "warning" | "error"), args=[ast.Constant(str(code)), _, _, *_]
                ):
                    found.add(code)
    table = rows((ROOT / "docs" / "operations.md").read_text(), "| code | what is wrong |")
    assert {code for cell in table for code in cell.split("`, `")} == found
    tests = "".join((ROOT / "tests" / name).read_text() for name in ("unit/test_check.py", "envoy/test_mesh_envoy.py"))
    assert {code for code in found if f'"{code}"' not in tests} == set()


def test_the_readmes_defaults_are_the_defaults() -> None:
    page = rows((ROOT / "README.md").read_text(), "## Configuration")
    config = build({"fleet": {"decode": [{"url": "http://10.0.0.8:8000"}]}})
    compared = []
    for keys_, row in page.items():
        section = keys_.partition(".")[0]
        for key, value in zip(re.findall(r"\.(\w+)", keys_), row[1].split(", "), strict=False):
            if value and value != "derived":
                assert value.strip("`") == _shown(getattr(getattr(config, section), key)), key
                compared.append(key)
    assert compared == (
        "listen listen connector lease_s timeout_s attempts on_failure prefill_policy body_bytes".split()
    )


def _shown(default: object) -> str:
    if isinstance(default, int | float) and default >= 1 << 20:
        return f"{default / (1 << 20):g} MiB"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_manifests_and_commands_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    for directory in re.findall(r"(?:apply|delete|kustomize|diff) -k envoy/([\w/-]+)", text):
        assert directory in RENDERED, directory
    for file in re.findall(r"\benvoy/[\w/.-]+\.(?:yaml|json)\b", text):
        assert (ROOT / file).is_file(), file
    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    for command in re.findall(r"^extproc (\w+)", text, re.MULTILINE):
        assert command in known | {"sim", "demo"}, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_objects_on_the_pages_are_valid(page: Path) -> None:
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for value in yaml.safe_load_all(block):
            if isinstance(value, dict) and "apiVersion" in value:
                validate(value)
            elif isinstance(value, list) and "applyTo" in value[0]:
                spec = SCHEMAS["networking.istio.io/v1alpha3", "EnvoyFilter"]["properties"]["spec"]
                jsonschema.validate(value, spec["properties"]["configPatches"])
