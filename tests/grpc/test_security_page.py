"""docs/security.md and docs/requests.md say by which test a claim is shown: those tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
REQUESTS = (ROOT / "docs" / "requests.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE + REQUESTS)))


def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(file: str, name: str) -> None:
    assert name.startswith("test_")
    assert name in functions_of(file)


def test_every_claim_in_a_table_is_shown() -> None:
    rows = [line.strip("| ").split("|") for line in PAGE.splitlines() if re.match(r"\| (?!what .* shown by)", line)]
    assert len(rows) > 25
    for *_, tests in rows:
        assert re.fullmatch(r"(`tests/\S+::test_\w+` ?)+", tests.strip()), tests


def test_every_body_and_every_limit_is_shown() -> None:
    bodies, limits = REQUESTS.split("## Body modes")[0], REQUESTS.split("## Limits")[1].split("## Errors")[0]
    rows = [line for line in (bodies + limits).splitlines() if re.match(r"\| (?!.* shown by)", line)]
    assert len(rows) == 7 + 6
    for row in rows:
        assert re.search(r"\| (`tests/\S+::test_\w+` ?)+ ?\|$", row), row
